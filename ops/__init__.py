"""The control plane: the `nereid` command."""
