"""Model tasks, one folder each: see `nereid.base.task_registry`."""
