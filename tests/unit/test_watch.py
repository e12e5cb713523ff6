"""The drop folder: complete entries, publications, and moves; no test sleeps."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nereid import files, json_lines
from nereid.cli.main import app
from nereid.errors import OperationFailed, WrongUsage
from nereid.publish import watch
from nereid.publish.drop_entry import copied, read_entry
from nereid.publish.drop_folder import JOURNAL, STAGING, DropFolder, Line, Publish, TemporaryFailure
from nereid.publish.network import find_network
from nereid.publish.publisher import Gates
from nereid.server.control import NotReached
from nereid.serving_errors import InvalidConfig
from tests.networks import ONE_INSTANCE, identity, store, tensor

SETTLE_S = 2.0
NOW = datetime(2026, 11, 21, 12, 30, 5, tzinfo=UTC)
WATCHDOG_S = 60


class Publisher:
    """Takes every file as the next version of `net`, or raises prepared failures; keeps the files."""

    def __init__(self) -> None:
        self.given: list[tuple[str, dict[str, str]]] = []
        self.failures: list[Exception] = []
        self.during = lambda: None

    def __call__(self, model: str, source: Path) -> tuple[str, int]:
        """Publish, in a test's eyes."""
        self.during()
        if self.failures:
            raise self.failures.pop(0)
        self.given.append((model, contents(source)))
        return "net", len(self.given) + 1


