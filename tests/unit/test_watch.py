"""The drop folder: complete entries, publications, and moves; no test sleeps."""

import contextlib
import errno
import hashlib
import os
import stat
import subprocess
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest

from nereid.base import files
from nereid.base.errors import InvalidConfig, OperationFailed
from nereid.models.publish import drop_folder
from nereid.server.model_control import NotReached
from tests.tables import cases, rows

SETTLE_S = 2.0
NOW = datetime(2026, 11, 21, 12, 30, 5, tzinfo=UTC)


class Publisher:
    def __init__(self) -> None:
        self.given: list[tuple[str, dict[str, str]]] = []
        self.failures: list[Exception] = []
        self.during = lambda: None

    def __call__(self, model: str, source: Path) -> tuple[str, int]:
        self.during()
        if self.failures:
            raise self.failures.pop(0)
        self.given.append((model, contents(source)))
        return "net", len(self.given) + 1


class Drop:
    def __init__(self, folder: Path) -> None:
        self.folder, self.publisher, self.seconds = folder, Publisher(), 0.0
        self.staging = folder.parent / "staging"
        self.announced: list[str] = []
        self.reported: list[str] = []
        self.held = contextlib.ExitStack()
        self.start()

    def start(self, **options) -> None:
        """Begin to watch, as a new process would after the end of the last one."""
        self.held.close()
        self.watcher = drop_folder.DropFolder(
            self.folder,
            self.held.enter_context(drop_folder.journal_of(self.folder).locked(0)),
            self.staging,
            self.publisher,
            settle_s=SETTLE_S,
            announce=self.announced.append,
            report=self.reported.append,
            clock=lambda: self.seconds,
            now=lambda: NOW,
            **options,
        )

    def wait(self, seconds: float = 2 * SETTLE_S) -> None:
        """Let time pass; every half second, handle all complete entries."""
        for _ in range(int(seconds * 2)):
            while self.watcher.step():
                pass
            self.seconds += 0.5
        while self.watcher.step():
            pass

    def write(self, name: str, text: str) -> Path:
        """Write a file atomically, as a new inode."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = self.folder / f".{path.name}.new"
        new.write_text(text)
        return new.replace(path)

    def handle(self, *failures: Exception, name="net.onnx", text="a", seconds=2 * SETTLE_S) -> None:
        """Write a file and let time pass; its first publications fail."""
        self.publisher.failures = [*failures]
        self.write(name, text)
        self.wait(seconds)

    @property
    def published(self) -> list[tuple[str, str]]:
        return [(model, *files.values()) for model, files in self.publisher.given]

    @property
    def visible(self) -> dict[str, str]:
        return {name: text for name, text in contents(self.folder).items() if not name.startswith(".")}

    @property
    def results(self) -> tuple[drop_folder.DropResult, ...]:
        return drop_folder.journal_of(self.folder).read_intact()


@pytest.fixture
def drop(tmp_path):
    (folder := tmp_path / "drop").mkdir()
    watched = Drop(folder)
    yield watched
    watched.held.close()


def at_rename(monkeypatch, act) -> None:
    """Set what happens just before the next rename."""
    rename = os.rename

    def once(source, target) -> None:
        monkeypatch.setattr(os, "rename", rename)
        act()
        rename(source, target)

    monkeypatch.setattr(os, "rename", once)


def contents(path: Path) -> dict[str, str]:
    if not path.is_dir():
        return {path.name: path.read_text()}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_text() for file in files}


def swap(link: Path, target: Path) -> None:
    new = link.with_name(f".{link.name}.new")
    new.symlink_to(target)
    new.replace(link)


@rows(("net.onnx", "net", ""), ("net.v2@a@b.onnx", "net.v2", ""), ("a.onnx", "net", "net"))
def test_complete_file_is_published_once_and_moved(name, model, option, drop):
    """An option selects one model for all files."""
    drop.start(model=option)
    modes: list[int] = []
    drop.publisher.during = lambda: modes.append(stat.S_IMODE(drop.staging.stat().st_mode))

    drop.handle(name=name, seconds=20)

    moved = f"published/{name.removesuffix('.onnx')}-v2.onnx"
    assert (drop.published, drop.visible) == ([(model, "a")], {moved: "a"})
    assert modes == [0o700]  # of the copy
    assert drop.announced == [f"{name}: published as version 2 of 'net'"]
    assert [(result.entry, result.version, result.stays) for result in drop.results] == [(name, 2, False)]
    assert not drop.staging.exists()


def test_folder_is_published_with_its_data(drop):
    for name in ("net.onnx", "weights/data.bin", ".hidden"):
        drop.write(f"net@x/{name}", name)

    drop.wait()

    kept = {"net.onnx": "net.onnx", "weights/data.bin": "weights/data.bin"}
    assert drop.publisher.given == [("net", kept)]
    assert [*drop.visible] == [f"published/net@x-v2/{name}" for name in (".hidden", *kept)]


def test_other_files_are_ignored_and_reported_once(drop):
    """Names that can never be published are reported with the reason; unfinished and hidden ones are not."""
    unfinished = (".net.onnx", "net.onnx.part", "net.onnx.tmp", "net.tmp/net.onnx", "net/weights.data")
    done = ("published/net.onnx", "rejected/net.onnx", "published/net.pt")
    for name in (*unfinished, *done, "labels.txt", "ne\nt.onnx", "ne\udcfft.onnx", "net.pt"):
        drop.write(name, "a")
    before = [*drop.visible]

    drop.wait(20)

    assert (drop.published, [*drop.visible], drop.announced) == ([], before, [])
    expected = "ignored: expected NAME.onnx, or a folder with one"
    unprintable = "ignored: its name has characters that cannot be printed"
    odd = [f"{name}: {unprintable}" for name in (r"'ne\nt.onnx'", r"'ne\udcfft.onnx'")]
    assert drop.reported == [f"labels.txt: {expected}", odd[0], f"net.pt: {expected}", odd[1]]


def make_deep(path: Path) -> None:
    path.mkdir()
    (path / "a.onnx").write_text("a")
    for _ in range(1500):
        path /= "a"
        path.mkdir()


def make_pipe_inside(path: Path) -> None:
    path.mkdir()
    (path / "a.onnx").write_text("a")
    os.mkfifo(path / "pipe")


def make_loop_inside(path: Path) -> None:
    path.mkdir()
    for name in ("loop", "a.onnx"):
        (path / name).symlink_to(path / name)


def make_full(path: Path) -> None:
    """Make a path that is too long for a copy elsewhere, and for a name with a suffix."""
    long = path.with_name("a" * 250 + ".onnx")
    inside = long / ("b" * 250) / ("c" * 250)
    inside.mkdir(parents=True)
    (inside / "a.onnx").write_text("a")
    (long / "a.onnx").write_text("a")


@pytest.mark.parametrize(
    "make",
    [
        *(make_deep, make_full, make_pipe_inside, make_loop_inside, os.mkfifo, Path.mkdir),
        lambda path: os.mknod(path, stat.S_IFSOCK),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("a" * 300),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("other.onnx/more"),
    ],
)
def test_odd_entry_ends_nothing(drop, make):
    make(drop.folder / "odd.onnx")
    drop.write("other.onnx", "b")

    drop.wait(20)
    drop.start()
    drop.wait(20)
    # Python 3.11 cannot remove deep folders.
    subprocess.run(["rm", "-rf", drop.folder, drop.staging], check=True)

    assert ("other", "b") in drop.published


@cases(
    empty_file=("net.onnx", Path.touch),
    link_without_target=(".later", lambda path: path.symlink_to(".later")),
    part_of_a_folder=("net/weights.data", lambda path: (path.parent / "net/net.onnx").write_text("a")),
)
def test_incomplete_entry_waits(last, begin, drop):
    part = drop.write(f"{last}.part", "a")
    begin(drop.folder / "net.onnx")
    drop.wait(60)
    assert (drop.publisher.given, drop.announced, drop.reported) == ([], [], [])

    part.rename(drop.folder / last)
    drop.wait()

    kept = {"net.onnx": "a"} | ({"weights.data": "a"} if "/" in last else {})
    assert drop.publisher.given == [("net", kept)]


@pytest.mark.parametrize("name", ["net.onnx", "net/weights.data", "net/.rsync.Xa3"])
def test_slow_writer_is_waited_for(drop, name):
    drop.write(name if name.endswith(".onnx") else "net/net.onnx", "a")
    for _ in range(10):
        with (drop.folder / name).open("a") as file:
            file.write("more")
        drop.wait(SETTLE_S - 0.5)
    assert drop.published == []

    drop.wait()

    ((model, files),) = drop.publisher.given
    assert (model, "".join(files.values()).count("more")) == ("net", 0 if "rsync" in name else 10)


def test_content_that_changes_behind_size_and_time_is_not_complete(drop):
    """With stale attributes, as on NFS, the two digests still differ."""
    path = drop.write("net.onnx", "a")
    status = path.stat()
    for number in range(8):
        path.write_text(str(number))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        drop.wait(SETTLE_S)
    assert drop.published == []

    drop.wait()

    assert drop.published == [("net", "7")]


def test_file_that_is_replaced_while_it_is_published_is_another_version(drop):
    drop.write("net.onnx", "a")
    drop.publisher.during = lambda: drop.write("net.onnx", "b") if not drop.published else None

    drop.wait(3 * SETTLE_S)

    assert drop.published == [("net", "a"), ("net", "b")]
    assert drop.visible == {"published/net-v3.onnx": "b"}


@pytest.mark.parametrize("failures", [[], [OperationFailed("no")]], ids=["published", "rejected"])
def test_file_that_is_deleted_while_it_is_handled_may_come_again(drop, failures):
    path = drop.write("net.onnx", "a")
    drop.publisher.failures, drop.publisher.during = [*failures], path.unlink
    drop.wait()
    drop.publisher.during = lambda: None
    published = [] if failures else [("net", "a")]
    assert (drop.published, drop.reported) == (published, [])
    assert drop.visible == {}

    drop.handle()

    assert drop.published == [*published, ("net", "a")]


@pytest.mark.parametrize("name", ["net.onnx", "net/net.onnx"])
@cases("change", written=lambda path: path.write_text("b"), deleted=Path.unlink)
def test_copy_with_other_digests_is_discarded(drop, name, change):
    path = drop.write(name, "a")
    entry = drop_folder.read_entry(drop.folder / name.partition("/")[0])
    digests = entry.digests()

    with drop_folder.copy_entry(entry, digests, drop.staging) as copy:
        assert contents(copy) == {"net.onnx": "a"}
    change(path)
    with drop_folder.copy_entry(entry, digests, drop.staging) as copy:
        assert copy is None

    assert not drop.staging.exists()


@cases(
    file=("net@x.onnx", OperationFailed, "net@x-20261121T123005Z.onnx"),
    folder=("net@x/net.onnx", InvalidConfig, "net@x-20261121T123005Z"),
)
def test_rejected_entry_is_moved_with_its_reason(name, kind, target, drop):
    """The reason is one line, and names the original instead of the copy."""
    entry, slash, inside = name.partition("/")

    drop.handle(kind(f"'{drop.staging / entry}' is bad\nindeed"), name=name, seconds=20)

    reason = f"'{drop.folder / entry}' is bad indeed"
    moved = {f"rejected/{target}{slash}{inside}": "a", f"rejected/{target}.reason.txt": f"{reason}\n"}
    assert drop.visible == moved
    assert (drop.announced, drop.published) == ([f"{entry}: rejected: {reason}"], [])

    drop.handle(name=name)
    assert [model for model, _ in drop.publisher.given] == ["net"]


def test_unexpected_error_is_a_rejection(drop):
    """One file can neither end the watcher nor delay the next one of its model."""
    drop.write("net@2.onnx", "b")

    drop.handle(ValueError("no\nway \udcff"), name="net@1.onnx", seconds=20)

    assert drop.published == [("net", "b")]
    (reason,) = (result.reason for result in drop.results if not result.version)
    assert reason.startswith("unexpected ValueError: ")
    assert "\n" not in reason


def test_rejected_twice_in_a_second_are_both_kept(drop):
    for text in "ab":
        drop.handle(OperationFailed("no"), text=text)

    first = "rejected/net-20261121T123005Z"
    reasons = {f"{first}.onnx.reason.txt": "no\n", f"{first}-2.onnx.reason.txt": "no\n"}
    assert drop.visible == {f"{first}.onnx": "a", f"{first}-2.onnx": "b"} | reasons


def caused(error: Exception) -> OperationFailed:
    wrapped = OperationFailed(f"publish net 2 failed, and nothing has changed: {error}")
    wrapped.__cause__ = error
    return wrapped


@cases(
    "error",
    server=NotReached("the server does not respond"),
    lock=files.LockTimeout("another one publishes"),
    recovery=drop_folder.TemporaryFailure("recovery failed"),
    disk=OSError(28, "No space left on device"),
    disk_in_action=caused(OSError(28, "No space left on device")),
)
def test_temporary_failure_is_tried_again(drop, error):
    tries: list[float] = []
    drop.publisher.during = lambda: tries.append(drop.seconds)
    drop.handle(*[error] * 7)
    assert ([*drop.visible], drop.announced) == (["net.onnx"], [])

    drop.wait(400)

    assert [later - earlier for earlier, later in pairwise(tries)] == [2, 4, 8, 16, 32, 60, 60]
    assert drop.reported[1].startswith("net.onnx: cannot be published now; next attempt in 4 s: ")
    assert drop.published == [("net", "a")]


def test_order_is_kept_when_the_first_must_wait(drop):
    drop.publisher.failures = [NotReached("gone")]
    for name in ("net@1.onnx", "net@2.onnx", "other.onnx"):
        drop.write(name, name)

    drop.wait(20)

    assert [model for model, _ in drop.published] == ["other", "net", "net"]
    assert [text for _, text in drop.published[1:]] == ["net@1.onnx", "net@2.onnx"]


@pytest.mark.parametrize("name", ["net.onnx", "net"])
def test_link_stays_and_is_published_with_every_new_target(drop, name):
    link = drop.folder / name
    for text in "abca":
        target = drop.write(f".targets/{text}/net.onnx", text)
        swap(link, target if name == "net.onnx" else target.parent)
        for _ in range(2):
            drop.wait(20)
            drop.start()

    assert drop.published == [("net", text) for text in "abca"]
    assert link.is_symlink()
    assert not (drop.folder / "published" / name).exists()


@pytest.mark.parametrize("inside", [".", "net"])
def test_kubernetes_volume(drop, inside):
    volume = drop.folder / inside
    for text in "ab":
        drop.write(f"{inside}/..{text}/net.onnx", text)
        swap(volume / "..data", Path(f"..{text}"))
        if text == "a":
            (volume / "net.onnx").symlink_to("..data/net.onnx")
        drop.wait(20)

    assert drop.published == [("net", "a"), ("net", "b")]
    assert (volume / "net.onnx").read_text() == "b"


@pytest.mark.parametrize("name", ["net.onnx", "net", "net/net.onnx", "net/weights.data"])
def test_link_out_of_the_folder_is_not_followed(drop, tmp_path, name):
    """The watcher may read files that the writer of the link may not; the reason is reported once."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "net.onnx").write_text("secret")
    target = tmp_path / "secret" / ("" if name == "net" else "net.onnx")
    if "/" in name:
        drop.write("net/other.onnx" if name.endswith(".onnx") else "net/net.onnx", "a")
    (drop.folder / name).symlink_to(target)

    drop.wait(20)

    assert (drop.publisher.given, drop.announced) == ([], [])
    (line,) = drop.reported
    assert line.endswith(f"is a link to '{target}', outside of the folder; fix: copy the file")


