"""Versions that are published, rolled back and retired on the real server, under load, too."""

import itertools
import subprocess
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from loadtest.resource_usage import memory_bytes
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.base.processes import in_background
from nereid.models.publish.network import versions
from nereid.models.publish.publisher import retire, rollback
from nereid.models.routes.change import Superseded, change, propose_weights
from nereid.models.routes.location import find_route
from nereid.repository.repository_index import versions_on_disk
from nereid.server.run_dir import ServerInfo
from tests.proof import IS_PROOF
from tests.publishing import NET, ONLY_FIRST, ROUTE, contents, publish_number, store_published
from tests.routes import ALL_VERSIONS, Load, RouteResponse, X, answered_by, serve_routes, wait_until

# `make proof` runs 100 cycles; CI runs three.
CYCLES = 100 if IS_PROOF else 3
CALLERS = 8
SETTLED = 10
GROWTH = 1.10


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
def server_info(served):
    return served.server.info()


def policies(repository) -> set[str]:
    files = [repository / NET / "config.pbtxt", repository / NET / "configs" / "other.pbtxt"]
    return {file.read_text().splitlines(keepends=True)[-1] for file in files}


def test_version_is_published_rolled_back_and_retired(served, server_info, tmp_path):
    """Callers see each step, and the end is like the beginning; with `all` no other version is reloaded."""
    before, stubs = contents(served.repository), served.stubs(NET)

    done = publish_number(served.repository, tmp_path, server_info, 2, share=0.75)

    assert (done.model, done.version, done.pinned) == (NET, 2, ("net_v2",))
    response = served.send(ROUTE, headers={"x-variant": "v2"})
    assert (response.added, response.origin) == (2, ("v2", "2", "variant"))
    assert policies(served.repository) <= {ALL_VERSIONS, ONLY_FIRST.replace("1", "1, 2")}
    name, states = versions(served.repository, ROUTE, server_info)
    assert name == NET
    assert [(state.version, state.state, state.shares) for state in states] == [
        (2, "ready", {ROUTE: 0.75}),
        (1, "ready", {ROUTE: 0.25}),
    ]
    sums = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=served.repository / NET / "2")
    assert sums.returncode == 0

    with pytest.raises(WrongUsage, match=r"variant 'v2' of route 'r': expected weight 0, got 300"):
        retire(served.repository, NET, 2, server_info)
    rollback(served.repository, NET, server_info)
    assert {served.send(ROUTE).origin[0] for _ in range(20)} == {"v1"}
    assert served.send(ROUTE, headers={"x-variant": "v2"}).added == 2

    retire(served.repository, NET, 2, server_info)

    assert served.refusal(ROUTE, headers={"x-variant": "v2"})[1].startswith(
        "invalid request: unknown x-variant"
    )
    # Triton 24.10 loads all versions anew if a config changes that is not the one in use.
    if policies(served.repository) == {ALL_VERSIONS}:
        wait_until(lambda: served.stubs(NET) == stubs, "only the first version's process")
    route = f"{ROUTE}.route"
    changed = {name for name, sha in contents(served.repository).items() if before.get(name) != sha}
    assert changed == {f"{route}.json", f"{route}.history.jsonl"}


def test_version_that_the_server_cannot_load_is_undone(served, server_info, tmp_path):
    before = contents(served.repository)

    def damage(line: str) -> None:
        if "version_policy includes" in line:
            (network,) = set((served.repository / NET).glob("*/model.onnx")) - known
            network.write_bytes(b"no network")

    known = set((served.repository / NET).glob("*/model.onnx"))
    with pytest.raises(OperationFailed, match=r"failed and was undone: .*onnx runtime error"):
        publish_number(served.repository, tmp_path, server_info, 9, report=damage)

    assert contents(served.repository) == before
    assert (served.send(ROUTE).scores == X + 1).all()


def wrong(load: Load, added: dict[int, int]) -> list[RouteResponse | Exception]:
    """Return the responses that are not those of their reported versions, each of which adds a number."""
    answers = [outcome.answer for outcome in load.outcomes]
    return [
        item for item in answers if not hasattr(item, "added") or item.added != added[int(item.origin[1])]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("served", [ALL_VERSIONS], ids=["all"], indirect=True)  # it does not depend on it
def test_publishing_and_rolling_back_under_load_loses_nothing(served, server_info, tmp_path):
    repository, memory, added = served.repository, [], {1: 1}
    operator = partial(fidget, repository, server_info)

    with Load(served, ROUTE, CALLERS) as load, in_background("operator", operator, join_s=60):
        for number in range(20, CYCLES + 20):
            done = publish_number(repository, tmp_path, server_info, number, share=0.5)
            added[done.version] = number
            load.wait_for(answered_by(f"v{done.version}"))
            rollback(repository, NET, server_info)
            retire(repository, NET, done.version, server_info)
            memory.append(memory_bytes(served.server.pid))

    assert wrong(load, added) == []
    assert versions_on_disk(repository / NET) == [1]
    if CYCLES > 2 * SETTLED:
        assert np.median(memory[-SETTLED:]) <= GROWTH * np.median(memory[SETTLED : 2 * SETTLED])


def fidget(repository: Path, server_info: ServerInfo, is_over: threading.Event) -> None:
    """Change the weight of variant `v1` continually, as another operator might."""
    for weight in itertools.cycle((100, 101)):
        with suppress(Superseded):  # by the publisher
            change(find_route(repository, ROUTE), propose_weights({"v1": weight}), server_info)
        if is_over.wait(0.2):
            return
