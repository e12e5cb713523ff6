"""Commands that change, list or tune the models of a repository."""
