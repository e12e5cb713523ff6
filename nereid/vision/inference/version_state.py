"""Files written when a version is loaded; outside its folder, because versions never change."""

import hashlib
import shutil
import time
from pathlib import Path

from nereid.base import files

# A folder that no instance has opened for this long belongs to obsolete files, versions or options.
MAX_UNUSED_AGE_S = 30 * 86_400


def folder_of(model: Path, version: int, kind: str) -> Path:
    """Return the folder for a version's files of this kind."""
    return files.state_folder(model.parent) / kind / model.name / str(version)


def digest(path: Path, *parts: str) -> str:
    """Return a digest of `parts` and of the folder of the ONNX file `path`, external data included."""
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update("\0".join([path.name, *parts]).encode())
    for entry in sorted(path.parent.rglob("*")):
        if entry.is_file():
            with entry.open("rb") as file:
                name = str(entry.relative_to(path.parent))
                hasher.update(name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return hasher.hexdigest()


def remove_old(parent: Path, suffix: str = "") -> None:
    """Remove folders in `parent`: those that no instance has opened for long, and those with this suffix.

    Raises:
        OSError: a folder cannot be removed.
    """
    for folder in parent.iterdir() if parent.exists() else ():
        if (suffix and folder.suffix == suffix) or time.time() - folder.stat().st_mtime > MAX_UNUSED_AGE_S:
            shutil.rmtree(folder)
