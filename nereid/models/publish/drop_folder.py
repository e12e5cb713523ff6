"""A drop folder: complete networks are published, and moved to `published` or `rejected`.

The published file is a copy with known digests, which no writer can change in the meantime.
"""

import contextlib
import hashlib
import itertools
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from nereid.base import files
from nereid.base.errors import InvalidConfig, OperationFailed
from nereid.base.journal import Append, Journal
from nereid.repository.checksums import digest
from nereid.server.model_control import NotReached

PUBLISHED, REJECTED = "published", "rejected"
MAX_DEPTH = 32
SUFFIX, UNFINISHED = ".onnx", (".tmp", ".part")
REASON = ".reason.txt"
JOURNAL = ".nereid-watch.jsonl"
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 60.0

WriteLine = Callable[[str], None]
# Publishes a file or folder for a model; returns the network's name and its new version.
Publish = Callable[[str, Path], tuple[str, int]]


class TemporaryFailure(OperationFailed):
    """Nothing can be published now, for a reason other than the file."""


TEMPORARY = (TemporaryFailure, NotReached, files.LockTimeout, OSError)


@dataclass(frozen=True, slots=True)
class DropEntry:
    """A network in the folder with its file attributes; equal entries mean nothing was written in between.

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
        digests = {}
        for name, *_ in self.files:
            if not any(part.startswith(".") for part in Path(name).parts):
                with self._open(name) as file:
                    digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return digests

    def copy(self, name: str, target: Path) -> None:
        """Copy one of its files."""
        with self._open(name) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)

    def _open(self, name: str) -> contextlib.AbstractContextManager[BufferedReader]:
        return _opened_inside(self.root / name, self.path.parent)

    def is_same_file(self, other: "DropEntry | None") -> bool:
        """Return whether another entry has the same files, under any names."""
        return other is not None and [file[1:] for file in self.files] == [file[1:] for file in other.files]


def _why_ignored(path: Path) -> str:
    """Return why any other path cannot be an entry; "" if it can."""
    # Names must fit on a line, and into the journal, which is UTF-8.
    if not path.name.isprintable():
        return "ignored: its name has characters that cannot be printed"
    is_entry = path.suffix == SUFFIX or path.is_dir()
    return "" if is_entry else f"ignored: expected NAME{SUFFIX}, or a folder with one"


def read_entry(path: Path) -> DropEntry | None:
    """Return the entry at a path; None if it is obviously incomplete."""
    _check_inside(path, path.parent)
    is_folder = path.is_dir()
    if is_folder and not any(child.suffix == SUFFIX for child in path.iterdir()):
        return None
    below = _below(path) if is_folder else [path]
    if any(path.suffix in UNFINISHED for path in below):
        return None
    files = []
    for member in below:
        try:
            stat_result = member.stat()
        except FileNotFoundError:  # renamed meanwhile, or a link whose target is still missing
            return None
        if stat.S_ISREG(stat_result.st_mode):
            _check_inside(member, path.parent)
            name = str(member.relative_to(path if is_folder else path.parent))
            files.append((name, stat_result.st_ino, stat_result.st_size, stat_result.st_mtime_ns))
    # The writer of an empty file has only just started.
    if not files or any(name.endswith(SUFFIX) and not size for name, _, size, _ in files):
        return None
    return DropEntry(path, any(part.is_symlink() for part in (path, *below)), tuple(files))


@contextlib.contextmanager
def copy_entry(entry: DropEntry, digests: Mapping[str, str], staging: Path) -> Iterator[Path | None]:
    """Provide a copy of an entry inside the context; None if the entry has changed.

    Args:
        entry: the entry to copy.
        digests: the expected SHA-256 of the copied files.
        staging: a folder for this copy only.
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


def _combine(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 for the digests of several files."""
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(digests.items()))
    return hashlib.sha256(os.fsencode(lines)).hexdigest()


@contextlib.contextmanager
def _opened_inside(path: Path, folder: Path) -> Iterator[BufferedReader]:
    """Open a regular file of a drop folder; a link changed at the same time cannot lead outside it."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        _check_inside(path, folder, Path(f"/proc/self/fd/{fd}").readlink())
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"'{path.name}' is not a regular file")
        yield file


def _below(folder: Path) -> list[Path]:
    """Return all paths below a folder; OSError if folders are nested too deeply."""
    paths, folders = list[Path](), [folder]
    for _ in range(MAX_DEPTH):
        inside = [path for parent in folders for path in parent.iterdir()]
        paths += inside
        folders = [path for path in inside if path.is_dir() and not path.is_symlink()]
        if not folders:
            return sorted(paths)
    raise OSError(f"expected at most {MAX_DEPTH} folders in each other, got more")


def _check_inside(path: Path, folder: Path, target: Path | None = None) -> None:
    # Before Python 3.13, `Path.resolve` raises an error other than `OSError` for a link to itself.
    target = target or Path(os.path.realpath(path))
    if not target.is_relative_to(folder.resolve()):
        raise OSError(f"'{path.name}' is a link to '{target}', outside of the folder; fix: copy the file")


