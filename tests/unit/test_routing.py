"""Routing: precedence, stickiness, shares and rules; route files: their checks, and the watch of a file."""

import json
import os
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereid.backends.routing import assignment
from nereid.backends.routing.assignment import LoadedRoute, Route, Variant, VariantChoice, assign, choose
from nereid.backends.routing.route_file import RouteWatch, check_ready, load_route, path_of
from nereid.base import files
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InvalidConfig, InvalidRequest
from tests import routes
from tests.tables import cases

V1 = Variant("v1", "classify_v1", 1, 90)
V2 = Variant("v2", "classify_v2", 1, 10)
V3 = Variant("v3", "classify_v3", 1, 25)
SALTS = assignment.Salts("classify", "classify shadows")
CALLERS = [f"caller-{number}" for number in range(4000)]
SHADOW = assignment.Shadow("dark", "classify_v2", 1, 30)

ONE = {"name": "v1", "model": "classify_v1", "version": 1, "weight": 1}
SALTED = {"variants": [ONE], "default": "v1", "salts": {"variants": "a", "shadows": "b"}}
weights = st.floats(0.01, 1000)


def route(*variants: Variant, **fields) -> Route:
    return Route(variants, variants[0].name, SALTS, **fields)


def loaded(*variants: Variant) -> LoadedRoute:
    return LoadedRoute(route(*variants), "", {variant.name: variant.name[1:] for variant in variants})


def raised(variant: Variant, weight: float) -> Variant:
    return msgspec.structs.replace(variant, weight=weight)


@cases(
    variant_first=({"x-variant": "v2", "x-model-version": "1", "x-route-key": "k"}, V2, "variant"),
    any_case=({"X-Variant": "v2"}, V2, "variant"),
    then_version=({"x-model-version": "2", "x-route-key": "k"}, V2, "version"),
    version_as_number=({"x-model-version": 2}, V2, "version"),
    then_key=({"x-route-key": "k"}, assign(route(V1, V2), "k"), "route-key"),
    empty_key=({"x-variant": "", "x-model-version": "", "x-route-key": ""}, V1, "weight"),
    other=({"other": "x"}, V1, "weight"),
)
def test_precedence(parameters, chosen, reason):
    assert choose(loaded(V1, V2), parameters, random_unit=0.0) == VariantChoice(chosen, reason)


@cases(
    any_case=({"X-Route-Group": "staff"}, "v2", "header"),
    first_of_two_rules=({"x-route-group": "beta", "x-route-region": "eu"}, "v2", "header"),
    before_a_key=({"x-route-group": "beta", "x-route-key": "k"}, "v2", "header"),
    one_of_two_headers=({"x-route-region": "eu"}, "v1", "weight"),
    both_headers=({"x-route-region": "eu", "x-route-tier": "1"}, "v3", "header"),
    case_of_a_value=({"x-route-group": "Beta"}, "v1", "weight"),
    after_a_variant=({"x-route-group": "beta", "x-variant": "v1"}, "v1", "variant"),
    after_a_version=({"x-route-group": "beta", "x-model-version": "1"}, "v1", "version"),
)
def test_header_rules(parameters, name, reason):
    second = msgspec.structs.replace(V2, headers={"x-route-group": ("beta", "staff")})
    third = msgspec.structs.replace(V3, headers={"x-route-region": ("eu",), "x-route-tier": ("1",)})

    choice = choose(loaded(V1, second, third), parameters, random_unit=0.0)

    assert (choice.variant.name, choice.reason) == (name, reason)


@pytest.mark.parametrize(("name", "expected"), [("x-variant", "v1, v2"), ("x-model-version", "1, 2")])
def test_unknown_name_is_rejected(name, expected):
    message = f"^invalid request: unknown {name} 'v9': expected one of {expected}$"

    with pytest.raises(InvalidRequest, match=message):
        choose(loaded(V1, V2), {name: "v9"}, random_unit=0.0)


def test_version_selects_its_first_variant():
    same = replace(loaded(V1, V2), network_versions={"v1": "7", "v2": "7"})

    assert choose(same, {"x-model-version": "7"}, 0.99).variant is V1


