"""Hydra groups: one folder a group, one YAML file a choice. Keys are constructor keywords, `_target_` is the registry."""
