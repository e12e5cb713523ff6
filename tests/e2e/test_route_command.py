"""`nereid route` with the real server: a change is served, or rejected with a reason."""

import json
import os
import shutil
import time

import pytest
from typer.testing import CliRunner

from nereid.assets import COFFEE, REPOSITORY
from nereid.cli.main import app
from nereid.cli.route_commands.gateway_route import RepositoryRoute
from nereid.client.classifier import Classifier
from nereid.gateway.route_control import RouteConflict, RouteFailed, RouteRefused
from nereid.server import run_dir
from nereid.server.command_line import ServerOptions
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.ports import Ports, free_ports
from tests.e2e.conftest import url

WATCHDOG_S = 60
KEYS = [f"caller-{number}" for number in range(8)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Start a server on a copy of the repository that `nereid` finds; returns server and environment."""
    base = tmp_path_factory.mktemp("route")
    repository = shutil.copytree(
        REPOSITORY, base / "repository", ignore=shutil.ignore_patterns("*.history.jsonl")
    )
    path = repository / "classify.route.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"generation": 0}))
    environment = {"XDG_RUNTIME_DIR": str(base), "NEREID_REPOSITORY": str(repository)}
    options = ServerOptions(repository, "cpu", ports=Ports(*free_ports(3)))
    with (
        run_dir.occupy(run_dir.root(environment), repository) as folder,
        EmbeddedServer(options, folder, os.environ) as server,
    ):
        run_dir.write(folder, server.record())
        yield server, environment


@pytest.fixture
def nereid(served):
    """Run `nereid route WORDS` with a running server: `nereid("set", "v1=1")`."""

    def run(*words: str, stdin: str = ""):
        return CliRunner().invoke(app, ["route", *words], env=served[1], input=stdin)

    return run


def test_change_is_served_explained_and_reverted(served, nereid):
    printed = nereid("set", "v1=61", "v2=39")
    assert printed.stdout.startswith("classify: generation 1, v1 61 %, v2 39 %, served after "), (
        printed.stderr
    )

    explained = [json.loads(nereid("explain", "--key", key, "--json").stdout)["variant"] for key in KEYS]
    assert {*explained} == {"v1", "v2"}
    with Classifier(url(served[0], "grpc")) as classifier:
        assert [classifier.classify(COFFEE, route_key=key).variant for key in KEYS] == explained
        nereid("set", "v1=0")
        assert {classifier.classify(COFFEE, route_key=key).variant for key in KEYS} == {"v2"}

        printed = nereid("revert")
        assert printed.stdout.startswith("classify: generation 3, v1 61 %, v2 39 %, served after "), (
            printed.stderr
        )
        assert [classifier.classify(COFFEE, route_key=key).variant for key in KEYS] == explained


def test_show_has_the_state_of_the_server(served, nereid):
    with Classifier(url(served[0], "grpc")) as classifier:
        for variant in ("v1", "v2"):
            classifier.classify(COFFEE, variant=variant)
    deadline = time.monotonic() + WATCHDOG_S
    # The server updates its metrics periodically.
    while len((shown := json.loads(nereid("show", "--json").stdout))["breakers"]) < 2:
        assert time.monotonic() < deadline, shown

    assert (shown["status"], shown["served_sha256"]) == ("served", [shown["sha256"]])
    assert shown["breakers"] == {"v1": "closed", "v2": "closed"}


def test_gateway_shows_and_changes_the_same_route(served, nereid):
    environment, repository = served[1], served[0].options.repository
    route = RepositoryRoute(repository, "", lambda: run_dir.find(run_dir.root(environment), repository))
    before = route.show()
    assert (before.model, before.is_served) == ("classify", True)

    after = route.set_weights({"v1": 25, "v2": 75}, before.generation, "key 'alice'")

    assert (after.generation, after.is_served) == (before.generation + 1, True)
    assert {each.name: (each.version, each.share) for each in after.variants} == {
        "v1": ("1", 0.25),
        "v2": ("2", 0.75),
    }
    assert (
        json.loads(nereid("history", "--json").stdout)[0]["note"] == "set through the gateway by key 'alice'"
    )
    with pytest.raises(
        RouteConflict, match=f"expected generation {before.generation}, got {after.generation}"
    ):
        route.set_weights({"v1": 1}, before.generation, "")
    with pytest.raises(RouteRefused, match="unknown variant 'v9': expected one of v1, v2"):
        route.set_weights({"v9": 1}, None, "")
    assert route.show().generation == after.generation
    with pytest.raises(RouteFailed, match="has no route"):
        RepositoryRoute(repository / "classify", "", lambda: None).show()