def test_chance_follows_the_weights():
    units = (0.0, 0.899, 0.901, 0.999999999)

    assert [choose(loaded(V1, V2), {}, unit).variant.name for unit in units] == ["v1", "v1", "v2", "v2"]


def test_weight_zero_is_never_chosen():
    variants = loaded(raised(V1, 0), V2, raised(V3, 0))

    # 1.0 stands for the rest that rounding may leave beyond the last weight.
    chosen = {choose(variants, {}, unit).variant.name for unit in np.linspace(0, 1, 101)}
    assigned = {assign(variants.route, key).name for key in CALLERS}

    assert chosen == assigned == {"v2"}


@settings(max_examples=30)  # each hashes thousands of keys
@given(drawn=st.lists(weights, min_size=2, max_size=5), index=st.integers(0, 4), factor=st.floats(1.1, 50))
def test_keys_share_by_weight_and_a_raised_weight_only_adds_callers(drawn, index, factor):
    """Keys spread by the weights of 2 to 5 variants; 0.04 is five standard deviations of 4,000 keys."""
    variants = [Variant(f"v{number}", "m", 1, weight) for number, weight in enumerate(drawn)]
    touched = variants[index % len(variants)]
    after = [raised(entry, entry.weight * factor) if entry is touched else entry for entry in variants]

    names = [(assign(route(*variants), key).name, assign(route(*after), key).name) for key in CALLERS]

    counts = Counter(old for old, _ in names)
    for name, share in assignment.shares(route(*variants)).items():
        assert counts[name] / len(CALLERS) == pytest.approx(share, abs=0.04)
    assert {new for old, new in names if old != new} <= {touched.name}


def test_published_vectors_hold(root):
    """Every implementation must compute the results in docs/route_vectors.json; they never change."""
    document = json.loads((root / "docs" / "route_vectors.json").read_text())

    assert len(document["units"]) >= 5
    assert len(document["assignments"]) >= 20
    for case in document["units"]:
        assert assignment.hash_to_unit_interval(case["salt"], case["name"], case["key"]) == case["unit"], case
    for case in document["assignments"]:
        variants = tuple(Variant(name, "m", 1, weight) for name, weight in case["weights"].items())
        shared = Route(variants, variants[0].name, assignment.Salts(case["salt"], "b"))
        assert assign(shared, case["key"]).name == case["variant"], case


def test_shadow_gets_its_share():
    """A key is mirrored always or never, other requests by chance; 0.04 is five standard deviations."""
    mirrored: set[str] = set()
    for percent in (0, 30, 60, 100):
        shadow = msgspec.structs.replace(SHADOW, percent=percent)
        by_chance = [
            assignment.is_mirrored(shadow, "b", "", unit) for unit in np.linspace(0, 1, 4000, endpoint=False)
        ]
        by_key = {key for key in CALLERS if assignment.is_mirrored(shadow, "b", key, random_unit=0.5)}

        assert np.mean(by_chance) == pytest.approx(percent / 100, abs=0.001)
        assert len(by_key) / len(CALLERS) == pytest.approx(percent / 100, abs=0.04)
        assert by_key == {key for key in CALLERS if assignment.is_mirrored(shadow, "b", key, random_unit=0.1)}
        assert mirrored <= by_key, "a higher percentage only adds keys"
        mirrored = by_key


def test_route_survives_its_own_text():
    full = route(V1, V2, shadows=(SHADOW,), max_in_flight=7, generation=3)

    assert assignment.parse_route(assignment.format_route(full)) == full
    assert set(json.loads(assignment.format_route(route(V1)))) == {"variants", "default", "salts"}


def changed(**fields) -> bytes:
    return json.dumps(SALTED | fields).encode()


def variant(**fields) -> bytes:
    return changed(variants=[ONE | fields])


UNKNOWN_FIELD = "Object contains unknown field `wieghts`: expected one of variants, default, salts"
SHADOW_V1 = {"name": "v1", "model": "m", "version": 1, "percent": 5}
INFINITE = variant(weight=0).replace(b'"weight": 0', b'"weight": 1e999')