class Drop:
    """A drop folder, its clock, and what a watcher makes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.publisher, self.seconds = folder, Publisher(), 0.0
        self.announced: list[str] = []
        self.reported: list[str] = []
        self._held = contextlib.ExitStack()
        self.start()

    def start(self, **options) -> None:
        """Begin to watch, as a new process would; the last one is gone."""
        self._held.close()
        log = self._held.enter_context(files.locked_file(self.folder / JOURNAL, "nereid watch", 0))
        self.watcher = DropFolder(
            self.folder,
            log,
            self.publisher,
            settle_s=SETTLE_S,
            announce=self.announced.append,
            report=self.reported.append,
            clock=lambda: self.seconds,
            now=lambda: NOW,
            **options,
        )

    def close(self) -> None:
        """Let go of the lock."""
        self._held.close()

    def wait(self, seconds: float = 2 * SETTLE_S) -> None:
        """Let time pass, with a look every half a second, and as many as there is something to do."""
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

    @property
    def published(self) -> list[tuple[str, str]]:
        """Return model and content of the published entries of one file."""
        return [(model, *files.values()) for model, files in self.publisher.given]

    @property
    def visible(self) -> dict[str, str]:
        """Return the visible files of the folder."""
        found = contents(self.folder)
        return {name: text for name, text in found.items() if not name.startswith(".")}

    @property
    def lines(self) -> tuple[Line, ...]:
        """Return the lines of the journal."""
        return json_lines.read(self.folder / JOURNAL, Line)


@pytest.fixture
def drop(tmp_path):
    """An empty drop folder that is watched."""
    folder = tmp_path / "drop"
    folder.mkdir()
    watched = Drop(folder)
    yield watched
    watched.close()


def contents(path: Path) -> dict[str, str]:
    """Return the content of a file, or of all in a folder, by name."""
    if not path.is_dir():
        return {path.name: path.read_text()}
    files = sorted(each for each in path.rglob("*") if each.is_file())
    return {str(each.relative_to(path)): each.read_text() for each in files}


def swap(link: Path, target: Path) -> None:
    """Change a link atomically, as Kubernetes does."""
    new = link.with_name(f".{link.name}.new")
    new.symlink_to(target)
    new.replace(link)


@pytest.mark.parametrize(
    ("name", "model"), [("net.onnx", "net"), ("net@2026-11-21.onnx", "net"), ("net.v2@a@b.onnx", "net.v2")]
)
def test_complete_file_is_published_once_and_put_away(drop, name, model):
    """Its name selects the model; it moves to `published` with its version, and into the journal."""
    drop.write(name, "a")

    drop.wait(20)

    put_away = f"published/{name.removesuffix('.onnx')}-v2.onnx"
    assert (drop.published, drop.visible) == ([(model, "a")], {put_away: "a"})
    assert drop.announced == [f"{name}: published as version 2 of 'net'"]
    assert [(line.entry, line.version, line.stays) for line in drop.lines] == [(name, 2, False)]
    assert not (drop.folder / STAGING).exists()


def test_option_selects_one_model_for_all(drop):
    """With --model, names only determine the order of publication."""
    drop.start(model="net")
    for name in ("b.onnx", "a.onnx", "c.onnx"):
        drop.write(name, name)

    drop.wait()

    assert drop.published == [("net", "a.onnx"), ("net", "b.onnx"), ("net", "c.onnx")]


def test_folder_is_published_with_its_data(drop):
    """A folder is one entry: all of it is copied, except what is hidden, and all of it is put away."""
    for name in ("net.onnx", "weights/data.bin", ".hidden"):
        drop.write(f"net@x/{name}", name)

    drop.wait()

    kept = {"net.onnx": "net.onnx", "weights/data.bin": "weights/data.bin"}
    assert drop.publisher.given == [("net", kept)]
    assert [*drop.visible] == [f"published/net@x-v2/{name}" for name in (".hidden", *kept)]


@pytest.mark.parametrize(
    "name",
    [
        ".net.onnx",
        "net.onnx.part",
        "net.onnx.tmp",
        "net.tmp/net.onnx",
        "published/net.onnx",
        "rejected/net.onnx",
        "notes.txt",
        "weights.data",
        "net/weights.data",
        "net/.net.onnx",
        "net\nrejected.onnx",
        "net\udcff.onnx",
    ],
    ids=ascii,
)
def test_other_files_are_ignored(drop, name):
    """Hidden and unfinished files, folders without a network, and what was put away."""
    drop.write(name, "a")
    before = [*drop.visible]

    drop.wait()

    assert (drop.published, [*drop.visible], drop.announced) == ([], before, [])


def test_unfinished_file_in_a_folder_holds_it_back(drop):
    """As long as one of a folder's files is being copied in, the folder is not complete."""
    drop.write("net/net.onnx", "a")
    drop.write("net/weights.data.part", "b")
    drop.wait()
    assert drop.published == []

    (drop.folder / "net" / "weights.data.part").rename(drop.folder / "net" / "weights.data")
    drop.wait()

    assert drop.publisher.given == [("net", {"net.onnx": "a", "weights.data": "b"})]


@pytest.mark.parametrize("name", ["net.onnx", "net/net.onnx", "net/weights.data", "net/.rsync.Xa3"])
def test_slow_writer_is_waited_for(drop, name):
    """A file that grows is published whole, and once, also if it is an entry's second or a hidden one."""
    drop.write(name if name.endswith(".onnx") else "net/net.onnx", "a")
    path = drop.folder / name
    path.touch()
    for _ in range(10):
        with path.open("a") as file:
            file.write("more")
        drop.wait(SETTLE_S - 0.5)
    assert drop.published == []

    drop.wait()

    ((model, files),) = drop.publisher.given
    assert (model, "".join(files.values()).count("more")) == ("net", 0 if "rsync" in name else 10)


def test_empty_file_is_one_that_was_just_begun(drop):
    """It waits for its content, however late that comes."""
    path = drop.folder / "net.onnx"
    path.touch()
    drop.wait(60)
    assert (drop.published, drop.announced) == ([], [])

    path.write_text("a")
    drop.wait()

    assert drop.published == [("net", "a")]


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


def test_no_look_earlier_than_settled(drop):
    """Its digest is compared with one that is as old as it must have settled."""
    drop.write("net.onnx", "a")

    drop.wait(1.5 * SETTLE_S - 0.5)
    assert drop.published == []
    drop.wait(0.5)
    assert drop.published == [("net", "a")]


