"""The number of instances that a machine's cores and memory give to each model."""

import json
import shutil
from dataclasses import replace

import pytest

from nereid.backends.routing.assignment import parse_route
from nereid.base.assets import REPOSITORY
from nereid.repository import instance_sizing
from nereid.repository.instance_sizing import (
    INSTANCE_BYTES,
    INSTANCES_MEMORY_FRACTION,
    Machine,
    allocate_instances,
    fitted_config,
    plan_instances,
)
from tests.publishing import edit_route
from tests.tables import cases

PLENTY = 10**12
ROUTE = "classify.route.json"
BOUNDS = ' parameters { key: "nereid.instances" value { string_value: "1-4" } }'


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(instance_sizing, "DRIVER", tmp_path / "none")


@pytest.fixture
def repository(tmp_path):
    ignored = shutil.ignore_patterns("*.onnx", ".*.nereid")
    return shutil.copytree(REPOSITORY, tmp_path / "models", ignore=ignored)


@cases(
    cores_16=(16, (50, 50), (16, 16)),
    cores_16_canary=(16, (90, 10), (16, 10)),
    cores_64_canary=(64, (99, 1), (64, 33)),
    cores_16_one_without_traffic=(16, (1, 0), (16, 8)),
    cores_1_one_without_traffic=(1, (1, 0), (1, 1)),
)
def test_variants_share_the_cores(cores, weights, expected, repository):
    """Half by weight and half evenly, so that a variant keeps up when a rollout gives it more."""
    variants = json.loads((repository / ROUTE).read_text())["variants"]
    weighed = [variant | {"weight": weight} for variant, weight in zip(variants, weights, strict=True)]
    edit_route(repository, "classify", variants=weighed)

    counts = plan_instances(repository, "cpu", Machine(cores, PLENTY), {"fused"}).counts

    assert counts == dict(zip(("classify_v1", "classify_v2"), expected, strict=True))


@cases(
    # The network's versions and the preprocessing have all requests of the route behind them.
    all_steps=((), {"efficientnet_lite0": 4, "imagenet_preprocess": 4}),
    # NVIDIA's ONNX Runtime backend would give all cores to each instance; routes need one.
    steps_of_our_backends=(({"fused", "preprocess"},), {"imagenet_preprocess": 4}),
)
def test_steps_of_ensembles_get_what_all_their_callers_need(backends, expected, repository):
    assert plan_instances(repository, "ensemble", Machine(4, PLENTY), *backends).counts == expected


def test_models_without_a_common_caller_share_the_cores():
    shares = instance_sizing.traffic_shares(
        {f"net_{number}": {"backend": "onnxruntime"} for number in range(20)}, {}
    )

    assert set(allocate_instances(shares, Machine(16, PLENTY)).counts.values()) == {2}
    assert set(allocate_instances(shares, Machine(2, PLENTY)).counts.values()) == {1}


def test_shadow_needs_its_part(repository):
    route = json.loads((repository / ROUTE).read_text())
    route["variants"] = route["variants"][:1]
    route["default"] = route["variants"][0]["name"]
    route["shadows"] = [{"name": "s", "model": "classify_v2", "version": 1, "percent": 10}]
    documents = {"classify": {"backend": "ab_router"}, "classify_v1": {}, "classify_v2": {}}

    shares = instance_sizing.traffic_shares(documents, {"classify": parse_route(json.dumps(route).encode())})

    assert shares == {"classify": 1.0, "classify_v1": 1.0, "classify_v2": pytest.approx(0.1)}


def test_memory_limits_the_instances():
    shares = {"a": 0.75, "b": 0.25}
    roomy, tight = (Machine(16, int(count * INSTANCE_BYTES / INSTANCES_MEMORY_FRACTION)) for count in (24, 6))

    assert allocate_instances(shares, roomy).counts == {"a": 16, "b": 8}
    short = allocate_instances(shares, tight)
    assert short.counts == {"a": 4, "b": 2}
    assert str(short) == "instances fitted to 16 core(s) and limited by 0.8 GB of free memory: a 4, b 2"
    assert allocate_instances(shares, replace(tight, memory_bytes=0)).counts == {"a": 1, "b": 1}


@pytest.mark.parametrize(("cores", "expected"), [(1, None), (8, None), (16, 2), (64, 8)])
def test_route_gets_an_instance_for_each_eight_cores(repository, cores, expected):
    """A single instance is Triton's own choice, and needs no second load."""
    counts = plan_instances(repository, "cpu", Machine(cores, PLENTY)).counts

    assert counts.get("classify") == expected
    assert counts["classify_v1"] == cores


@cases(
    no_count=("instance_group { kind: KIND_CPU }", True, True),
    count=("instance_group { kind: KIND_CPU count: 1 }", False, False),
    no_group=("", False, True),
    no_group_and_a_GPU=("", True, False),
    no_kind=("instance_group { }", False, False),
    bounds=("instance_group { kind: KIND_CPU }" + BOUNDS, False, False),
    GPU=("instance_group { kind: KIND_GPU }", False, False),
    two_groups=("instance_group { kind: KIND_CPU } " * 2, False, False),
)
def test_only_an_open_choice_is_fitted(group, has_driver, is_fitted, repository, monkeypatch, tmp_path):
    """A config that states its count keeps it, and so does one of whose instances Triton may put on a GPU."""
    path = repository / "classify_v1" / "configs" / "cpu.pbtxt"
    path.write_text(path.read_text().replace("instance_group { kind: KIND_CPU }", group))
    if has_driver:
        monkeypatch.setattr(instance_sizing, "DRIVER", tmp_path)

    assert ("classify_v1" in plan_instances(repository, "cpu", Machine(2, PLENTY)).counts) is is_fitted


def test_broken_route_is_ignored(repository):
    """Triton reports it; the variants then count like models that clients call."""
    (repository / ROUTE).write_text("{")

    counts = plan_instances(repository, "cpu", Machine(4, PLENTY)).counts
    assert counts == {"classify_v1": 3, "classify_v2": 3}


def test_load_gets_the_whole_config(repository):
    """Triton's load API replaces the config, so all other entries must be there."""
    document = json.loads(fitted_config(repository, "cpu", "classify_v1", Machine(4, PLENTY), {"fused"}))

    assert document["instance_group"] == [{"kind": "KIND_CPU", "count": 4}]
    assert document["parameters"]["network"] == {"string_value": "efficientnet_lite0"}
    assert fitted_config(repository, "cpu", "classify", Machine(4, PLENTY), {"fused"}) is None
