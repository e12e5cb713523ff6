"""Requirements of the machine before installation; needs the standard library only.

`make` runs this file by path with the system's Python.
"""

from __future__ import annotations  # so that an older Python gets as far as the message

import importlib.util
import sys
import sysconfig
from pathlib import Path

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
SUPPORTED = ("3.11", "3.12")


def library_folders() -> tuple[Path, ...]:
    """Return the folders that may hold this interpreter's shared library."""
    library, multiarch = (sysconfig.get_config_var(key) or "" for key in ("LIBDIR", "MULTIARCH"))
    return Path(library), Path(library) / multiarch, Path("/usr/lib") / multiarch


def find_libpython(python: str, folders: tuple[Path, ...]) -> Path | None:
    """Return the folder of a Python's shared library, which Triton's stub embeds, or None."""
    return next((folder for folder in folders if (folder / f"libpython{python}.so.1.0").exists()), None)


def missing(python: str, folders: tuple[Path, ...]) -> list[tuple[str, str]]:
    """Return what a Python lacks for the embedded server, each with its fix; empty when setup can start."""
    if python not in SUPPORTED:
        versions = " or ".join(SUPPORTED)
        return [(f"Python {versions}, found {python}", "install one, then make PYTHON=/path/to/it")]
    parts = []
    if importlib.util.find_spec("ensurepip") is None:
        parts.append((f"the venv module of Python {python}", "apt-get install python3-venv"))
    if find_libpython(python, folders) is None:
        parts.append((f"libpython{python}.so.1.0", f"apt-get install libpython{python}"))
    return parts


if __name__ == "__main__":
    lacking = missing(PYTHON, library_folders())
    sys.exit("\n".join(f"missing: {part}; fix: {fix}" for part, fix in lacking) or 0)
