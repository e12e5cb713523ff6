"""The commands that look at a machine, a repository or a running server."""
