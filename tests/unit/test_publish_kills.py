"""Commands that change a repository are killed before each change of a file, or their server is."""

import contextlib
import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import pytest

from nereid.base import files
from nereid.base.errors import OperationFailed
from nereid.models.publish import actions
from nereid.models.publish.actions import Install
from nereid.models.publish.add import AddRequest, add
from nereid.models.publish.publisher import retire
from nereid.models.publish.remove import remove
from nereid.models.publish.transaction import locked_repository, opened_journal
from nereid.models.routes.location import find_route, find_routes, read_route_file
from nereid.server.run_dir import ServerInfo
from tests import publishing
from tests.fake_server import FakeServer, Killed, killed_at, running
from tests.publishing import NET, ROUTE, contents
from tests.user_networks import UserNetwork

pytestmark = pytest.mark.process
Report = Callable[[str], None]


@dataclass
class Site:
    """A folder with a repository, as it is at the begin of each test; `models` is its present copy."""

    begin: Path
    models: Path
    lines: list[str] = field(default_factory=list)

    def reset(self) -> None:
        shutil.rmtree(self.models.parent, ignore_errors=True)
        shutil.copytree(self.begin, self.models.parent)
        self.lines.clear()

    def recover(self, server_info: ServerInfo | None = None, report: Report | None = None) -> None:
        with locked_repository(self.models, server_info, report or self.lines.append):
            pass


def state(repository: Path) -> tuple[dict[str, str], dict[str, float]]:
    route = read_route_file(find_route(repository, ROUTE)).route()
    kept = {name: sha for name, sha in contents(repository).items() if not name.startswith(f"{ROUTE}.route.")}
    return kept, {variant.name: variant.weight for variant in route.variants}


@pytest.fixture(scope="module")
def trees(tmp_path_factory) -> dict[str, Path]:
    """Folders with a repository and its journal: before all, and after a publication or an addition.

    In `replaced`, another network has replaced the added one.
    """
    base = tmp_path_factory.mktemp("trees")
    publishing.store_published(base / "before" / "models", publishing.ONLY_FIRST)
    for name in ("published", "added"):
        shutil.copytree(base / "before", base / name)
    publishing.publish_number(base / "published" / "models", base, None, 2)
    onnx.save(publishing.classifier(), base / "small.onnx")
    add(base / "added" / "models", AddRequest(base / "small.onnx", "small", {"preset": "imagenet"}), None)
    shutil.copytree(base / "added", base / "replaced")
    onnx.save(UserNetwork().build(), base / "other.onnx")
    other = AddRequest(base / "other.onnx", "small", {"preset": "imagenet"}, is_replacing=True)
    add(base / "replaced" / "models", other, None)
    return {name: base / name for name in ("before", "published", "added", "replaced")}


def committed(before: Path, done: Path, folder: Path) -> Path:
    """Make the state in which an operation has its line `commit`, and no action is done."""
    shutil.copytree(before, folder)
    log = files.state_folder(folder / "models")
    shutil.copytree(files.state_folder(done / "models"), log, dirs_exist_ok=True)
    path = log / "journal.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with opened_journal(folder / "models") as opened:
        operation = opened.events.read()[-1].operation
    for action in operation.actions:
        if isinstance(action, Install):
            target = log / operation.id / "new" / action.path
            target.parent.mkdir(parents=True, exist_ok=True)
            source = done / "models" / action.path
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return folder


def failed(begin: Path, folder: Path, last: str) -> Path:
    """Make the state in which all actions of an operation are done, and have to be undone.

    The progress of the last action begins with `last`.
    """
    shutil.copytree(begin, folder)

    def kill(line: str) -> None:
        if line.startswith(last):
            raise Killed

    with contextlib.suppress(Killed), locked_repository(folder / "models", None, kill):
        pass
    with opened_journal(folder / "models") as opened:
        opened.write("undo", opened.events.read()[-1].operation, "planted")
    return folder


# The end of each command, and that of one that is killed before its first line in the journal.
ENDS = {
    "publish": ("published", "published"),
    "undo": ("before", "before"),
    "retire": ("before", "published"),
    "add": ("added", "added"),
    "remove": ("before", "added"),
    "replace": ("replaced", "replaced"),
    "undo_replace": ("added", "added"),
}
# The trees before and after the operation that a command recovers.
RECOVERED = {"publish": ("before", "published"), "undo": ("before", "published"), "add": ("before", "added")}
RECOVERED |= {"replace": ("added", "replaced"), "undo_replace": ("added", "replaced")}
# How the progress of the last action begins, after which the operation has to be undone.
UNDONE_AFTER = {"undo": f"{ROUTE}: generation", "undo_replace": "small: added"}


