"""Quality by lm-eval, on the path that decodes: tasks, scorers, and a run against a reference run."""