@cases(
    cut=(b'{"variants": [', "Input data was truncated"),
    empty=(changed(variants=[]), "Expected `array` of length >= 1 - at `$.variants`, got []"),
    unknown=(changed(wieghts=1), UNKNOWN_FIELD),
    default=(changed(default="v9"), "default must be one of v1, got 'v9'"),
    limit=(changed(max_in_flight=65), "Expected `int` <= 64 - at `$.max_in_flight`, got 65"),
    twice=(changed(shadows=[SHADOW_V1]), "names of variants and shadows must differ, got v1, v1"),
    weights=(variant(weight=0), "one weight must be positive, got 0 for all"),
    tiny_weight=(variant(weight=1e-320), "weight of 'v1' must be 0, or 1e-09 to 1e+09, got 9.99989e-321"),
    not_a_number=(variant(weight=float("nan")), "JSON is malformed: invalid character"),
    infinite=(INFINITE, "Number out of range - at `$.variants[0]"),
    name=(variant(name="v1\n"), "Expected `str` matching regex"),
    header=(variant(headers={"x-api-key": ["a"]}), "Expected `str` matching regex '^x-route-"),
)
def test_wrong_route_is_rejected(text, message):
    with pytest.raises(InvalidConfig, match=f"^{re.escape(message)}"):
        assignment.parse_route(text)


ROUTE = routes.document(routes.variant("v1", "net", 9), routes.variant("v2", "pinned", 1))
DARK = {"name": "dark", "model": "net", "version": 2, "percent": 1}


def write(route: dict) -> bytes:
    return json.dumps(route).encode()


DEFAULT_V9 = write(ROUTE | {"default": "v9"})


@pytest.fixture
def config(tmp_path) -> ModelConfig:
    """A route in a repository of a network with two versions and a pinned ensemble."""
    for folder in ("net/1", "net/2"):
        (tmp_path / folder).mkdir(parents=True)
    routes.store_ensemble(tmp_path, "pinned", "net", 2)
    routes.store_router(tmp_path, "r", ROUTE)
    return ModelConfig.from_file(tmp_path / "r", 1)


@pytest.fixture
def ready() -> set[tuple[str, int]]:
    return {("net", 1), ("net", 2), ("pinned", 1)}


@pytest.fixture
def watch(config, ready) -> RouteWatch:
    return RouteWatch(config, lambda model, version: (model, version) in ready)


def first(**change) -> dict:
    return {"variants": [ROUTE["variants"][0] | change]}


@cases(
    model=(first(model="nope"), "names version 1 of 'nope', which is not there"),
    version=(first(version=7), "names version 7 of 'net', which is not there"),
    outside=(first(model="../net"), "names '../net', which is not a folder of the repository"),
    name=(first(model="x" * 300), "cannot read the models of the route: .*too long"),
    circle=(first(model="r"), "names 'r', which is a route itself"),
    shadow=({"shadows": [DARK | {"model": "nope"}]}, "'nope', which is not there"),
)
def test_models_of_a_route_must_exist(change, message, config):
    with pytest.raises(InvalidConfig, match=message):
        load_route(config, write(ROUTE | change))


X = 'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }'
NET = X + ' output { name: "scores" data_type: TYPE_FP32 dims: [ %s ] }'


@cases(
    any_size=(NET % -1, None),
    completed_by_Triton=("", None),
    size=(NET % 5, "names 'net' for 'scores': expected TYPE_FP32 \\[3\\], got TYPE_FP32 \\[5\\]"),
    rank=(NET % "3, 1", "for 'scores': expected TYPE_FP32 \\[3\\], got TYPE_FP32 \\[3, 1\\]"),
    datatype=(NET.replace("32", "16") % 3, "for 'x': expected TYPE_FP32 \\[4\\], got TYPE_FP16"),
    name=(NET.replace('"scores"', '"y"') % 3, "for 'scores': expected TYPE_FP32 \\[3\\], got none"),
)
def test_variants_tensors_must_be_those_of_the_route(text, message, tmp_path):
    (tmp_path / "net" / "1").mkdir(parents=True)
    (tmp_path / "net" / "config.pbtxt").write_text(text)
    routes.store_router(tmp_path, "r", config=NET % 3)
    config = ModelConfig.from_file(tmp_path / "r", 1)

    with pytest.raises(InvalidConfig, match=message) if message else nullcontext():
        load_route(config, write(ROUTE | {"variants": ROUTE["variants"][:1]}))


