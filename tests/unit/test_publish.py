"""Publishing without a server: version numbers, configs, weights, and recovery after a kill."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from nereid.application.exit_codes import reason
from nereid.backends.routing.assignment import parse_route
from nereid.base import files
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish import transaction
from nereid.models.publish.actions import AddToVersionPolicy, AddVariant, Install, LoadVersion, Warm
from nereid.models.publish.network import copy_pinned_model, successor, versions
from nereid.models.publish.publisher import publish, retire, rollback
from nereid.models.routes.change import change, propose_weights
from nereid.models.routes.location import find_route
from nereid.repository.repository_index import PinnedModel, configs, pinned_models
from nereid.server.ports import Ports, free_ports
from nereid.server.run_dir import ServerInfo
from tests import publishing
from tests.publishing import NET, ROUTE, contents, edit_route, publish_number, unchanged, write_route
from tests.routes import ALL_VERSIONS, document, store_adding, store_ensemble, store_router, variant
from tests.tables import cases

pytestmark = pytest.mark.process


def weights(repository: Path) -> dict[str, float]:
    route = parse_route((repository / f"{ROUTE}.route.json").read_bytes())
    return {entry.name: entry.weight for entry in route.variants}


def events(repository: Path) -> tuple[transaction.OperationEvent, ...]:
    with transaction.opened_journal(repository) as log:
        return log.events.read()


def test_successor_has_the_new_number():
    names = {"v1": "v12", "stable": "stable_v12", "net_v11": "net_v11_v12"}

    assert {name: successor(name, 1, 12) for name in names} == names


@pytest.mark.parametrize("policy", [ALL_VERSIONS, publishing.ONLY_FIRST], ids=["all", "specific"])
def test_versions_are_published_and_retired_without_a_server(tmp_path, policy):
    repository = tmp_path / "models"
    publishing.store_published(repository, policy)
    before = contents(repository / NET)

    done = publish_number(repository, tmp_path, None, 2, share=0)

    assert (done.version, done.pinned, weights(repository)) == (2, ("net_v2",), {"v1": 100, "v2": 0})
    for file in ("config.pbtxt", "configs/other.pbtxt"):
        assert (repository / NET / file).read_text().endswith(policy.replace("1 ]", "1, 2 ]"))
    pinned = {(pin.model, pin.network_version) for pin in pinned_models(repository, configs(repository))}
    assert pinned == {("net_v1", 1), ("net_v2", 2)}
    listing = [(entry.version, entry.state, entry.source) for entry in versions(repository, NET, None)[1]]
    assert listing == [(2, "published", "adds-2.onnx"), (1, "published", "")]

    retire(repository, NET, 2, None)

    assert contents(repository / NET) == before
    assert not (repository / "net_v2").exists()
    assert (weights(repository), events(repository)[-1].event) == ({"v1": 100}, "done")
    assert publish_number(repository, tmp_path, None, 2).version == 3
    assert {path.name for path in files.state_folder(repository).iterdir()} == {"journal.jsonl", "reserve"}


COPY = """
import sys
from pathlib import Path
from nereid.models.publish.network import copy_pinned_model
from nereid.repository.repository_index import PinnedModel