class DropResult(Struct, frozen=True):
    """The result for one entry: a version of a model, or version 0 and the reason for a rejection.

    `stays` is true if the entry is still in the folder; `terms` are the limits of its examination.
    """

    time: Annotated[datetime, Meta(tz=True)]
    entry: str
    sha256: str
    model: str
    version: int
    reason: str
    stays: bool
    terms: str


@dataclass(frozen=True, slots=True)
class _Observation:
    """An entry as it was at a time in seconds, with its digests if they were computed."""

    entry: DropEntry
    since: float
    digests: Mapping[str, str] = field(default_factory=dict)


def journal_of(folder: Path) -> Journal[DropResult]:
    """Return the journal of a drop folder."""
    return Journal(folder / JOURNAL, DropResult, "nereid watch")


@dataclass
class DropFolder:
    """Publishes the complete entries of a folder, and moves them to `published` or `rejected`.

    Args:
        folder: an absolute path.
        append: appends to the folder's journal, which is locked.
        staging: a private folder for the copy that is published.
        publish: publishes an entry. An error rejects the entry, unless it or its cause is TEMPORARY.
        settle_s: how long digests must stay the same, in seconds.
        announce: receives a line per publication and rejection.
        report: receives all other lines.
        model: the model for all entries, instead of the one in their names.
        terms: limits of the examination; a rejected entry that stays is tried again under other terms.
        clock: returns monotonic seconds.
        now: returns the time.
    """

    folder: Path
    append: Append[DropResult]
    staging: Path
    publish: Publish
    settle_s: float
    announce: WriteLine
    report: WriteLine
    model: str = ""
    terms: str = ""
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def __post_init__(self) -> None:
        """Read the journal."""
        journal = journal_of(self.folder)
        self._last = {result.entry: result for result in journal.read_intact()}
        if note := journal.note_on_damage():
            self.report(note)
        self._observed: dict[str, _Observation] = {}
        self._done: dict[str, DropEntry] = {}
        self._reported: dict[str, str] = {}
        # End and length of each pause in seconds; by model, as a model's entries are published in order.
        self._pauses: dict[str, tuple[float, float]] = {}

    def step(self) -> bool:
        """Publish or reject the first complete entry; return whether there was one."""
        entries = self._find()
        self._observed = {name: observed for name, observed in self._observed.items() if name in entries}
        self._done = {name: entry for name, entry in self._done.items() if name in entries}
        self._reported = {name: line for name, line in self._reported.items() if name in (*entries, "")}
        for name, entry in entries.items():
            if entry is None or self._done.get(name) == entry or self._is_paused(entry):
                continue
            try:
                if digests := self._settled(entry):
                    return self._handle(entry, digests)
            except Exception as error:
                self._pause(entry, error)
        return False

    def _find(self) -> dict[str, DropEntry | None]:
        """Return all entries by their names, sorted; None for those that cannot be read now."""
        entries: dict[str, DropEntry | None] = {}
        try:
            paths = sorted(self.folder.iterdir())
        except OSError as error:
            self._report_once("", f"cannot read '{self.folder}': {error.strerror}")
            return entries
        for path in paths:
            if path.name in (PUBLISHED, REJECTED) or path.name.startswith(".") or path.suffix in UNFINISHED:
                continue
            try:
                if reason := _why_ignored(path):
                    entries[path.name] = None
                    self._report_once(path.name, reason)
                else:
                    entries[path.name] = read_entry(path)
            except Exception as error:  # one entry, such as folders nested too deeply, must not stop others
                entries[path.name] = None
                self._report_once(path.name, f"cannot be read: {_why(error)}")
        return entries

    def _is_paused(self, entry: DropEntry) -> bool:
        until, _ = self._pauses.get(self._model_of(entry), (-math.inf, 0))
        return self.clock() < until

    def _model_of(self, entry: DropEntry) -> str:
        return self.model or entry.model

    def _settled(self, entry: DropEntry) -> Mapping[str, str]:
        """Return the digests of an entry's files if they have not changed for `settle_s`, else none."""
        name, previous = entry.path.name, self._observed.get(entry.path.name)
        if previous is None or previous.entry != entry:
            self._observed[name] = _Observation(entry, self.clock())
            return {}
        # No digests while the file is obviously being written.
        if self.clock() - previous.since < self.settle_s / (1 if previous.digests else 2):
            return {}
        try:
            digests = entry.digests()
        except OSError as error:
            self._report_once(name, f"cannot be read: {_why(error)}")
            digests = {}
        if digests == previous.digests:
            return digests
        self._observed[name] = _Observation(entry, self.clock(), digests)
        return {}

    def _handle(self, entry: DropEntry, digests: Mapping[str, str]) -> bool:
        observed = self._observed.pop(entry.path.name)
        sha256, previous = _combine(digests), self._last.get(entry.path.name)
        if (
            previous
            and previous.stays
            and previous.sha256 == sha256
            and (previous.version or previous.terms == self.terms)
        ):
            self._done[entry.path.name] = entry
            return True
        try:
            with copy_entry(entry, digests, self.staging) as copy:
                return copy is not None and self._submit(entry, copy, sha256)
        except TEMPORARY as error:
            # The entry is still complete; the next one of its model must wait for it.
            self._observed[entry.path.name] = observed
            self._pause(entry, error)
            return False

    def _pause(self, entry: DropEntry, error: Exception) -> None:
        model = self._model_of(entry)
        pause_s = min(2 * self._pauses.get(model, (0, FIRST_PAUSE_S / 2))[1], MAX_PAUSE_S)
        self._pauses[model] = (self.clock() + pause_s, pause_s)
        self.report(
            f"{entry.path.name}: cannot be published now; next attempt in {pause_s:g} s: {_why(error)}"
        )

    def _submit(self, entry: DropEntry, copy: Path, sha256: str) -> bool:
        try:
            model, version = self.publish(self._model_of(entry), copy)
        except TEMPORARY:
            raise
        except Exception as error:  # no single file may stop the watcher or stay
            text = str(error)
            if not isinstance(error, (OperationFailed, InvalidConfig)):
                text = f"unexpected {type(error).__name__}: {text}"
            elif isinstance(error.__cause__, TEMPORARY):
                raise TemporaryFailure(text) from error
            reason = text.replace(str(copy.parent), str(self.folder)).replace("\n", " ")
            reason = reason.encode(errors="replace").decode()
            is_there = self._move_away(entry, REJECTED, f"-{self.now():%Y%m%dT%H%M%SZ}", reason)
            self._remember(entry, sha256, self._model_of(entry), 0, reason, is_there)
            self.announce(f"{entry.path.name}: rejected: {reason}")
        else:
            is_there = self._move_away(entry, PUBLISHED, f"-v{version}")
            self._remember(entry, sha256, model, version, "", is_there)
            self.announce(f"{entry.path.name}: published as version {version} of '{model}'")
        self._pauses.pop(self._model_of(entry), None)
        return True

    def _move_away(self, entry: DropEntry, where: str, suffix: str, reason: str = "") -> bool:
        """Move an entry, unless it is a link or was replaced; return whether it is still there."""
        try:
            with _held_folder(self.folder / where) as folder:
                target = _free_name(folder, entry.path, suffix)
                if not entry.is_link:
                    entry.path.rename(target)
                    # A new file may have taken its place just before the rename, and yet another after it.
                    if not entry.is_same_file(read_entry(target)) and not os.path.lexists(entry.path):
                        target.rename(entry.path)
                        return False
                if reason:
                    self._write_reason(entry.path.name, folder / f"{target.name}{REASON}", reason)
                return entry.is_link
        except OSError as error:
            if os.path.lexists(entry.path):
                self.report(f"{entry.path.name}: cannot be moved to '{where}' and stays: {_why(error)}")
                return True
        return False

    def _write_reason(self, name: str, path: Path, reason: str) -> None:
        try:
            with path.open("x", encoding="utf-8") as file:  # never through a link of that name
                file.write(f"{reason}\n")
        except OSError as error:
            self.report(f"{name}: cannot write the reason of its rejection: {_why(error)}")

    def _remember(
        self, entry: DropEntry, sha256: str, model: str, version: int, reason: str, is_there: bool
    ) -> None:
        name = entry.path.name
        result = DropResult(self.now(), name, sha256, model, version, reason, is_there, self.terms)
        self._last[name] = result
        try:
            self.append(result)
        except OSError as error:
            self.report(f"{name}: cannot be written to the journal '{JOURNAL}': {error}")

    def _report_once(self, name: str, line: str) -> None:
        if self._reported.get(name) != line:
            self._reported[name] = line
            shown = name if name.isprintable() else ascii(name)
            self.report(f"{shown}: {line}" if name else line)


def _why(error: Exception) -> str:
    """Return the reason for any error; an unexpected one is named by its class."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, OperationFailed) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _held_folder(folder: Path) -> Iterator[Path]:
    """Create a folder if it is missing; yield a path that leads to it even if a link replaces it."""
    folder.mkdir(exist_ok=True)
    if folder.is_symlink():
        raise OSError(f"'{folder.name}' is a link")
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _free_name(folder: Path, path: Path, suffix: str) -> Path:
    """Return a path for an entry, with a suffix in its name, that is free in a folder, as is its reason's."""
    stem, extension = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    more = itertools.chain([""], map("-{}".format, itertools.count(2)))
    paths = (folder / f"{stem}{suffix}{number}{extension}" for number in more)
    return next(file for file in paths if not (os.path.lexists(file) or os.path.lexists(f"{file}{REASON}")))
