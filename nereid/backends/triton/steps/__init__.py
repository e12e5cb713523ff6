"""The last steps of models, after their networks."""
