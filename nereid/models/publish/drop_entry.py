"""Entries of a drop folder: ONNX files, or folders with one, and copies of them with known digests."""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from nereid.repository.checksums import digest

PUBLISHED, REJECTED = "published", "rejected"
MAX_DEPTH = 32
SUFFIX, UNFINISHED = ".onnx", (".tmp", ".part")


class OutsideFolder(OSError):
    """A link in a drop folder leads out of it."""

    def __init__(self, path: Path, target: Path) -> None:
        super().__init__(f"'{path.name}' is a link to '{target}', outside of the folder; fix: copy the file")
        self.strerror = str(self.args[0])


@dataclass(frozen=True, slots=True)
class Entry:
    """A network in the folder with its file attributes; two equal entries were not written in between.

    Args:
        path: an ONNX file, or a folder with one.
        is_link: whether it is a link or contains one; links are replaced in place, and never moved.
        files: path below `root`, inode, size in bytes and time of change in ns of each file.
    """

    path: Path
    is_link: bool
    files: tuple[tuple[str, int, int, int], ...]

    @property
    def root(self) -> Path:
        """Return the folder that contains its files."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def model(self) -> str:
        """Return the model in its name: `classify@monday.onnx` is for `classify`."""
        return self.path.name.removesuffix(SUFFIX).partition("@")[0]

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file that is not hidden, by its path below `root`."""
        names = [name for name, *_ in self.files if not _is_hidden(Path(name))]
        return {name: self._digest(name) for name in names}

    def copy(self, name: str, target: Path) -> None:
        """Copy one of its files.

        Raises:
            OSError: the file cannot be read or written.
        """
        with self._opened(name) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)

    def _digest(self, name: str) -> str:
        with self._opened(name) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _opened(self, name: str) -> contextlib.AbstractContextManager[BufferedReader]:
        return _opened_inside(self.root / name, self.path.parent)

    def is_same_file(self, other: "Entry | None") -> bool:
        """Return whether another entry has the same files, under any names."""
        return other is not None and [each[1:] for each in self.files] == [each[1:] for each in other.files]


def is_passed_over(path: Path) -> bool:
    """Return whether a name in a drop folder says that it is not an entry, or not yet."""
    return path.name in (PUBLISHED, REJECTED) or path.name.startswith(".") or path.suffix in UNFINISHED


def why_ignored(path: Path) -> str:
    """Return why any other path cannot be an entry; "" if it can."""
    # Names must fit on a line, and into the journal, which is UTF-8.
    if not path.name.isprintable():
        return "ignored: its name has characters that cannot be printed"
    if path.suffix != SUFFIX and not path.is_dir():
        return f"ignored: expected NAME{SUFFIX}, or a folder with one"
    return ""


def read_entry(path: Path) -> Entry | None:
    """Return the entry at a path; None if it is obviously incomplete.

    Raises:
        OSError: it cannot be read.
    """
    _check_inside(path, _target(path), path.parent)
    is_folder = path.is_dir()
    if is_folder and not any(each.suffix == SUFFIX for each in path.iterdir()):
        return None
    below = _below(path) if is_folder else [path]
    if any(each.suffix in UNFINISHED for each in below):
        return None
    files = []
    for each in below:
        try:
            status = each.stat()
        except FileNotFoundError:  # renamed meanwhile, or a link whose target is still missing
            return None
        if stat.S_ISREG(status.st_mode):
            _check_inside(each, _target(each), path.parent)
            name = str(each.relative_to(path if is_folder else path.parent))
            files.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
    # The writer of an empty file has only just begun.
    if not files or any(name.endswith(SUFFIX) and not size for name, _, size, _ in files):
        return None
    return Entry(path, any(each.is_symlink() for each in (path, *below)), tuple(files))


@contextlib.contextmanager
def copied(entry: Entry, digests: Mapping[str, str], staging: Path) -> Iterator[Path | None]:
    """Provide a copy of an entry inside the context; None if the entry has changed.

    Args:
        entry: the entry to copy.
        digests: the expected SHA-256 of the copied files.
        staging: a folder for this copy only.

    Raises:
        OSError: something cannot be read or written.
    """
    copy = staging / entry.path.name
    root = copy if entry.path.is_dir() else staging
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(mode=0o700, parents=True)
    try:
        for name in digests:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                entry.copy(name, root / name)
        is_same = {name: digest(root / name) for name in digests if (root / name).exists()} == digests
        yield copy if is_same else None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def combined(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 for the digests of several files."""
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(digests.items()))
    return hashlib.sha256(os.fsencode(lines)).hexdigest()


@contextlib.contextmanager
def _opened_inside(path: Path, folder: Path) -> Iterator[BufferedReader]:
    """Open a regular file of a drop folder; a link that changes meanwhile cannot lead out of the folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check_inside(path, Path(f"/proc/self/fd/{descriptor}").readlink(), folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"'{path.name}' is not a regular file")
        yield file


def _below(folder: Path) -> list[Path]:
    """Return all paths below a folder.

    Raises:
        OSError: the folders are nested too deeply for functions that call themselves for each.
    """
    found, folders = list[Path](), [folder]
    for _ in range(MAX_DEPTH):
        inside = [path for each in folders for path in each.iterdir()]
        found += inside
        folders = [each for each in inside if each.is_dir() and not each.is_symlink()]
        if not folders:
            return sorted(found)
    raise OSError(f"expected at most {MAX_DEPTH} folders in each other, got more")


def _target(path: Path) -> Path:
    # `Path.resolve` of Python before 3.13 raises an error that is no `OSError` for a link to itself.
    return Path(os.path.realpath(path))


def _check_inside(path: Path, target: Path, folder: Path) -> None:
    if not target.is_relative_to(folder.resolve()):
        raise OutsideFolder(path, target)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