models = Path(sys.argv[1])
copy_pinned_model(models / "net_v1", PinnedModel("net_v1", "net", 1, "", 0), 2, models / "net_v2")
"""


def test_copy_of_a_pinned_model_keeps_comments_in_any_locale(repository):
    """Configs are UTF-8, whatever the locale is; a second copy has no second head."""
    config = repository / "net_v1" / "config.pbtxt"
    text = config.read_text()
    assert "model_version: 1" in text
    config.write_text(f"# Für Größe L.\n{text}", encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    subprocess.run([sys.executable, "-c", COPY, repository], env=os.environ | locale, check=True)

    head, comment, *_ = (repository / "net_v2" / "config.pbtxt").read_text(encoding="utf-8").splitlines()
    assert head == "# Like net_v1, with version 2 of net; written by nereid publish."
    assert comment == "# Für Größe L."
    copy_pinned_model(repository / "net_v2", PinnedModel("net_v2", "net", 2, "", 0), 3, repository / "net_v3")
    lines = (repository / "net_v3" / "config.pbtxt").read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["# Like net_v2, with version 3 of net; written by nereid publish.", comment]


@pytest.fixture
def small_disk(tmp_path):
    (folder := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")
def test_retirement_frees_a_full_disk(small_disk, tmp_path):
    repository = small_disk / "models"
    publishing.store_published(repository, ALL_VERSIONS)
    publish_number(repository, tmp_path, None, 2, share=0)
    with contextlib.suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))

    with pytest.raises(OSError, match="No space left") as failed:
        publish_number(repository, tmp_path, None, 3)
    retire(repository, NET, 2, None)

    assert str(small_disk) in reason(failed.value)
    assert (weights(repository), events(repository)[-1].event) == ({"v1": 100}, "done")
    assert [entry.version for entry in versions(repository, NET, None)[1]] == [1]


def test_rejected_version_leaves_nothing_and_takes_no_number(repository, tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"")

    with unchanged(repository), pytest.raises(OperationFailed, match=r"is empty \(0 bytes\)"):
        publish(repository, NET, tmp_path / "bad.onnx", None)

    assert events(repository)[-1].event == "undone"
    assert publish_number(repository, tmp_path, None, 2).version == 2


@cases(
    number=("left\nright\n", "expected 3 labels, got 2"),
    name=("left\ncentre\nright\n", "line 2: expected 'middle', got 'centre'"),
)
def test_labels_of_another_model_are_refused(labels, message, repository, tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    publishing.candidate(folder, 2)
    (folder / "labels.txt").write_text(labels)

    with pytest.raises(OperationFailed, match=message):
        publish(repository, NET, folder, None, publishing.OTHER_ANSWERS)


def edit_second(repository: Path, **changes) -> None:
    """Change fields of the second variant."""
    first, second = json.loads((repository / f"{ROUTE}.route.json").read_text())["variants"]
    edit_route(repository, variants=[first, second | changes])


def shadow(model: str, version: int) -> list[dict]:
    return [{"name": "copy", "model": model, "version": version, "percent": 1}]


V2 = "variant 'v2' of route 'r': "
HAS_TRAFFIC = V2 + "expected weight 0, got 5; fix: .* v2=0, or nereid rollback net_v2$"
UNPINNED = [variant("v1", "net_v1", 1), variant("own", NET, 0, version=2)]


@cases(
    weight=(partial(edit_second, weight=5), HAS_TRAFFIC),
    headers=(partial(edit_second, headers={"x-route-a": ["b"]}), V2 + "it has header rules"),
    default=(partial(edit_route, default="v2"), V2 + "it is the route's default"),
    shadow=(partial(edit_route, shadows=shadow("net_v2", 1)), r"'copy' of route 'r' calls it; fix"),
    shadow_on_the_network=(partial(edit_route, shadows=shadow(NET, 2)), r"'copy' of route 'r' calls it; fix"),
    variant_on_the_network=(partial(edit_route, variants=UNPINNED), r"'own' of route 'r' calls it"),
)
def test_version_in_use_is_not_retired(change, message, repository, tmp_path):
    publish_number(repository, tmp_path, None, 2)
    change(repository)

    refused = pytest.raises(WrongUsage, match=f"cannot retire version 2 of 'net': {message}")
    with unchanged(repository), refused:
        retire(repository, NET, 2, None)


@pytest.mark.parametrize("profile", ["config.pbtxt", "configs/other.pbtxt"])
def test_version_that_another_model_runs_is_not_retired(repository, tmp_path, profile):
    publish_number(repository, tmp_path, None, 2)
    store_ensemble(repository, "both", NET, 1)
    plain = repository / "both" / "config.pbtxt"
    # A second step on ONNX Runtime: not a pinned model.
    step = 'step { model_name: "net" model_version: %d } step {'
    text = plain.read_text()
    plain.write_text(text.replace("step {", step % 1, 1))
    (repository / "both" / "configs").mkdir()
    (repository / "both" / profile).write_text(text.replace("step {", step % 2, 1))

    with pytest.raises(WrongUsage, match=r"cannot retire version 2 of 'net': model 'both' calls it"):
        retire(repository, NET, 2, None)


def test_last_version_is_not_retired(repository):
    with pytest.raises(WrongUsage, match=r"cannot retire version 1 of 'net': it is the only served version"):
        retire(repository, NET, 1, None)


def test_rollback_restores_the_weights_from_before(repository):
    store_versions(repository, 2, 3)
    write_route(repository, variant("v1", "net_v1", 90), variant("v2", "net_v2", 10), variant("v3", "net_v3"))
    set_weights(repository, v1=0, v2=0, v3=1)

    rollback(repository, NET, None)
    assert weights(repository) == {"v1": 90, "v2": 10, "v3": 0}

    rollback(repository, NET, None)
    assert weights(repository) == {"v1": 90, "v2": 0, "v3": 0}

    with pytest.raises(WrongUsage, match=r"route 'r' has no version of 'net' before 1"):
        rollback(repository, NET, None)


def store_versions(repository: Path, *numbers: int) -> None:
    for number in numbers:
        store_ensemble(repository, f"net_v{number}", NET, number)
        (repository / NET / str(number)).mkdir()


def set_weights(repository: Path, **shares: float) -> None:
    change(find_route(repository, ROUTE), propose_weights(shares), None, is_offline=True)


def test_rollback_changes_all_routes_or_none(repository):
    store_versions(repository, 2)
    write_route(repository, variant("v1", "net_v1"), variant("v2", "net_v2", 1), variant("copy", "net_v2", 2))
    store_router(repository, "q", document(variant("v2", "net_v2", 1)))

    with pytest.raises(WrongUsage, match=r"route 'q' has no version of 'net' before 2"):
        rollback(repository, NET, None)
    assert weights(repository) == {"v1": 0, "v2": 1, "copy": 2}

    (repository / "q.route.json").write_text(json.dumps(document(variant("v1", "net_v1", 1))))
    rollback(repository, NET, None)
    assert weights(repository) == {"v1": 1, "v2": 0, "copy": 0}


def test_rollback_leaves_other_models_alone(repository):
    """Those of another network keep their weights, and broken ones prevent nothing."""
    (repository / "broken").mkdir()
    (repository / "broken" / "config.pbtxt").write_text("no config")
    store_router(repository, "q")
    (repository / "q.route.json").write_text("no route")
    store_versions(repository, 2)
    store_adding(repository, "other", 5)
    store_ensemble(repository, "other_v1", "other", 1)
    other = variant("o", "other_v1", 40)
    write_route(repository, variant("v1", "net_v1", 50), other, variant("v2", "net_v2", 10))

    rollback(repository, NET, None)

    assert weights(repository) == {"v1": 50, "o": 40, "v2": 0}


def test_rollback_moves_the_default_too(repository, tmp_path):
    """The default variant, which replaces failing ones, is not one without traffic."""
    publish_number(repository, tmp_path, None, 2)
    edit_second(repository, weight=1)
    edit_route(repository, default="v2")
    set_weights(repository, v1=0)

    rollback(repository, NET, None)

    route = parse_route((repository / f"{ROUTE}.route.json").read_bytes())
    assert (weights(repository), route.default) == ({"v1": 100, "v2": 0}, "v1")


@pytest.mark.parametrize("kind", ["publish", "retire"])
def test_operation_that_had_only_begun_is_undone(repository, kind):
    """Without its actions in the journal, nothing was done, and the journal does not claim it: once."""
    before, output = contents(repository), []
    with transaction.locked_repository(repository, None, print) as locked:
        _, workspace = locked.begin(kind, NET, 2)
        (workspace.staging / "new" / NET / "2").mkdir(parents=True)

    with transaction.locked_repository(repository, None, output.append) as locked:
        last = locked.events.read()[-1]

    assert output[0].startswith(f"recovery: '{kind} net 2' of ")
    assert (last.event, contents(repository), workspace.staging.exists()) == ("undone", before, False)
    with transaction.locked_repository(repository, None, output.append) as locked:
        assert locked.events.read()[-1] == last


def test_files_from_before_are_not_removed(repository, tmp_path):
    before = contents(repository)

    def intrude(line: str) -> None:
        if "version_policy includes version 2" in line:
            (repository / "net_v2").mkdir()
            (repository / "net_v2" / "mine.txt").write_text("mine")

    with pytest.raises(OperationFailed, match=r"cannot install 'net_v2': '.*/net_v2' already exists"):
        publish_number(repository, tmp_path, None, 2, report=intrude)

    assert (repository / "net_v2" / "mine.txt").read_text() == "mine"
    shutil.rmtree(repository / "net_v2")
    assert contents(repository) == before


def test_retirement_ends_when_the_version_is_in_use_again(repository, tmp_path):
    """A retirement that was killed before its first step is not finished if the version has traffic now."""
    publish_number(repository, tmp_path, None, 2)
    there = contents(repository / "net_v2")
    with transaction.locked_repository(repository, None, print) as locked:
        operation, _ = locked.begin("retire", NET, 2)
        installed = Install("net/2", NET, 2), Install("net_v2", "net_v2")
        actions = (*installed, AddVariant(ROUTE, "v2", "net_v2", 0))
        locked.write("undo", replace(operation, actions=actions))
    set_weights(repository, v2=50)

    output = []
    with transaction.locked_repository(repository, None, output.append) as locked:
        assert locked.events.read()[-1].event == "undone"

    message = "cannot remove variant 'v2': expected weight 0, got 50; fix: nereid route set v2=0"
    assert output[1].startswith(message)
    assert (contents(repository / "net_v2"), weights(repository)["v2"]) == (there, 50)


def test_damage_before_the_last_line_is_reported_and_ignored(repository, tmp_path):
    """The last line has the whole state, so the next change is possible."""
    publish_number(repository, tmp_path, None, 2)
    path = files.state_folder(repository) / "journal.jsonl"
    path.write_bytes(path.read_bytes().replace(b"begin", b"begim", 1))
    output: list[str] = []

    with transaction.locked_repository(repository, None, output.append) as locked:
        assert [step.event for step in locked.events.read()] == ["commit", "done"]

    assert output == [f"note: damaged lines of '{path}' are ignored: 1; fix: remove them"]


def test_journal_of_earlier_releases_is_read(repository):
    """The names of actions in the journal are a format, and independent of the classes' names."""
    actions = (
        b'{"type":"Install","path":"net/2","model":"net","version":2},{"type":"Policy","model":"net","version":2},'
        b'{"type":"Serve","model":"net","version":2},{"type":"Warm","model":"net","version":2},'
        b'{"type":"Vary","route":"r","name":"v2","model":"net_v2","weight":0.0}'
    )
    folder = files.state_folder(repository)
    folder.mkdir()
    (folder / "journal.jsonl").write_bytes(
        b'{"time":"2026-11-01T12:00:00.000000Z","event":"done","operation":{"id":"0123456789abcdef",'
        b'"kind":"publish","model":"net","version":2,"user":"root","actions":[' + actions + b']},"note":""}\n'
    )

    (line,) = events(repository)

    first = Install("net/2", "net", 2), AddToVersionPolicy("net", 2), LoadVersion("net", 2), Warm("net", 2)
    assert line.operation.actions == (*first, AddVariant("r", "v2", "net_v2", 0.0))
    assert msgspec.json.encode(line.operation.actions) == b"[" + actions + b"]"