def test_renamed_into_place(drop):
    """A file that was written under an ignored name is published after its rename."""
    drop.write("net.onnx.part", "a")
    drop.wait()

    (drop.folder / "net.onnx.part").rename(drop.folder / "net.onnx")
    drop.wait()

    assert (drop.published, [*drop.visible]) == ([("net", "a")], ["published/net-v2.onnx"])


def test_renamed_or_replaced_while_settling(drop):
    """Only the last content is published, and only under the last name."""
    drop.write("net@a.onnx", "a")
    drop.wait(SETTLE_S)
    drop.write("net@a.onnx", "b")
    drop.wait(SETTLE_S)
    (drop.folder / "net@a.onnx").rename(drop.folder / "net@b.onnx")

    drop.wait()

    assert (drop.published, [*drop.visible]) == ([("net", "b")], ["published/net@b-v2.onnx"])


@pytest.mark.parametrize("name", ["net.onnx", "net/net.onnx"])
def test_deleted_while_settling(drop, name):
    """It is forgotten."""
    path = drop.write(name, "a")
    drop.wait(SETTLE_S)
    shutil.rmtree(path.parent) if "/" in name else path.unlink()

    drop.wait()

    assert (drop.published, drop.announced, drop.reported) == ([], [], [])


def test_what_is_replaced_while_it_is_published_is_another_version(drop):
    """The first is published as it was copied; the second stays, and follows."""
    drop.write("net.onnx", "a")
    drop.publisher.during = lambda: drop.write("net.onnx", "b") if not drop.published else None

    drop.wait(3 * SETTLE_S)

    assert drop.published == [("net", "a"), ("net", "b")]
    assert drop.visible == {"published/net-v3.onnx": "b"}


def test_what_is_deleted_while_it_is_published_is_published(drop):
    """There is nothing to put away then."""
    path = drop.write("net.onnx", "a")
    drop.publisher.during = path.unlink

    drop.wait()

    assert (drop.published, drop.visible, drop.reported) == ([("net", "a")], {}, [])


def test_what_is_deleted_while_it_is_rejected_may_come_again(drop):
    """Only what still is there is remembered as rejected."""
    path = drop.write("net.onnx", "a")
    drop.publisher.failures = [OperationFailed("no")]
    drop.publisher.during = path.unlink
    drop.wait()
    drop.publisher.during = lambda: None

    drop.write("net.onnx", "a")
    drop.wait()

    assert drop.published == [("net", "a")]


@pytest.mark.parametrize("name", ["net.onnx", "net/net.onnx"])
@pytest.mark.parametrize("is_deleted", [False, True], ids=["written", "deleted"])
def test_copy_that_is_not_what_settled_is_thrown_away(drop, name, is_deleted):
    """A file that changes between digest and copy is not published."""
    path = drop.write(name, "a")
    entry = read_entry(drop.folder / name.partition("/")[0])
    digests, staging = entry.digests(), drop.folder / STAGING

    with copied(entry, digests, staging) as copy:
        assert contents(copy) == {"net.onnx": "a"}
    path.unlink() if is_deleted else path.write_text("b")
    with copied(entry, digests, staging) as copy:
        assert copy is None

    assert not staging.exists()


