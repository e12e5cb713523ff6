"""What must be on the machine before anything of ours is installed; needs the standard library only.

`make` runs this file by path with the system's Python.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SUPPORTED = ("3.11", "3.12")


def find_libpython() -> Path | None:
    """Return the directory of this interpreter's shared library, which Triton's stub embeds, or None."""
    name = f"libpython{PYTHON}.so.1.0"
    library, multiarch = (sysconfig.get_config_var(key) or "" for key in ("LIBDIR", "MULTIARCH"))
    folders = (Path(library), Path(library) / multiarch, Path("/usr/lib") / multiarch)
    return next((folder for folder in folders if (folder / name).exists()), None)


def missing() -> list[str]:
    """Name what is missing, each with what mends it; empty when setup can start."""
    if PYTHON not in SUPPORTED:
        return [
            f"Python {PYTHON}: expected {' or '.join(SUPPORTED)}; mend: make PYTHON=python{SUPPORTED[-1]} …"
        ]
    found = []
    if importlib.util.find_spec("ensurepip") is None:
        found.append(f"the venv module of Python {PYTHON}; mend: apt-get install python3-venv")
    if find_libpython() is None:
        found.append(f"libpython{PYTHON}.so.1.0; mend: apt-get install libpython{PYTHON}")
    return found


if __name__ == "__main__":
    sys.exit("".join(f"missing: {each}\n" for each in missing()).rstrip() or 0)
