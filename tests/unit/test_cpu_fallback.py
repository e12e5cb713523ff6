"""CPU copies of pinned models as fallbacks: their files, their versions, and changes around them."""

import json
import shutil
from datetime import UTC, datetime

import pytest

from nereid.backends.routing.assignment import LoadedRoute, Route, Salts, Variant, choose
from nereid.backends.routing.attempts import AttemptPlan
from nereid.base.assets import REPOSITORY, STATE, TEXT_REPOSITORY
from nereid.base.config.model_config import read_pbtxt
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish.add import add_cpu_fallback
from nereid.models.publish.examination import ExaminationLimits
from nereid.models.publish.network import find_network
from nereid.models.publish.publisher import publish, retire, rollback
from nereid.models.publish.remove import remove
from nereid.models.rollout.controller import propose_withdrawal
from nereid.models.rollout.plan import Pair, make_plan
from nereid.models.rollout.rollout_journal import Rollout
from nereid.models.routes.explain import explain
from nereid.models.routes.location import RouteFileSnapshot, find_route, read_route_file
from nereid.repository.repository_index import parameters_of, steps_of, unused_models
from tests.publishing import NET, ROUTE, candidate, edit_route, publish_number, store_published, unchanged
from tests.routes import document, variant
from tests.tables import cases

COPY = "classify_v1_cpu"
TWO = [variant("old", "old", 50), variant("new", "new", 50)]


def copied(source, tmp_path):
    """Return a copy of a repository without what servers wrote to it, and without its networks."""
    return shutil.copytree(source, tmp_path / "models", ignore=shutil.ignore_patterns(*STATE, "model.onnx"))


@pytest.fixture
def repository(tmp_path):
    return copied(REPOSITORY, tmp_path)


def route_of(repository, name: str = "") -> Route:
    return read_route_file(find_route(repository, name)).route()


def test_copy_is_the_first_fallback_without_traffic_until_its_route_is_removed(repository):
    assert add_cpu_fallback(repository, "", None) == COPY

    route = route_of(repository)
    (copy,) = [entry for entry in route.variants if entry.name == "v1_cpu"]
    assert (copy.model, copy.version, copy.weight, route.fallbacks) == (COPY, 1, 0, ("v1_cpu",))
    config = read_pbtxt(repository / COPY / "config.pbtxt")
    assert (config["backend"], config["instance_group"]) == ("fused", [{"kind": "KIND_CPU"}])
    assert steps_of(config) == [("imagenet_preprocess", 1), ("efficientnet_lite0", 1)]
    labels = (repository / "classify_v1" / "labels.txt").read_bytes()
    assert (repository / COPY / "labels.txt").read_bytes() == labels
    assert not (repository / COPY / "configs").exists()
    for profile in ("", "cpu", "gpu"):
        assert COPY not in unused_models(repository, profile)
    with pytest.raises(WrongUsage, match="already has a model 'classify_v1_cpu'; fix: nereid route fallback"):
        add_cpu_fallback(repository, "", None)
    assert COPY in remove(repository, "classify", None)
    assert not (repository / COPY).exists()


@cases(
    GPU=("{ kind: KIND_GPU count: 2 gpus: [ 0, 1 ] }", [{"count": 2, "kind": "KIND_CPU"}]),
    automatic=("{ count: 3 }", [{"count": 3, "kind": "KIND_CPU"}]),
    none=("", [{"kind": "KIND_CPU"}]),
)
def test_copy_never_uses_a_gpu(before, after, repository):
    """Its instances run on the CPU, also if the config leaves the device to Triton."""
    path = repository / "classify_v1" / "configs" / "cpu.pbtxt"
    group = f"instance_group {before}" if before else ""
    path.write_text(path.read_text().replace("instance_group { kind: KIND_CPU }", group))
    assert "KIND_CPU" not in path.read_text()

    add_cpu_fallback(repository, "", None)

    assert read_pbtxt(repository / COPY / "config.pbtxt")["instance_group"] == after


def test_reader_is_copied_like_a_classifier(tmp_path):
    repository = copied(TEXT_REPOSITORY, tmp_path)

    assert add_cpu_fallback(repository, "read_waybill", None) == "read_waybill_v1_cpu"

    folder = repository / "read_waybill_v1_cpu"
    parameters = parameters_of(read_pbtxt(folder / "config.pbtxt"))
    assert (parameters["networks"], parameters["network_version"]) == ("in_process", "1")
    assert (folder / "waybill.json").exists()


def test_commands_show_the_fallbacks(nereid):
    done = nereid("route", "fallback", "--cpu")

    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].startswith(f"{COPY}: first fallback;")
    assert "while v1 is unreachable: v1_cpu\n" in nereid("route", "show").stdout
    assert "while it is unreachable: v1, then v1_cpu\n" in nereid("route", "explain").stdout
    assert "unreachable" not in nereid("route", "explain", "--variant", "v1").stdout
    assert "fallbacks" in nereid("route", "diff").stdout