@pytest.mark.parametrize("name", ["net/net.onnx", "net"])
def test_entry_that_becomes_a_link_is_not_followed(drop, tmp_path, name):
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "net.onnx").write_text("a")
    drop.write("net/net.onnx", "a")
    entry = drop_folder.read_entry(drop.folder / "net")
    digests = entry.digests()

    (drop.folder / name).rename(drop.folder / ".before")
    (drop.folder / name).symlink_to(tmp_path / name)
    refused = pytest.raises(OSError, match="outside of the folder")
    with refused, drop_folder.copy_entry(entry, digests, drop.staging):
        pass
    assert not drop.staging.exists()


@cases(
    # A link would let others choose where the watcher writes.
    link=("rejected", lambda path: path.symlink_to(path.parents[1]), "'rejected' is a link"),
    file=("published", Path.touch, "File exists"),
)
def test_entry_that_cannot_be_moved_stays_and_is_handled_once(name, make, reason, drop):
    make(drop.folder / name)
    before = {*drop.folder.parent.iterdir()}
    drop.handle(*[OperationFailed("no")] * (name == "rejected"), seconds=20)
    drop.start()
    drop.wait(20)

    assert drop.published == ([("net", "a")] if name == "published" else [])
    assert ((drop.folder / "net.onnx").exists(), {*drop.folder.parent.iterdir()}) == (True, before)
    (line,) = drop.reported
    assert line.startswith(f"net.onnx: cannot be moved to '{name}' and stays: {reason}")


