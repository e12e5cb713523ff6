"""Flags of the running server, which Triton does not pass to Python-based backends.

A stub is a child of `tritonserver`, so it reads the command line of its parent.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

# The "backend" of flags with the number of instances that `nereid serve` gives to a model after its start.
FITTED_INSTANCES = "nereid-instances"
# The "backend" of the flag with which `nereid serve` turns off the signals of images and responses.
SIGNALS = "nereid-signals"


def server_command_line() -> list[str]:
    """Return the words of the command line of this process's parent."""
    raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    return raw.decode(errors="surrogateescape").rstrip("\0").split("\0")


def measures_signals() -> bool:
    """Return whether this server measures the signals of images and responses."""
    return backend_settings(server_command_line(), SIGNALS).get("measured") != "no"


def flag_values(words: Sequence[str], flag: str) -> list[str]:
    """Return the values of every `FLAG=VALUE` and `FLAG VALUE` among `words`, in order."""
    found = []
    for word, following in pairwise([*words, ""]):
        name, joined, value = word.partition("=")
        if name == flag and (joined or following):
            found.append(value if joined else following)
    return found


def backend_settings(words: Sequence[str], backend: str) -> dict[str, str]:
    """Return the settings of `--backend-config=BACKEND,SETTING=VALUE`; the last value of a setting counts.

    A setting without a backend, `--backend-config=SETTING=VALUE`, is the default of all backends.
    """
    settings: dict[str, dict[str, str]] = {"": {}, backend: {}}
    for text in flag_values(words, "--backend-config"):
        name, value = text.partition("=")[::2]
        owner, _, setting = name.rpartition(",")
        if owner in settings:
            settings[owner][setting] = value
    return settings[""] | settings[backend]