@cases(
    chance=({}, ("v1", "spare", "answer")),
    default_by_key=({"x-route-key": "a"}, ("spare", "answer")),
    other_by_key=({"x-route-key": "b"}, ("v1", "spare", "answer")),
    header=({"x-route-tier": "free"}, ("v1", "answer")),
    forced=({"x-variant": "v2"}, ()),
)
def test_explained_fallbacks_are_those_of_the_router(parameters, expected):
    spare = Variant("spare", "m3", 1, 0, headers={"x-route-tier": ("free",)})
    variants = (Variant("v1", "m1", 1, 1), Variant("v2", "m2", 1, 1), spare)
    route = Route(variants, "v1", Salts("a", "b"), fallbacks=("spare",), answer={"scores": 0})
    loaded = LoadedRoute(route, "", {"v1": "1", "v2": "2", "spare": "3"})

    assert explain(loaded, parameters).fallbacks == expected
    plan = AttemptPlan(route, choose(loaded, parameters, 0.999))
    plan.next()
    tried = [plan.next().variant.name for _ in iter(lambda: plan.has_choices, False)]
    assert (*tried, *([] if plan.is_forced else ["answer"])) == expected


def test_fallbacks_are_set_by_name(nereid, repository):
    with unchanged(repository):
        done = nereid("route", "fallback", "v2")

    assert done.exit_code == 1
    assert "no server is running for" in done.stderr
    assert nereid("route", "fallback", "v2", "--offline").exit_code == 0
    assert route_of(repository).fallbacks == ("v2",)


@cases(
    nothing=([], "expected either variant names or --cpu"),
    offline=(["--cpu", "--offline"], "--cpu excludes --offline"),
    twice=(["v2", "v2", "--offline"], "no other variant remains, got 'v2'"),
)
def test_wrong_fallbacks_are_exit_code_2(words, message, nereid):
    done = nereid("route", "fallback", *words)

    assert done.exit_code == 2
    assert message in done.stderr


def test_model_without_a_cpu_config_is_refused(tmp_path):
    store_published(tmp_path / "models")

    message = r"got 'ensemble'; fix: write configs/cpu.pbtxt for 'net_v1'"
    with unchanged(tmp_path / "models"), pytest.raises(OperationFailed, match=message):
        add_cpu_fallback(tmp_path / "models", ROUTE, None)


@cases(
    retire=(lambda at: retire(at, "classify", 1, None), "cannot retire version 1 "),
    remove=(lambda at: remove(at, COPY, None), f"cannot remove '{COPY}': route "),
    network=(lambda at: remove(at, "efficientnet_lite0", None), "cannot remove 'efficientnet_lite0'"),
)
def test_files_of_a_copy_stay(change, message, repository):
    """Variant v1 and its model are removed, so only the copy needs version 1."""
    add_cpu_fallback(repository, "", None)
    variants = json.loads((repository / "classify.route.json").read_text())["variants"]
    others = [entry for entry in variants if entry["name"] != "v1"]
    edit_route(repository, "classify", variants=others, default="v2")
    remove(repository, "classify_v1", None)

    with unchanged(repository), pytest.raises(WrongUsage, match=message):
        change(repository)


@pytest.fixture
def published(tmp_path):
    """A repository of `net` with two versions, the second is the default, the first a fallback."""
    repository = tmp_path / "models"
    store_published(repository)
    publish_number(repository, tmp_path, None, 2, share=0.5)
    edit_route(repository, default="v2", fallbacks=["v1"])
    return repository


def test_rollback_to_a_fallback_makes_it_the_default(published):
    rollback(published, ROUTE, None)

    route = route_of(published, ROUTE)
    assert (route.default, route.fallbacks) == ("v1", ())


def test_withdrawn_candidate_makes_its_control_the_default():
    text = json.dumps(document(*TWO, default="new", fallbacks=["old"])).encode()
    pair = Pair(("new", "2"), ("old", "1"), "rollout-new")
    started = Rollout(1, make_plan(candidate="new"), pair, 0.1, 0.01, datetime.now(UTC), "me")

    route = propose_withdrawal(started)(RouteFileSnapshot(None, text, (), None)).route

    assert (route.default, route.fallbacks) == ("old", ())


def test_next_version_is_like_the_serving_variant(published, tmp_path):
    variants = json.loads((published / f"{ROUTE}.route.json").read_text())["variants"]
    shutil.copytree(published / "net_v1", published / "net_spare")
    edit_route(published, fallbacks=["spare"], variants=[*variants, variant("spare", "net_spare")])

    limits = ExaminationLimits(is_change_accepted=True, max_slowdown=100, against=1)
    publish(published, NET, candidate(tmp_path, 3), None, limits)

    assert [item.name for item in route_of(published, ROUTE).variants] == ["v1", "v2", "spare", "v3"]
    assert [item.is_fallback for item in find_network(published, NET).variants] == [False, False, True, False]