@pytest.fixture
def start(trees, tmp_path) -> Callable[[str], Site]:
    def make(command: str) -> Site:
        begin = trees[ENDS[command][1]]
        if command in RECOVERED:
            begin = committed(*(trees[name] for name in RECOVERED[command]), tmp_path / "commit")
        if command in UNDONE_AFTER:
            begin = failed(begin, tmp_path / "begin", UNDONE_AFTER[command])
        site = Site(begin, tmp_path / "now" / "models")
        site.reset()
        return site

    return make


def run(
    command: str, site: Site, server_info: ServerInfo | None = None, report: Report | None = None
) -> None:
    report = report or site.lines.append
    if command == "retire":
        retire(site.models, NET, 2, server_info, report)
    elif command == "remove":
        remove(site.models, "small", server_info, report)
    else:
        site.recover(server_info, report)


SLOW = ("add", "remove", "undo_replace")


@pytest.mark.parametrize(
    ("command", "ends"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (row[0] in SLOW)) for row in ENDS.items()],
    ids=ENDS,
)
def test_killed_command_is_finished_or_undone(start, trees, command, ends):
    """Whichever change of a file comes next, a server can start, and the next command ends the operation."""
    site, outcomes = start(command), []
    expected = [state(trees[end] / "models") for end in ends]
    for number in itertools.count(1):
        site.reset()
        with killed_at(number) as changes:
            run(command, site)
        assert_loadable(site.models)
        if len(changes) < number:
            break
        site.lines.clear()
        site.recover()

        assert state(site.models) in expected, (number, changes)
        outcomes.append(expected.index(state(site.models)))
        # After its last line in the journal, an operation is not recovered, and its staged files stay.
        if site.lines:
            left = {path.name for path in files.state_folder(site.models).iterdir()}
            assert left == {"journal.jsonl", "reserve"}, (number, changes)

    assert state(site.models) == expected[0]
    # Once the operation is in the journal, it is never forgotten.
    assert outcomes == sorted(outcomes, reverse=True)
    assert len(outcomes) > 10


def assert_loadable(repository: Path) -> None:
    """Check that a server which starts now has all models, and takes all routes."""
    server = FakeServer(repository)
    page = server.page()
    for location in (find_route(repository, name) for name in (ROUTE, "small") if name in server.loaded):
        assert read_route_file(location).sha256 in page, (location, server.loaded)


def killing(action: Callable[[], None], number: int) -> Report:
    """Give a report that acts at the N-th line of progress, after the line about the recovery."""
    lines = itertools.count(0)

    def report(line: str) -> None:
        if not line.startswith("recovery") and next(lines) == number:
            action()

    return report


def die() -> None:
    raise Killed


SERVED = {"publish": {1, 2}, "undo": {1}, "retire": {1}, "replace": {1}, "undo_replace": {1}}


@pytest.mark.parametrize("dies", ["command", "server"])
@pytest.mark.parametrize(("command", "versions"), SERVED.items(), ids=SERVED)
def test_server_follows_a_killed_command(start, trees, command, versions, dies, monkeypatch):
    monkeypatch.setattr(actions, "DRAIN_S", 0)  # no requests need it
    site = start(command)
    for number in itertools.count():
        site.reset()
        server, died = FakeServer(site.models), []
        with contextlib.ExitStack() as up:
            server_info = up.enter_context(running(server))
            kill = die if dies == "command" else lambda up=up, died=died: died.append(up.close())
            with contextlib.suppress(Killed, OperationFailed):
                run(command, site, server_info, killing(kill, number))
                if not died:
                    break
            if dies == "server":
                server = FakeServer(site.models)
                up.enter_context(running(server, server_info.ports))
            site.recover(server_info)

            assert server.loaded[NET] == versions, number
            assert server.loaded.keys() >= {f"{NET}_v{version}" for version in versions}
            for location in find_routes(site.models):
                assert read_route_file(location).sha256 in server.page()
            assert state(site.models) == state(trees[ENDS[command][0]] / "models")
            fresh = FakeServer(site.models)
            assert (server.loaded, server.configs) == (fresh.loaded, fresh.configs), number
    assert number >= 3