REJECTED_NAME = "net-20261121T123005Z"


@cases(
    "plant",
    link=lambda path, other: path.symlink_to(other),
    dangling_link=lambda path, other: path.symlink_to(other.with_name("new")),
    hard_link=lambda path, other: path.hardlink_to(other),
    pipe=lambda path, other: os.mkfifo(path),
)
def test_reason_is_not_written_through_a_planted_file(drop, tmp_path, plant):
    """The time is easily guessed, so whoever may write the folder can take the name of the reason first."""
    (other := tmp_path / "other").write_text("precious")
    (drop.folder / "rejected").mkdir()
    planted = drop.folder / "rejected" / f"{REJECTED_NAME}.onnx.reason.txt"
    plant(planted, other)

    drop.handle(OperationFailed("no"))

    planted.unlink()
    assert (other.read_text(), (tmp_path / "new").exists()) == ("precious", False)
    moved = {f"{REJECTED_NAME}-2.onnx": "a", f"{REJECTED_NAME}-2.onnx.reason.txt": "no\n"}
    assert contents(drop.folder / "rejected") == moved
    assert (drop.reported, drop.announced) == ([], ["net.onnx: rejected: no"])


def test_reason_is_not_written_through_a_link_of_the_last_moment(drop, tmp_path, monkeypatch):
    (other := tmp_path / "other").write_text("precious")
    planted = drop.folder / "rejected" / f"{REJECTED_NAME}.onnx.reason.txt"
    at_rename(monkeypatch, lambda: planted.symlink_to(other))

    drop.handle(OperationFailed("no"))

    assert other.read_text() == "precious"
    assert drop.visible[f"rejected/{REJECTED_NAME}.onnx"] == "a"
    assert drop.reported == ["net.onnx: cannot write the reason of its rejection: File exists"]
    assert drop.announced == ["net.onnx: rejected: no"]


