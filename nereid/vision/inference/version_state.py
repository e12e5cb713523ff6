"""Files written when a version is loaded; outside its folder, because versions never change."""

import hashlib
import shutil
import time
from pathlib import Path

from nereid.base import files

# A folder that no instance has opened for this long belongs to obsolete files, versions or options.
KEPT_S = 30 * 86_400


def folder_of(model: Path, version: int, kind: str) -> Path:
    """Return the folder for a version's files of this kind."""
    return files.state_folder(model.parent) / kind / model.name / str(version)


def digest(path: Path, *words: str) -> str:
    """Return a digest of `words` and of the folder of the ONNX file `path`, external data included."""
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update("\0".join([path.name, *words]).encode())
    for entry in sorted(path.parent.rglob("*")):
        if entry.is_file():
            with entry.open("rb") as file:
                name = str(entry.relative_to(path.parent))
                hasher.update(name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return hasher.hexdigest()


def remove_old(place: Path, suffix: str = "") -> None:
    """Remove the folders in `place` that no instance has opened for `KEPT_S`, and those with this suffix.

    Raises:
        OSError: a folder cannot be removed.
    """
    for folder in place.iterdir() if place.exists() else ():
        if (suffix and folder.suffix == suffix) or time.time() - folder.stat().st_mtime > KEPT_S:
            shutil.rmtree(folder)
