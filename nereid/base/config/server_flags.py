"""Flags of the running server, which Triton does not pass to Python-based backends.

A stub is a child process of `tritonserver`, so it reads its parent's command line.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

# The "backend" name in flags with the instance count that `nereid serve` sets for a model after startup.
INSTANCES_BACKEND = "nereid-instances"
# The "backend" name in the flag with which `nereid serve` turns off image and response signals.
SIGNALS_BACKEND = "nereid-signals"


def server_command_line() -> list[str]:
    """Return the parent process's command line, split into arguments."""
    raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    return raw.decode(errors="surrogateescape").rstrip("\0").split("\0")


def measures_signals() -> bool:
    """Return whether this server measures image and response signals."""
    return backend_config_values(server_command_line(), SIGNALS_BACKEND).get("measured") != "no"


def flag_values(argv: Sequence[str], flag: str) -> list[str]:
    """Return the values of every `FLAG=VALUE` and `FLAG VALUE` among `argv`, in order."""
    values = []
    for argument, following in pairwise([*argv, ""]):
        name, joined, value = argument.partition("=")
        if name == flag and (joined or following):
            values.append(value if joined else following)
    return values


def backend_config_values(argv: Sequence[str], backend: str) -> dict[str, str]:
    """Return the settings from `--backend-config=BACKEND,SETTING=VALUE`; the last value of a setting wins.

    A setting without a backend, `--backend-config=SETTING=VALUE`, is the default for all backends.
    """
    settings: dict[str, dict[str, str]] = {"": {}, backend: {}}
    for text in flag_values(argv, "--backend-config"):
        name, value = text.partition("=")[::2]
        owner, _, setting = name.rpartition(",")
        if owner in settings:
            settings[owner][setting] = value
    return settings[""] | settings[backend]
