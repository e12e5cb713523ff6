"""The `nereid` command: one module per command, errors mapped to exit codes."""
