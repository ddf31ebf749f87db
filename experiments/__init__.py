"""The commands, tasks, metrics and reports: the only folder that knows Hydra, datasets, lm-eval and wandb."""