def test_staged_files_are_removed_before_the_end_is_written(repository):
    """Staged files are removed first: they may fill the disk that the journal needs."""

    def refuse(step: transaction.OperationEvent) -> None:
        raise OSError("full")

    with transaction.locked_repository(repository, None, print) as locked:
        operation, workspace = locked.begin("publish", NET, 2)
        (workspace.staging / "new").mkdir()
        full = dataclasses.replace(locked, append=refuse)
        with pytest.raises(OSError, match="full"):
            full.write("undone", operation)

    assert not workspace.staging.exists()


@pytest.mark.parametrize("share", [-1.0, float("nan"), 1.0])
def test_impossible_share_is_refused_first(repository, tmp_path, share):
    with pytest.raises(WrongUsage, match="invalid share: expected 0 to 99% of the traffic, got"):
        publish_number(repository, tmp_path, None, 2, share=share)

    assert not files.state_folder(repository).exists()


def test_server_in_poll_mode_is_an_error(repository, tmp_path):
    server_info = ServerInfo(1, "127.0.0.1", Ports(1, 2, 3), str(repository), "", "", 0, "poll")

    message = r"expected a server with --model-control-mode explicit, got poll"
    with pytest.raises(OperationFailed, match=message):
        publish_number(repository, tmp_path, server_info, 2)


def test_rollback_is_written_when_the_server_is_away(repository, tmp_path):
    publish_number(repository, tmp_path, None, 2, share=0.01)
    (port,) = free_ports(1)
    server_info = ServerInfo(1, "127.0.0.1", Ports(port, port, port), str(repository), "", "")

    (output,) = rollback(repository, NET, server_info)

    assert (weights(repository), "does not respond" in output) == ({"v1": 100, "v2": 0}, True)


def test_repository_on_its_own_mount_is_an_error():
    """A repository on its own mount is refused: staged files could not be renamed into it."""
    refused = pytest.raises(OperationFailed, match=r"'/proc': it is a mount point")
    with refused, transaction.opened_journal(Path("/proc")):
        pass
