"""Hydra groups: a folder a group, a YAML file a choice. Keys are constructor keywords; `_target_` is the registry."""
