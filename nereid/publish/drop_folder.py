"""What of a drop folder is complete, what of it is published, and where everything goes.

What is published is a copy whose digests are known, so that whoever writes meanwhile changes nothing of it.
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
from pathlib import Path
from typing import Annotated, BinaryIO

from msgspec import Meta, Struct

from nereid import files, json_lines
from nereid.errors import OperationFailed
from nereid.repository.check import digest
from nereid.server.control import NotReached
from nereid.serving_errors import InvalidConfig

JOURNAL, STAGING, PUBLISHED, REJECTED = ".nereid-watch.jsonl", ".nereid-watch", "published", "rejected"
SUFFIX, UNFINISHED = ".onnx", (".tmp", ".part")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0

Tell = Callable[[str], None]
# Publishes a file or folder for a model; returns the network's name and its new version.
Publish = Callable[[str, Path], tuple[str, int]]


class TemporaryFailure(OperationFailed):
    """Nothing can be published at present, whatever it is."""


PASSING = (TemporaryFailure, NotReached, files.LockTimeout, OSError)


@dataclass(frozen=True, slots=True)
class Entry:
    """A network in the folder as it looks from outside: two that are equal were not written in between.

    Args:
        path: an ONNX file, or a folder with one.
        stays: whether it is a link, or holds one: such are swapped where they are, and never moved.
        files: of each, its path below `root`, inode, size in bytes, and time of change in ns.
    """

    path: Path
    stays: bool
    files: tuple[tuple[str, int, int, int], ...]

    @property
    def root(self) -> Path:
        """The folder that its files are below."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def model(self) -> str:
        """What its name says it is for: `classify@monday.onnx` is for `classify`."""
        return self.path.name.removesuffix(SUFFIX).partition("@")[0]

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file that is not hidden, by its path."""
        names = [name for name, *_ in self.files if not _is_hidden(Path(name))]
        return {name: digest(self.root / name) for name in names}


class Line(Struct, frozen=True):
    """What became of an entry: a version of a model, or, for version 0, the reason why not.

    `stays` says whether it is still there; `terms` are what it was held to.
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
class _Sight:
    """How an entry looked, and its digests if they were taken, at a moment in seconds."""

    entry: Entry
    since: float
    digests: Mapping[str, str] = field(default_factory=dict)


