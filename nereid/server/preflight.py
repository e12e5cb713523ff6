"""Requirements of the machine before installation; needs the standard library only.

`make` runs this file by path with the system's Python.
"""

from __future__ import annotations  # so that an older Python reaches the message

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


def missing(python: str, folders: tuple[Path, ...]) -> list[str]:
    """Return the missing requirements of a Python, each with the fix; empty when setup can start."""
    if python not in SUPPORTED:
        return [f"Python {' or '.join(SUPPORTED)}, found {python}; fix: install one, make PYTHON=/path/to/it"]
    found = []
    if importlib.util.find_spec("ensurepip") is None:
        found.append(f"the venv module of Python {python}; fix: apt-get install python3-venv")
    if find_libpython(python, folders) is None:
        found.append(f"libpython{python}.so.1.0; fix: apt-get install libpython{python}")
    return found


if __name__ == "__main__":
    sys.exit("".join(f"missing: {each}\n" for each in missing(PYTHON, library_folders())).rstrip() or 0)
