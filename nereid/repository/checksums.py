"""Checksums of a version's files, in the format of `sha256sum`."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

CHECKSUMS = "SHA256SUMS"
# A file of a version folder that does not count: git's placeholder.
IGNORED = ".gitkeep"
ADDED = "was added later"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def listed_files(folder: Path) -> set[str]:
    """Return the files of a version that its checksums cover, and the checksums themselves."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return {str(path) for path in paths if not path.parts[0].startswith(IGNORED)}


def damage(folder: Path) -> str:
    """Return which published file of a version is missing or has changed; "" if none, or if none is known."""
    if not (folder / CHECKSUMS).is_file():
        return ""
    try:
        return next((change for change in changes_since_publication(folder) if ADDED not in change), "")
    except OSError as error:
        return f"'{error.filename}' cannot be read: {error.strerror}"


def changes_since_publication(folder: Path) -> Iterator[str]:
    """Yield the files of a version that were added, removed or changed after its publication."""
    files, listed = listed_files(folder), {}
    lines = (folder / CHECKSUMS).read_text(errors="replace").splitlines()
    for line in (line for line in lines if line.strip() and not line.startswith("#")):
        sha256, _, name = line.partition(" ")
        listed[name[1:]] = sha256
        # The second separator is a space, or sha256sum's mark of a binary file.
        if len(sha256) != 64 or name[:1] not in (" ", "*"):
            yield f"{CHECKSUMS}: expected a line of sha256sum, got '{line}'"
            return
    for name in sorted(files - listed.keys() - {CHECKSUMS}):
        yield f"'{name}' {ADDED}: it is not in {CHECKSUMS}"
    for name, sha256 in listed.items():
        if name not in files:
            yield f"'{name}' is missing: it is in {CHECKSUMS}"
        elif digest(folder / name) != sha256:
            yield f"'{name}' has changed: its SHA-256 differs from {CHECKSUMS}"
