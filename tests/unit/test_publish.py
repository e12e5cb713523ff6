"""What publishing decides without a server: version numbers, texts, weights, and what a kill left."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from ops.cli import CommandFailed, WrongUsage
from ops.publish import journal
from ops.publish.actions import Install
from ops.publish.engine import begin, working
from ops.publish.journal import FINISHED
from ops.publish.network import find_network
from ops.publish.pinned import successor
from ops.publish.policy import with_versions
from ops.publish.publisher import publish, retire, rollback
from ops.publish.versions import versions
from ops.repository import pins, versions_there
from python_backend.routing import parse_route
from tests.publishing import (
    NET,
    ONLY_FIRST,
    OTHER_ANSWERS,
    ROUTE,
    candidate,
    contents,
    publish_number,
    store_published,
    write_route,
)
from tests.routes import ALL_VERSIONS, document, store_ensemble, store_router, variant

POLICY = "version_policy { specific { versions: [ 1, 3 ] } }"


@pytest.fixture
def repository(tmp_path):
    """A repository of `net` in version 1, behind route `r`, that no server serves."""
    store_published(tmp_path / "models")
    return tmp_path / "models"


def weights(repository: Path) -> dict[str, float]:
    """Return the weights of route `r`."""
    route = parse_route((repository / f"{ROUTE}.route.json").read_bytes())
    return {each.name: each.weight for each in route.variants}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", f"{POLICY}\n"),
        ("max_batch_size: 8", f"max_batch_size: 8\n{POLICY}\n"),
        (
            "# {\nversion_policy { latest { num_versions: 2 } } # why\nname: 'a'\n",
            f"# {{\n{POLICY} # why\nname: 'a'\n",
        ),
        ("version_policy: <\n  all: <>\n>\nname: 'a}'", f"{POLICY}\nname: 'a}}'"),
        (
            'parameters { key: "version_policy" value { string_value: "{" } }\n',
            f'parameters {{ key: "version_policy" value {{ string_value: "{{" }} }}\n{POLICY}\n',
        ),
    ],
    ids=["empty", "none", "latest-and-comment", "angle-brackets", "a-parameter-of-that-name"],
)
def test_policy_is_replaced_in_the_text(text, expected):
    """Only the field itself changes, wherever and however it is written."""
    assert with_versions(text, [3, 1]) == expected


def test_policy_of_what_is_no_config_is_refused():
    """The message says where the text goes wrong."""
    with pytest.raises(CommandFailed, match=r"the config cannot be read: 1:1 .* has no field named \"no\""):
        with_versions("no config", [1])


@pytest.mark.parametrize(
    ("name", "old", "expected"),
    [
        ("classify_v1", 1, "classify_v12"),
        ("v1", 1, "v12"),
        ("stable", 1, "stable_v12"),
        ("net_v11", 1, "net_v11_v12"),
    ],
)
def test_successor_has_the_new_number(name, old, expected):
    """A name that ends in the old version's number ends in the new one's."""
    assert successor(name, old, 12) == expected


@pytest.mark.parametrize("name", [NET, f"{NET}_v1", ROUTE])
def test_network_is_found_by_any_of_its_names(repository, name):
    """A network, the pinned model in front of it and its route all stand for it."""
    found = find_network(repository, name)

    assert (found.name, [pin.model for pin in found.pins]) == (NET, ["net_v1"])
    assert [(each.route, each.variant.name, each.is_default) for each in found.branches] == [
        (ROUTE, "v1", True)
    ]


def test_unknown_network_is_refused(repository):
    """The message names what there is."""
    with pytest.raises(WrongUsage, match=r"has no network 'other', it has: net"):
        find_network(repository, "other")


@pytest.mark.parametrize("policy", [ALL_VERSIONS, ONLY_FIRST], ids=["all", "specific"])
def test_versions_come_and_go_without_a_server(tmp_path, policy):
    """Published, it is in policy, pinned model and route; retired, only its number is used up."""
    repository = tmp_path / "models"
    store_published(repository, policy)
    before = contents(repository / NET)

    done = publish_number(repository, tmp_path, None, 2, weight=0)

    assert (done.version, done.pinned, weights(repository)) == (2, ("net_v2",), {"v1": 100, "v2": 0})
    for file in ("config.pbtxt", "configs/other.pbtxt"):
        assert (repository / NET / file).read_text().endswith(policy.replace("1 ]", "1, 2 ]"))
    assert {(pin.model, pin.network_version) for pin in pins(repository)} == {("net_v1", 1), ("net_v2", 2)}
    found = versions(repository, NET, None)[1]
    assert [(each.version, each.state, each.source) for each in found] == [
        (2, "published", "adds-2.onnx"),
        (1, "published", ""),
    ]

    retire(repository, NET, 2, None)

    assert contents(repository / NET) == before
    assert not (repository / "net_v2").exists()
    assert weights(repository) == {"v1": 100}
    assert publish_number(repository, tmp_path, None, 2).version == 3
    assert [path.name for path in journal.folder_of(repository).iterdir()] == ["journal.jsonl"]


def test_rejected_version_leaves_nothing_and_takes_no_number(repository, tmp_path):
    """A file that is refused changes no byte, and the next one gets the number it would have had."""
    before = contents(repository)
    (tmp_path / "bad.onnx").write_bytes(b"")

    with pytest.raises(CommandFailed, match=r"is empty \(0 bytes\)"):
        publish(repository, NET, tmp_path / "bad.onnx", None)

    assert contents(repository) == before
    assert journal.read(journal.folder_of(repository))[-1].event == "undone"
    assert publish_number(repository, tmp_path, None, 2).version == 2


def test_labels_of_another_model_are_refused(repository, tmp_path):
    """All versions of a model have the same labels."""
    folder = tmp_path / "new"
    folder.mkdir()
    candidate(folder, 2)
    (folder / "labels.txt").write_text("left\nright\n")
    with pytest.raises(CommandFailed, match=r"has 2 labels, expected 3"):
        publish(repository, NET, folder, None, OTHER_ANSWERS)

    (folder / "labels.txt").write_text("left\ncentre\nright\n")
    with pytest.raises(CommandFailed, match=r"line 2: expected 'middle', got 'centre'"):
        publish(repository, NET, folder, None, OTHER_ANSWERS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": 5}, r"variant 'v2' of route 'r' has weight 5; mend: nereid route set v2=0"),
        ({"headers": {"x-route-a": ["b"]}}, r"header rules of route 'r' lead to variant 'v2'"),
        ({"default": "v2"}, r"variant 'v2' is the default of route 'r'"),
        ({"shadows": True}, r"shadow 'copy' of route 'r' is 'net_v2'"),
    ],
    ids=["weight", "headers", "default", "shadow"],
)
def test_version_in_use_is_not_retired(repository, tmp_path, change, message):
    """A version that requests can reach stays, and nothing changes."""
    publish_number(repository, tmp_path, None, 2)
    path = repository / f"{ROUTE}.route.json"
    document = json.loads(path.read_text())
    if "default" in change:
        document["default"] = "v2"
    elif "shadows" in change:
        document["shadows"] = [{"name": "copy", "model": "net_v2", "version": 1, "percent": 1}]
    else:
        document["variants"][1] |= change
    path.write_text(json.dumps(document))
    before = contents(repository)

    with pytest.raises(WrongUsage, match=message):
        retire(repository, NET, 2, None)

    assert contents(repository) == before


def test_last_version_is_not_retired(repository):
    """A model without a version cannot be served."""
    with pytest.raises(WrongUsage, match=r"version 1 is the only one of 'net' that is served"):
        retire(repository, NET, 1, None)


def test_rollback_gives_back_the_weights_of_before(repository):
    """Each roll back goes to what was before the newest version in use, down to the first."""
    for number in (2, 3):
        store_ensemble(repository, f"net_v{number}", NET, number)
        (repository / NET / str(number)).mkdir()
    models = [(f"v{number}", f"net_v{number}") for number in (1, 2, 3)]
    write_route(
        repository, *(variant(*pair, weight) for pair, weight in zip(models, (90, 10, 0), strict=True))
    )
    set_weights(repository, v1=0, v2=0, v3=1)

    rollback(repository, NET, None)
    assert weights(repository) == {"v1": 90, "v2": 10, "v3": 0}

    rollback(repository, NET, None)
    assert weights(repository) == {"v1": 90, "v2": 0, "v3": 0}

    with pytest.raises(WrongUsage, match=r"route 'r' has no version of 'net' before 1"):
        rollback(repository, NET, None)


def set_weights(repository: Path, **given: float) -> None:
    """Change the weights of route `r` as `nereid route set` does."""
    from ops.route.change import change, reweighted
    from ops.route.target import find_route

    change(find_route(repository, ROUTE), reweighted(given), None, is_offline=True)


def test_rollback_changes_all_routes_or_none(repository):
    """A route without a way back keeps the others from being changed."""
    store_ensemble(repository, "net_v2", NET, 2)
    (repository / NET / "2").mkdir()
    write_route(
        repository, variant("v1", "net_v1", 0), variant("v2", "net_v2", 1), variant("copy", "net_v2", 2)
    )
    store_router(repository, "q")
    only = json.dumps(document(variant("v2", "net_v2", 1)))
    (repository / "q.route.json").write_text(only)

    with pytest.raises(WrongUsage, match=r"route 'q' has no version of 'net' before 2"):
        rollback(repository, NET, None)
    assert weights(repository) == {"v1": 0, "v2": 1, "copy": 2}

    (repository / "q.route.json").write_text(json.dumps(document(variant("v1", "net_v1", 1))))
    rollback(repository, NET, None)
    assert weights(repository) == {"v1": 1, "v2": 0, "copy": 0}


def test_rollback_moves_the_default_too(repository, tmp_path):
    """The variant that stands in for failing ones is not the one that was taken out of use."""
    publish_number(repository, tmp_path, None, 2)
    path = repository / f"{ROUTE}.route.json"
    document = json.loads(path.read_text())
    document["variants"][0]["weight"], document["variants"][1]["weight"], document["default"] = 0, 1, "v2"
    path.write_text(json.dumps(document))

    rollback(repository, NET, None)

    assert (weights(repository), parse_route(path.read_bytes()).default) == ({"v1": 100, "v2": 0}, "v1")


def test_commands_wait_for_each_other(repository):
    """While one changes the repository, another is told so."""
    with (
        journal.opened(repository),
        pytest.raises(CommandFailed, match=r"another `nereid publish` holds"),
        journal.opened(repository, wait_s=0.05),
    ):
        pass


@pytest.mark.parametrize("event", ["begin", "commit", "undo"])
def test_unfinished_operation_is_made_good(repository, tmp_path, event):
    """Begun, it is forgotten; decided, it is done; being taken back, it is taken back: once, by anybody."""
    before = contents(repository)
    with working(repository, None, print) as (log, at):
        operation, site = begin(log, at, "publish", NET, 2)
        (site.staging / "new" / NET / "2").mkdir(parents=True)
        (site.staging / "new" / NET / "2" / "model.onnx").write_bytes(b"x")
        if event != "begin":
            operation = replace(operation, actions=(Install(f"{NET}/2", NET, 2),))
            log.write(event, operation)
        if event == "undo":
            operation.actions[0].forward(site)

    told = []
    with working(repository, None, told.append) as (log, _):
        last = log.lines()[-1]

    assert told[0].startswith("publish net 2 of ")
    assert last.event in FINISHED
    assert versions_there(repository / NET) == ([1, 2] if event == "commit" else [1])
    assert (contents(repository) == before) is (event != "commit")
    with working(repository, None, told.append) as (log, _):
        assert log.lines()[-1] == last


def test_repository_that_is_a_mount_of_its_own_is_refused():
    """What is staged must be renamed into it, which no mount allows."""
    with pytest.raises(CommandFailed, match=r"/proc is a mount of its own"), journal.opened(Path("/proc")):
        pass