@cases(
    own_folder=("r/r.route.json", False),
    version_folder=("net/1/r.json", False),
    other_model=("./r/../net/r.json", False),
    next_to_the_models=("r.route.json", True),
    outside=("../routes/r.json", True),
    absolute=("/routes/r.json", True),
)
def test_file_lies_outside_the_models_folders(name, is_allowed, config):
    """Triton would reload the model when the route changes."""
    named = ModelConfig.from_document({"parameters": {"route": {"string_value": name}}}, config.folder, 1)
    rejection = pytest.raises(InvalidConfig, match="the route must lie outside model folders, got '")

    with nullcontext() if is_allowed else rejection:
        assert path_of(named) == config.folder.parent / name


def test_changed_file_is_returned_once(watch):
    os.utime(watch.path)
    assert watch.poll() is None
    files.replace(watch.path, write(ROUTE | {"generation": 1}))

    assert watch.poll().route.generation == watch.loaded.route.generation == 1
    assert watch.poll() is None


def test_swapped_link_is_read(config):
    """Kubernetes mounts a ConfigMap as links, and swaps the link to the folder."""
    path = path_of(config)
    path.unlink()
    routes.publish_config(path, ROUTE)
    watch = RouteWatch(config, lambda model, version: True)

    routes.publish_config(path, ROUTE | {"generation": 1})

    assert watch.poll().route.generation == 1


@cases(
    empty=(Path.touch, "Input data was truncated"),
    wrong=(lambda path: path.write_bytes(DEFAULT_V9), "default must be one of v1, v2, got 'v9'"),
    gone=(lambda path: None, "cannot read '.*r.route.json': No such file or directory"),
    folder=(Path.mkdir, "Is a directory"),
    pipe=(os.mkfifo, "expected a regular file"),
    huge=(lambda path: path.write_bytes(b" " * 1_000_001), "expected at most 1,000,000 bytes, got more"),
    circle=(lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
)
def test_wrong_file_changes_nothing_and_is_reported_once(make, message, watch):
    """No file in place of the route file can block the server or fill its memory."""
    before = watch.loaded
    watch.path.unlink()
    make(watch.path)

    with pytest.raises(InvalidConfig, match=message):
        watch.poll()
    assert [watch.poll(), watch.poll()] == [None, None]
    assert watch.loaded is before

    watch.path.rmdir() if watch.path.is_dir() else watch.path.unlink(missing_ok=True)
    watch.path.write_bytes(write(ROUTE | {"generation": 5}))
    assert watch.poll().route.generation == 5
    watch.path.unlink()
    make(watch.path)
    with pytest.raises(InvalidConfig, match=message):
        watch.poll()


def test_route_is_used_once_its_version_is_ready(watch, ready):
    """A file may come before its model: each poll checks the version again."""
    ready.remove(("pinned", 1))
    watch.path.write_bytes(write(ROUTE | {"generation": 1}))

    with pytest.raises(InvalidConfig, match="'v2' names version 1 of 'pinned': not ready"):
        watch.poll()
    assert watch.poll() is None
    ready.add(("pinned", 1))

    assert watch.poll().route.generation == 1


def test_readiness_covers_variants_and_shadows(config):
    checked = []
    loaded = load_route(config, write(ROUTE | {"shadows": [DARK]}))

    check_ready(loaded.route, lambda model, version: checked.append((model, version)) or True)

    assert checked == [("net", 1), ("pinned", 1), ("net", 2)]


@cases(
    only_by_name=({"weight": 0}, "v1", False),
    weight=({"weight": 1}, "v1", True),
    headers=({"weight": 0, "headers": {"x-route-a": ["b"]}}, "v1", True),
    default=({"weight": 0}, "v2", True),
)
def test_variant_without_traffic_need_not_be_ready(fields, default, is_rejected, config):
    """A route can move its traffic away from a failed variant."""
    first, second = ROUTE["variants"]
    content = ROUTE | {"variants": [first | {"weight": 1}, second | fields], "default": default}
    route = load_route(config, write(content)).route
    rejection = pytest.raises(InvalidConfig, match=r"'v2' names version 1 of 'pinned': not ready")

    with rejection if is_rejected else nullcontext():
        check_ready(route, lambda model, version: model != "pinned")