@pytest.mark.parametrize("where", ["rejected", "published"])
def test_folder_that_becomes_a_link_is_not_followed(drop, tmp_path, where, monkeypatch):
    """Whoever may write the folder can replace its folders between any two steps."""
    (outside := tmp_path / "outside").mkdir()
    (drop.folder / where).mkdir()

    def swap_folder() -> None:
        (drop.folder / where).rename(drop.folder / ".moved")
        (drop.folder / where).symlink_to(outside)

    at_rename(monkeypatch, swap_folder)

    drop.handle(*[OperationFailed("no")] * (where == "rejected"))

    assert [*outside.iterdir()] == []
    assert "a" in contents(drop.folder / ".moved").values()


def test_entry_that_cannot_be_moved_leaves_no_reason(drop, monkeypatch):
    at_rename(monkeypatch, Mock(side_effect=OSError(errno.EXDEV, "Invalid cross-device link")))

    drop.handle(OperationFailed("no"))

    assert drop.visible == {"net.onnx": "a"}
    (line,) = drop.reported
    assert line.startswith("net.onnx: cannot be moved to 'rejected' and stays: ")
    assert line.endswith("Invalid cross-device link")


def test_rejected_link_is_tried_again_with_other_limits_only(drop):
    (drop.folder / ".a").write_text("a")
    swap(drop.folder / "net.onnx", drop.folder / ".a")
    drop.publisher.failures = [OperationFailed("it answers otherwise")]
    drop.wait(20)
    drop.start()
    drop.wait(20)
    assert (drop.published, drop.announced) == ([], ["net.onnx: rejected: it answers otherwise"])
    assert [*drop.visible] == ["net.onnx", "rejected/net-20261121T123005Z.onnx.reason.txt"]

    drop.start(terms="accept")
    drop.wait()

    assert drop.published == [("net", "a")]