class DropFolder:
    """Decides what of a folder is complete, has it published, and puts it away.

    Args:
        folder: an absolute path.
        log: the folder's journal, locked.
        publish: does it; what it raises has the entry rejected, but for PASSING, or what has such a cause.
        settle_s: how long digests must stay the same.
        model: what all entries are for, whatever they are called.
        terms: what networks are held to: one that was rejected and still is there is tried on others again.
        say: gets a line for each publication and rejection.
        tell: gets everything else.
        clock: monotonic, in seconds.
        now: the time.
    """

    def __init__(
        self,
        folder: Path,
        log: BinaryIO,
        publish: Publish,
        *,
        settle_s: float = 2.0,
        model: str = "",
        terms: str = "",
        say: Tell = lambda line: None,
        tell: Tell = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._folder, self._log, self._publish = folder, log, publish
        self._settle_s, self._model, self._terms = settle_s, model, terms
        self._say, self._tell, self._clock, self._now = say, tell, clock, now
        self._last = {line.entry: line for line in json_lines.read(folder / JOURNAL, Line)}
        self._sights: dict[str, _Sight] = {}
        self._done: dict[str, Entry] = {}
        self._told: dict[str, str] = {}
        # By model, because its entries are published in their order: until when, and for how long.
        self._pauses: dict[str, tuple[float, float]] = {}

    def step(self) -> bool:
        """Look at everything, publish or reject the first entry that is complete; tells whether one was."""
        found = self._find()
        self._sights = {name: sight for name, sight in self._sights.items() if name in found}
        self._done = {name: entry for name, entry in self._done.items() if name in found}
        self._told = {name: line for name, line in self._told.items() if name in (*found, "")}
        for name, entry in found.items():
            if entry is None or self._done.get(name) == entry or self._is_paused(entry):
                continue
            if digests := self._settled(entry):
                return self._handle(entry, digests)
        return False

    def _find(self) -> dict[str, Entry | None]:
        """Return all entries by their names, in that order; None for those that cannot be read now."""
        found: dict[str, Entry | None] = {}
        try:
            paths = sorted(self._folder.iterdir())
        except OSError as error:
            self._tell_once("", f"{self._folder} cannot be read: {error.strerror}")
            return found
        for path in paths:
            try:
                if _is_meant(path):
                    found[path.name] = see(path)
            except OSError as error:
                found[path.name] = None
                self._tell_once(path.name, f"cannot be read: {error.strerror}")
        return found

    def _is_paused(self, entry: Entry) -> bool:
        until, _ = self._pauses.get(self._model_of(entry), (-math.inf, 0))
        return self._clock() < until

    def _model_of(self, entry: Entry) -> str:
        return self._model or entry.model

    def _settled(self, entry: Entry) -> Mapping[str, str]:
        """Return the digests of an entry's files if they are what they were a while ago."""
        name, sight = entry.path.name, self._sights.get(entry.path.name)
        if sight is None or sight.entry != entry:
            self._sights[name] = _Sight(entry, self._clock())
            return {}
        # Nothing is digested while it is obviously being written.
        if self._clock() - sight.since < self._settle_s / (1 if sight.digests else 2):
            return {}
        try:
            digests = entry.digests()
        except OSError as error:
            self._tell_once(name, f"cannot be read: {error.strerror}")
            digests = {}
        if digests == sight.digests:
            return digests
        self._sights[name] = _Sight(entry, self._clock(), digests)
        return {}

    def _handle(self, entry: Entry, digests: Mapping[str, str]) -> bool:
        sight = self._sights.pop(entry.path.name)
        sha256, last = _sum(digests), self._last.get(entry.path.name)
        if last and last.stays and last.sha256 == sha256 and (last.version or last.terms == self._terms):
            self._done[entry.path.name] = entry
            return True
        try:
            with copied(entry, digests, self._folder / STAGING) as copy:
                return copy is not None and self._submit(entry, copy, sha256)
        except PASSING as error:
            # It has settled, and must not let the next one of its model pass.
            self._sights[entry.path.name] = sight
            self._pause(entry, error)
            return False

    def _pause(self, entry: Entry, error: Exception) -> None:
        model = self._model_of(entry)
        pause_s = min(2 * self._pauses.get(model, (0, FIRST_PAUSE_S / 2))[1], LONGEST_PAUSE_S)
        self._pauses[model] = (self._clock() + pause_s, pause_s)
        self._tell(f"{entry.path.name}: not now, again in {pause_s:g} s: {error}")

    def _submit(self, entry: Entry, copy: Path, sha256: str) -> bool:
        try:
            model, version = self._publish(self._model_of(entry), copy)
        except PASSING:
            raise
        except Exception as error:
            text = str(error)
            if not isinstance(
                error, (OperationFailed, InvalidConfig)
            ):  # it must not end the watcher, nor stay
                text = f"unexpected {type(error).__name__}: {text}"
            elif isinstance(error.__cause__, PASSING):
                raise TemporaryFailure(text) from error
            reason = text.replace(str(copy.parent), str(self._folder)).replace("\n", " ")
            self._reject(entry, sha256, reason.encode(errors="replace").decode())
        else:
            is_there = self._put_away(entry, PUBLISHED, f"-v{version}")
            self._remember(entry, sha256, model, version, "", is_there)
            self._say(f"{entry.path.name}: published as version {version} of '{model}'")
        self._pauses.pop(self._model_of(entry), None)
        return True

    def _reject(self, entry: Entry, sha256: str, reason: str) -> None:
        is_there = self._put_away(entry, REJECTED, f"-{self._now():%Y%m%dT%H%M%SZ}", reason)
        self._remember(entry, sha256, self._model_of(entry), 0, reason, is_there)
        self._say(f"{entry.path.name}: rejected: {reason}")

    def _put_away(self, entry: Entry, where: str, suffix: str, reason: str = "") -> bool:
        """Move an entry, unless it stays or is another one by now; tells whether it still is there."""
        folder = self._folder / where
        try:
            folder.mkdir(exist_ok=True)
            target = _free(folder, entry.path, suffix)
            if reason:
                (folder / f"{target.name}.reason.txt").write_text(f"{reason}\n")
            if entry.stays:
                return True
            entry.path.rename(target)
            # Another one may have taken its place in this moment, and by now a third one that of the other.
            if _looks(see(target)) != _looks(entry) and not os.path.lexists(entry.path):
                target.rename(entry.path)
        except OSError as error:
            if os.path.lexists(entry.path):
                self._tell(f"{entry.path.name}: stays where it is: {error}")
                return True
        return False

    def _remember(
        self, entry: Entry, sha256: str, model: str, version: int, reason: str, is_there: bool
    ) -> None:
        name = entry.path.name
        line = Line(self._now(), name, sha256, model, version, reason, is_there, self._terms)
        self._last[name] = line
        try:
            json_lines.append(self._log, line)
        except OSError as error:
            self._tell(f"{name}: cannot be remembered: {error}")

    def _tell_once(self, name: str, line: str) -> None:
        if self._told.get(name) != line:
            self._told[name] = line
            self._tell(f"{name}: {line}" if name else line)


def see(path: Path) -> Entry | None:
    """Return how a file or folder looks; None while it is obviously not complete.

    Raises:
        OSError: it cannot be read.
    """
    is_folder = path.is_dir()
    if is_folder and not any(each.suffix == SUFFIX for each in path.iterdir()):
        return None
    below = sorted(path.rglob("*")) if is_folder else [path]
    if any(each.suffix in UNFINISHED for each in below):
        return None
    files = []
    for each in below:
        try:
            status = each.stat()
        except FileNotFoundError:  # renamed meanwhile, or a link whose target is not there yet
            return None
        if stat.S_ISREG(status.st_mode):
            name = str(each.relative_to(path if is_folder else path.parent))
            files.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
    # An empty file is one that somebody has just begun.
    if not files or any(name.endswith(SUFFIX) and not size for name, _, size, _ in files):
        return None
    return Entry(path, any(each.is_symlink() for each in (path, *below)), tuple(files))


@contextlib.contextmanager
def copied(entry: Entry, digests: Mapping[str, str], staging: Path) -> Iterator[Path | None]:
    """Give a copy of an entry for as long as the context lasts, or None if it is not that any more.

    Args:
        digests: of the files that are copied, as they were when the entry had settled.
        staging: a folder for the copy alone.

    Raises:
        OSError: something cannot be read or written.
    """
    copy = staging / entry.path.name
    root = copy if entry.path.is_dir() else staging
    shutil.rmtree(staging, ignore_errors=True)
    try:
        for name in digests:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(entry.root / name, root / name)
        is_same = {name: _digest(root / name) for name in digests} == digests
        yield copy if is_same else None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_meant(path: Path) -> bool:
    is_ours = path.name in (PUBLISHED, REJECTED)
    # Each is named on a line, and in the journal, which is UTF-8.
    if is_ours or path.name.startswith(".") or path.suffix in UNFINISHED or not path.name.isprintable():
        return False
    return path.suffix == SUFFIX or path.is_dir()


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _looks(entry: Entry | None) -> list[tuple[int, ...]]:
    return [tuple(numbers) for _, *numbers in entry.files] if entry else []


def _free(folder: Path, path: Path, suffix: str) -> Path:
    """Return where a file or folder can be put, under a name that says what became of it."""
    stem, extension = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    more = itertools.chain([""], map("-{}".format, itertools.count(2)))
    names = (f"{stem}{suffix}{each}{extension}" for each in more)
    return next(target for name in names if not os.path.lexists(target := folder / name))


def _digest(path: Path) -> str:
    return digest(path) if path.exists() else ""


def _sum(digests: Mapping[str, str]) -> str:
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(digests.items()))
    return hashlib.sha256(os.fsencode(lines)).hexdigest()