@pytest.mark.parametrize(
    "error",
    [OperationFailed("it is bad"), WrongUsage("it is bad"), InvalidConfig("it is bad")],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("name", ["net@x.onnx", "net@x/net.onnx"])
def test_rejected_is_moved_aside_with_its_reason(drop, name, error):
    """The reason is next to it, and the next file of that name is tried again."""
    drop.publisher.failures = [error]
    drop.write(name, "a")

    drop.wait(20)

    entry, _, inside = name.partition("/")
    target = "net@x-20261121T123005Z" + ("" if inside else ".onnx")
    put_away = f"rejected/{target}/{inside}" if inside else f"rejected/{target}"
    assert drop.visible == {put_away: "a", f"rejected/{target}.reason.txt": "it is bad\n"}
    assert (drop.announced, drop.published) == ([f"{entry}: rejected: it is bad"], [])

    drop.write(name, "a")
    drop.wait()
    assert [model for model, _ in drop.publisher.given] == ["net"]


@pytest.mark.parametrize(
    "error", [ValueError("no\nway \udcff"), KeyError("x"), RecursionError("deep")], ids=repr
)
def test_error_that_nobody_expects_is_a_rejection(drop, error):
    """One file can neither end the watcher nor keep the next one of its model waiting."""
    drop.publisher.failures = [error]
    drop.write("net@1.onnx", "a")
    drop.write("net@2.onnx", "b")

    drop.wait(20)

    assert drop.published == [("net", "b")]
    (reason,) = (line.reason for line in drop.lines if not line.version)
    assert reason.startswith(f"unexpected {type(error).__name__}: ")
    assert "\n" not in reason


def test_rejected_twice_in_a_second_are_both_kept(drop):
    """A name that is taken is not overwritten."""
    for text in "ab":
        drop.publisher.failures = [OperationFailed("no")]
        drop.write("net.onnx", text)
        drop.wait()

    first, second = "rejected/net-20261121T123005Z", "rejected/net-20261121T123005Z-2"
    assert drop.visible == {
        f"{first}.onnx": "a",
        f"{first}.onnx.reason.txt": "no\n",
        f"{second}.onnx": "b",
        f"{second}.onnx.reason.txt": "no\n",
    }


def test_reason_is_one_line_and_names_the_original(drop):
    """The path of the copy means nothing to anybody."""
    copy = drop.folder / STAGING / "net.onnx"
    drop.publisher.failures = [OperationFailed(f"'{copy}' is bad\nindeed")]
    drop.write("net.onnx", "a")

    drop.wait()

    assert drop.announced == [f"net.onnx: rejected: '{drop.folder / 'net.onnx'}' is bad indeed"]


def caused(error: Exception) -> OperationFailed:
    """Return what the publisher makes of a refusal that has another reason."""
    wrapped = OperationFailed(f"publish net 2 failed, and nothing has changed: {error}")
    wrapped.__cause__ = error
    return wrapped


@pytest.mark.parametrize(
    "error",
    [
        NotReached("the server does not respond"),
        files.LockTimeout("another one publishes"),
        TemporaryFailure("recovery failed"),
        OSError(28, "No space left on device"),
        caused(OSError(28, "No space left on device")),
        caused(files.LockTimeout("another one holds the history")),
    ],
    ids=["server", "lock", "recovery", "disk", "disk-in-action", "lock-in-action"],
)
def test_what_is_not_its_fault_is_tried_again(drop, error):
    """It stays with a message, and pauses grow up to a minute; other models do not wait."""
    tries: list[float] = []
    drop.publisher.failures = [error] * 7
    drop.publisher.during = lambda: tries.append(drop.seconds)
    drop.write("net.onnx", "a")
    drop.wait()
    assert ([*drop.visible], drop.announced) == (["net.onnx"], [])

    drop.wait(400)

    assert [later - earlier for earlier, later in pairwise(tries)] == [2, 4, 8, 16, 32, 60, 60]
    assert [line.partition(" s: ")[0] for line in drop.reported[:2]] == [
        "net.onnx: not possible now, next attempt in 2",
        "net.onnx: not possible now, next attempt in 4",
    ]
    assert drop.published == [("net", "a")]


def test_order_is_kept_when_the_first_must_wait(drop):
    """A model's second file is not published before its first; another model's is."""
    drop.publisher.failures = [NotReached("gone")]
    for name in ("net@1.onnx", "net@2.onnx", "other.onnx"):
        drop.write(name, name)

    drop.wait(20)

    assert [model for model, _ in drop.published] == ["other", "net", "net"]
    assert [text for _, text in drop.published[1:]] == ["net@1.onnx", "net@2.onnx"]


@pytest.mark.parametrize("name", ["net.onnx", "net"])
def test_link_stays_and_is_published_when_it_leads_elsewhere(drop, tmp_path, name):
    """Each new content behind a link is a version, once, also over restarts of the watcher."""
    for text in "abc":
        (tmp_path / text).mkdir()
        (tmp_path / text / "net.onnx").write_text(text)
    link, inside = drop.folder / name, "" if name.endswith(".onnx") else "net.onnx"
    targets = {text: tmp_path / text / ("" if inside else "net.onnx") for text in "abc"}
    swap(link, targets["a"])
    drop.wait(20)
    drop.start()
    drop.wait(20)
    assert (drop.published, link.is_symlink()) == ([("net", "a")], True)

    for text in "bca":
        swap(link, targets[text])
        drop.wait(20)
        drop.start()

    assert drop.published == [("net", text) for text in "abca"]
    assert link.is_symlink()
    assert not (drop.folder / "published" / name).exists()


def test_what_stays_is_not_read_all_the_time(drop, tmp_path):
    """A large file behind a link is read again only when its size, time or inode is another."""
    target = tmp_path / "a"
    target.write_text("a")
    swap(drop.folder / "net.onnx", target)
    drop.wait(20)
    status = target.stat()
    target.write_text("b")
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    drop.wait(20)
    assert drop.published == [("net", "a")]

    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    drop.wait()

    assert drop.published == [("net", "a"), ("net", "b")]


def test_kubernetes_volume(drop):
    """Links through `..data` are published when that is swapped, and never moved."""
    for text in "ab":
        (drop.folder / f"..{text}").mkdir()
        (drop.folder / f"..{text}" / "net.onnx").write_text(text)
    swap(drop.folder / "..data", Path("..a"))
    (drop.folder / "net.onnx").symlink_to("..data/net.onnx")
    drop.wait(20)

    swap(drop.folder / "..data", Path("..b"))
    drop.wait(20)

    assert drop.published == [("net", "a"), ("net", "b")]
    assert (drop.folder / "net.onnx").read_text() == "b"


def test_folder_that_holds_links_stays(drop):
    """Such is a volume of its own: what is in it is swapped there."""
    for text in "ab":
        drop.write(f"net/..{text}/net.onnx", text)
    swap(drop.folder / "net" / "..data", Path("..a"))
    (drop.folder / "net" / "net.onnx").symlink_to("..data/net.onnx")
    drop.wait(20)

    swap(drop.folder / "net" / "..data", Path("..b"))
    drop.wait(20)

    assert drop.published == [("net", "a"), ("net", "b")]


def test_link_to_nothing_waits(drop, tmp_path):
    """Its target may come later."""
    (drop.folder / "net.onnx").symlink_to(tmp_path / "later")
    drop.wait()
    assert (drop.published, drop.reported) == ([], [])

    (tmp_path / "later").write_text("a")
    drop.wait()

    assert drop.published == [("net", "a")]


def test_rejected_link_is_tried_again_on_other_terms_only(drop, tmp_path):
    """A rejected link stays rejected until the terms or its target change."""
    (tmp_path / "a").write_text("a")
    swap(drop.folder / "net.onnx", tmp_path / "a")
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
    """A link that an earlier release has published is not published again."""
    (tmp_path / "a").write_text("a")
    swap(drop.folder / "net.onnx", tmp_path / "a")
    line = (
        '{"time":"2026-11-01T12:00:00.000000Z","entry":"net.onnx","sha256":"%s","model":"net","version":2,'
        '"reason":"","stays":true,"terms":""}\n'
    )
    sha256 = hashlib.sha256(f"{hashlib.sha256(b'a').hexdigest()}  net.onnx\n".encode()).hexdigest()
    (drop.folder / JOURNAL).write_text(line % sha256)
    drop.start()

    drop.wait(20)

    assert drop.published == []


def test_what_cannot_be_moved_is_published_once(drop):
    """It is recorded like a link, with a message."""
    (drop.folder / "published").write_text("in the way")
    drop.write("net.onnx", "a")
    drop.wait(20)
    drop.start()
    drop.wait(20)

    assert (drop.published, (drop.folder / "net.onnx").exists()) == ([("net", "a")], True)
    assert [line.partition(": [")[0] for line in drop.reported] == [
        "net.onnx: cannot be moved to 'published' and stays"
    ]


def test_folder_that_is_away_for_a_while(drop):
    """A missing folder, like a network drive, is reported once and read again later."""
    drop.write("net.onnx", "a")
    away = drop.folder.rename(drop.folder.with_name("away"))
    drop.wait()
    assert drop.reported == [f"cannot read '{drop.folder}': No such file or directory"]

    away.rename(drop.folder)
    drop.wait()

    assert drop.published == [("net", "a")]


def test_pipe_holds_nobody_up(drop):
    """A pipe is not opened, alone or in a folder."""
    os.mkfifo(drop.folder / "pipe.onnx")
    drop.write("net/net.onnx", "a")
    os.mkfifo(drop.folder / "net" / "pipe")

    drop.wait()

    assert drop.announced == ["net: published as version 2 of 'net'"]


CONFIG = (
    ONE_INSTANCE
    + "max_batch_size: 8\nversion_policy { specific { versions: [ 1 ] } }\n"
    + tensor("input", "x", "FP32", [2])
    + tensor("output", "y", "FP32", [2])
)


@pytest.fixture
def repository(tmp_path):
    """A repository with one network that no server serves."""
    folder = tmp_path / "repository"
    store(folder, "net", identity("FP32", ["batch", 2]), CONFIG)
    return folder


def publish_to(repository: Path) -> Publish:
    """Return what really publishes there, without a server."""
    return watch.publication(
        repository, lambda: None, Gates(max_slowdown=100, max_memory_ratio=100), 0, lambda line: None
    )


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_newest_version_is_not_published_again(repository, tmp_path, is_folder):
    """After a kill before it was remembered, the same file is found to be that version already."""
    source = tmp_path / "net@x.onnx"
    if is_folder:
        source = tmp_path / "net@x"
        source.mkdir()
        (source / "README").write_text("about it")
    shutil.copyfile(repository / "net" / "1" / "model.onnx", source / "net.onnx" if is_folder else source)

    assert publish_to(repository)("net", source) == ("net", 1)
    assert [each.name for each in sorted((repository / "net").iterdir())] == ["1", "config.pbtxt"]


def test_newest_version_is_found_in_a_folder_with_a_folder_of_its_name(repository, tmp_path):
    """The network may be in a folder that is called as Triton calls the network."""
    shutil.copytree(repository / "net" / "1", tmp_path / "new" / "model.onnx")

    assert watch.find_published(find_network(repository, "net"), tmp_path / "new") == 1


def test_server_is_looked_up_for_each_publication(repository):
    """It may have been started anew, on other ports, since the last one."""
    looks: list[None] = []
    publish = watch.publication(repository, lambda: looks.append(None), Gates(), 0, lambda line: None)
    assert looks == []

    for _ in range(3):
        publish("net", repository / "net" / "1" / "model.onnx")

    assert len(looks) == 3


def test_folder_with_the_newest_version_as_a_side_file_is_another(repository, tmp_path):
    """The network decides, not a copy of the predecessor in the same folder."""
    source = tmp_path / "net"
    (source / "before").mkdir(parents=True)
    shutil.copyfile(repository / "net" / "1" / "model.onnx", source / "before" / "net.onnx")
    (source / "net.onnx").write_text("bad")

    with pytest.raises(OperationFailed, match="expected an ONNX network"):
        publish_to(repository)("net", source)


def test_unknown_model_is_the_files_fault_and_a_lost_repository_is_not(repository, tmp_path):
    """An unknown model is a rejection; a missing repository is a temporary failure."""
    source = tmp_path / "other.onnx"
    source.write_text("a")

    with pytest.raises(WrongUsage, match="no network 'other', it has: net"):
        publish_to(repository)("other", source)
    repository.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        publish_to(repository)("net", source)


def test_failed_recovery_is_not_the_files_fault(repository, tmp_path):
    """A recovery that fails now does not reject the file."""
    (tmp_path / ".repository.nereid").mkdir()
    (tmp_path / ".repository.nereid" / "journal.jsonl").write_text('{"event":"commit","operation":7}\n')

    with pytest.raises(TemporaryFailure, match="another release of nereid wrote it"):
        publish_to(repository)("net", repository / "net" / "1" / "model.onnx")


@pytest.mark.parametrize(
    ("folder", "repository_name", "model", "reason"),
    [
        ("absent", "repository", "", "cannot watch '{base}/absent': it is not a folder; fix: mkdir "),
        ("file", "repository", "", "cannot watch '{base}/file': it is not a folder"),
        (
            "link",
            "repository",
            "",
            "cannot watch '{base}/link': it contains the repository '{base}/repository', or is inside",
        ),
        (
            ".",
            "repository",
            "",
            "cannot watch '{base}': it contains the repository '{base}/repository', or is inside",
        ),
        ("drop", "absent", "", "'{base}/absent' is not a folder; fix: "),
        ("drop", "repository", "other", "'{base}/repository' has no network 'other', it has: net"),
    ],
    ids=["absent", "file", "in-repository", "around-repository", "repository", "model"],
)
def test_what_would_have_all_rejected_is_refused(repository, folder, repository_name, model, reason):
    """A folder that cannot be watched, or a model that is not there, is wrong usage."""
    base = repository.parent
    (base / "drop").mkdir()
    (base / "file").touch()
    (base / "link").symlink_to(repository / "net")

    with pytest.raises(WrongUsage) as refused:
        watch.check(base / folder, base / repository_name, model)

    assert str(refused.value).startswith(reason.format(base=base))


def nereid(repository: Path, *words: str):
    """Run `nereid watch WORDS`, which fails immediately."""
    environment = {"NEREID_REPOSITORY": str(repository), "XDG_RUNTIME_DIR": str(repository.parent)}
    return CliRunner().invoke(app, ["watch", *words], env=environment)


def test_wrong_usage_ends_the_command(repository, tmp_path):
    """The exit code is 2, and nothing is written."""
    done = nereid(repository, str(tmp_path / "absent"))

    assert (done.exit_code, "is not a folder; fix: mkdir" in done.stderr) == (2, True)
    assert [*tmp_path.rglob(JOURNAL)] == []


def test_second_watcher_is_refused(repository, drop):
    """A second watcher of a folder ends with an error."""
    done = nereid(repository, str(drop.folder))

    assert done.exit_code == 1
    assert f"'{drop.folder / JOURNAL}' is locked by another `nereid watch`; fix: " in done.stderr


def test_interrupt_ends_it_in_order(repository, tmp_path):
    """It sees what is dropped while it runs, and Ctrl-C ends it with exit code 0."""
    folder = tmp_path / "drop"
    folder.mkdir()
    words = [str(folder), "--settle-s", "0.1", "--repository", str(repository)]
    with subprocess.Popen(
        [sys.executable, "-m", "nereid", "watch", *words],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr.readline() == f"watching {folder}\n"
            (folder / "other.onnx").write_text("a")
            said = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=WATCHDOG_S)
        finally:
            process.kill()

    assert said.startswith("other.onnx: rejected: ")
    assert (process.returncode, rest) == (0, ("", "stopped\n"))