def test_journal_of_earlier_releases_is_read(drop, tmp_path):
    (tmp_path / "a").write_text("a")
    swap(drop.folder / "net.onnx", tmp_path / "a")
    line = (
        '{"time":"2026-11-01T12:00:00.000000Z","entry":"net.onnx","sha256":"%s","model":"net","version":2,'
        '"reason":"","stays":true,"terms":""}\n'
    )
    sha256 = hashlib.sha256(f"{hashlib.sha256(b'a').hexdigest()}  net.onnx\n".encode()).hexdigest()
    (drop.folder / drop_folder.JOURNAL).write_text(line % sha256)
    drop.start()

    drop.wait(20)

    assert drop.published == []


def test_missing_folder_is_read_when_it_is_back(drop):
    drop.write("net.onnx", "a")
    away = drop.folder.rename(drop.folder.with_name("away"))
    drop.wait()
    assert drop.reported == [f"cannot read '{drop.folder}': No such file or directory"]

    away.rename(drop.folder)
    drop.wait()

    assert drop.published == [("net", "a")]


def test_command_that_cannot_watch_writes_nothing(nereid, drop, tmp_path):
    absent, second = (nereid("watch", folder) for folder in (tmp_path / "absent", drop.folder))

    assert (absent.exit_code, "is not a folder; fix: mkdir" in absent.stderr) == (2, True)
    assert second.exit_code == 1
    journal = drop.folder / drop_folder.JOURNAL
    assert f"'{journal}' is locked by another `nereid watch`; fix: " in second.stderr
    assert [*tmp_path.rglob(drop_folder.JOURNAL)] == [journal]
