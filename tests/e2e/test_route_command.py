"""`nereid route` with the real server: a change is served, or rejected with a reason."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from nereid.application.repository_models import RepositoryRoute
from nereid.base.assets import COFFEE, REPOSITORY
from nereid.cli.main import app
from nereid.gateway.failures import Failure
from nereid.gateway.route_control import Weights
from nereid.tasks.classify.client import Classifier
from tests.routes import wait_until
from tests.supervised import serving

KEYS = [f"caller-{number}" for number in range(8)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    base = tmp_path_factory.mktemp("route")
    repository = shutil.copytree(
        REPOSITORY, base / "repository", ignore=shutil.ignore_patterns("*.history.jsonl")
    )
    path = repository / "classify.route.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"generation": 0}))
    with serving(repository, base / "run") as running:
        yield running


@pytest.fixture
def nereid(served):
    return lambda *words: CliRunner().invoke(app, ["route", *words], env=served.environment)


def test_change_is_served_explained_and_reverted(served, nereid):
    printed = nereid("set", "v1=61", "v2=39")
    assert printed.stdout.startswith("classify: generation 1, v1 61 %, v2 39 %, served after ")

    explained = [json.loads(nereid("explain", "--key", key, "--json").stdout)["variant"] for key in KEYS]
    assert {*explained} == {"v1", "v2"}
    with Classifier(f"127.0.0.1:{served.ports['grpc']}") as classifier:
        assert [classifier.classify(COFFEE, route_key=key).variant for key in KEYS] == explained
        nereid("set", "v1=0")
        assert {classifier.classify(COFFEE, route_key=key).variant for key in KEYS} == {"v2"}

        printed = nereid("revert")
        assert printed.stdout.startswith("classify: generation 3, v1 61 %, v2 39 %, served after ")
        assert [classifier.classify(COFFEE, route_key=key).variant for key in KEYS] == explained


def test_show_has_the_state_of_the_server(served, nereid):
    with Classifier(f"127.0.0.1:{served.ports['grpc']}") as classifier:
        for variant in ("v1", "v2"):
            classifier.classify(COFFEE, variant=variant)

    def shown() -> dict:
        return json.loads(nereid("show", "--json").stdout)

    wait_until(lambda: shown()["breakers"] == {"v1": "closed", "v2": "closed"}, "the metrics")
    assert (shown()["status"], shown()["served_sha256"]) == ("served", [shown()["sha256"]])


def test_gateway_shows_and_changes_the_same_route(served, nereid):
    route = RepositoryRoute(served.repository, "", lambda: served.server_info)
    before = route.show()
    assert (before.model, before.is_served) == ("classify", True)

    after = route.set_weights(Weights({"v1": 25, "v2": 75}, before.generation), "key 'alice'")

    assert (after.generation, after.is_served) == (before.generation + 1, True)
    shares = [(variant.name, variant.version, variant.share) for variant in after.variants]
    assert shares == [("v1", "1", 0.25), ("v2", "2", 0.75)]
    (last, *_) = json.loads(nereid("history", "--json").stdout)
    assert last["note"] == "set through the gateway by key 'alice'"
    with pytest.raises(Failure, match=f"generation {before.generation}, got {after.generation}"):
        route.set_weights(Weights({"v1": 1}, before.generation), "")
    with pytest.raises(Failure, match="unknown variant 'v9': expected one of v1, v2"):
        route.set_weights(Weights({"v9": 1}), "")
    assert route.show().generation == after.generation
    with pytest.raises(Failure, match="the route cannot be read"):
        RepositoryRoute(served.repository / "classify", "", lambda: None).show()


def test_copy_on_the_cpu_answers(served, nereid):
    """The last test here, since it adds a variant."""
    done = nereid("fallback", "--cpu")

    assert done.exit_code == 0, done.stderr
    with Classifier(f"127.0.0.1:{served.ports['grpc']}") as classifier:
        answer = classifier.classify(COFFEE, variant="v1_cpu")
    assert answer.labels[0].name == "espresso"
