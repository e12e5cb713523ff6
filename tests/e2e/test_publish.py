"""Versions that are published, rolled back and retired on the real server, while it serves."""

import subprocess

import pytest

from nereid.errors import OperationFailed, WrongUsage
from nereid.publish.publisher import publish, retire, rollback
from nereid.publish.versions import versions
from nereid.routes.change import change, reweighted
from nereid.routes.served import RunningServer
from nereid.routes.target import find_route
from tests.publishing import (
    NET,
    ONLY_FIRST,
    OTHER_ANSWERS,
    ROUTE,
    candidate,
    contents,
    publish_number,
    record_of,
    store_published,
)
from tests.routes import ALL_VERSIONS, X, serve_routes, wait_until


@pytest.fixture(
    scope="module",
    params=[ALL_VERSIONS, pytest.param(ONLY_FIRST, marks=pytest.mark.slow)],
    ids=["all", "specific"],
)
def served(request, tmp_path_factory):
    repository = tmp_path_factory.mktemp("published") / "models"
    store_published(repository, request.param)
    with serve_routes(repository, tmp_path_factory.mktemp("run")) as running:
        yield running


@pytest.fixture
def record(served):
    return record_of(served.server)


def set_weights(served, record, **weights: float) -> None:
    change(find_route(served.repository, ROUTE), reweighted(weights), RunningServer(record))


def policies(repository) -> set[str]:
    """Return the `version_policy` lines of `net` in all profiles."""
    files = [repository / NET / "config.pbtxt", repository / NET / "configs" / "other.pbtxt"]
    return {file.read_text().splitlines(keepends=True)[-1] for file in files}


def test_version_is_published_rolled_back_and_retired(served, record, tmp_path):
    """Callers see each step, and the end is like the beginning; with `all` no other version is reloaded."""
    before, stubs = contents(served.repository), served.stubs(NET)

    done = publish_number(served.repository, tmp_path, record, 2, share=0.75)

    assert (done.model, done.version, done.pinned) == (NET, 2, ("net_v2",))
    response = served.send(ROUTE, headers={"x-variant": "v2"})
    assert (response.added, response.origin) == (2, ("v2", "2", "variant"))
    assert policies(served.repository) <= {ALL_VERSIONS, ONLY_FIRST.replace("1", "1, 2")}
    name, found = versions(served.repository, ROUTE, record)
    assert name == NET
    assert [(each.version, each.state, each.shares) for each in found] == [
        (2, "ready", {ROUTE: 0.75}),
        (1, "ready", {ROUTE: 0.25}),
    ]
    sums = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=served.repository / NET / "2")
    assert sums.returncode == 0

    with pytest.raises(WrongUsage, match=r"variant 'v2' of route 'r': expected weight 0, got 300"):
        retire(served.repository, NET, 2, record)
    rollback(served.repository, NET, record)
    assert {served.send(ROUTE).origin[0] for _ in range(20)} == {"v1"}
    assert served.send(ROUTE, headers={"x-variant": "v2"}).added == 2

    retire(served.repository, NET, 2, record)

    assert served.refusal(ROUTE, headers={"x-variant": "v2"})[1].startswith(
        "invalid request: unknown x-variant"
    )
    # Triton 24.10 loads all versions anew if a config changes that is not the one in use.
    if policies(served.repository) == {ALL_VERSIONS}:
        wait_until(lambda: served.stubs(NET) == stubs, "only the first version's process")
    route = f"{ROUTE}.route"
    changed = {name for name, sha in contents(served.repository).items() if before.get(name) != sha}
    assert changed == {f"{route}.json", f"{route}.history.jsonl"}


def test_version_that_the_server_cannot_load_is_undone(served, record, tmp_path):
    before = contents(served.repository)

    def damage(line: str) -> None:
        if "version_policy includes" in line:
            (network,) = set((served.repository / NET).glob("*/model.onnx")) - known
            network.write_bytes(b"no network")

    known = set((served.repository / NET).glob("*/model.onnx"))
    with pytest.raises(OperationFailed, match=r"failed and was undone: .*onnx runtime error"):
        publish(served.repository, NET, candidate(tmp_path, 9), record, OTHER_ANSWERS, report=damage)

    assert contents(served.repository) == before
    assert (served.send(ROUTE).scores == X + 1).all()
