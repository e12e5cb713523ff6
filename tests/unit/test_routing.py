"""Routing: precedence, stickiness, shares and the route's own rules, without a server."""

import json
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from nereid.backends.routing.assignment import (
    Choice,
    Route,
    Salts,
    Shadow,
    Table,
    Variant,
    assign,
    choose,
    format_route,
    is_mirrored,
    json_schema,
    parse_route,
    shares,
    unit_of,
)
from nereid.base.serving_errors import InvalidConfig, InvalidRequest
from tests.tables import cases

V1 = Variant("v1", "classify_v1", 1, 90)
V2 = Variant("v2", "classify_v2", 1, 10)
V3 = Variant("v3", "classify_v3", 1, 25)
SALTS = Salts("classify", "classify shadows")
CALLERS = [f"caller-{number}" for number in range(4000)]
SHADOW = Shadow("dark", "classify_v2", 1, 30)

ONE = {"name": "v1", "model": "classify_v1", "version": 1, "weight": 1}
ROUTE = {"variants": [ONE], "default": "v1", "salts": {"variants": "a", "shadows": "b"}}
weights = st.floats(0.01, 1000)
# Each example hashes thousands of keys, so a deadline would only measure the machine.
few = settings(max_examples=30)


def route(*variants: Variant, **fields) -> Route:
    return Route(variants, variants[0].name, SALTS, **fields)


def table(*variants: Variant) -> Table:
    return Table(route(*variants), "", {variant.name: variant.name[1:] for variant in variants})


def raised(variant: Variant, weight: float) -> Variant:
    return msgspec.structs.replace(variant, weight=weight)


@cases(
    ("parameters", "expected"),
    variant_first=({"x-variant": "v2", "x-model-version": "1", "x-route-key": "k"}, Choice(V2, "variant")),
    any_case=({"X-Variant": "v2"}, Choice(V2, "variant")),
    then_version=({"x-model-version": "2", "x-route-key": "k"}, Choice(V2, "version")),
    version_as_number=({"x-model-version": 2}, Choice(V2, "version")),
    then_key=({"x-route-key": "k"}, Choice(assign(route(V1, V2), "k"), "route-key")),
    empty_key=({"x-variant": "", "x-model-version": "", "x-route-key": ""}, Choice(V1, "weight")),
    other=({"other": "x"}, Choice(V1, "weight")),
)
def test_precedence(parameters, expected):
    assert choose(table(V1, V2), parameters, unit=0.0) == expected


@cases(
    ("parameters", "name", "reason"),
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

    choice = choose(table(V1, second, third), parameters, unit=0.0)

    assert (choice.variant.name, choice.reason) == (name, reason)


@pytest.mark.parametrize(("name", "expected"), [("x-variant", "v1, v2"), ("x-model-version", "1, 2")])
def test_unknown_name_is_rejected(name, expected):
    with pytest.raises(InvalidRequest) as error:
        choose(table(V1, V2), {name: "v9"}, unit=0.0)

    assert str(error.value) == f"invalid request: unknown {name} 'v9': expected one of {expected}"


def test_version_selects_its_first_variant():
    same = replace(table(V1, V2), network_versions={"v1": "7", "v2": "7"})

    assert choose(same, {"x-model-version": "7"}, 0.99).variant is V1


def test_chance_follows_the_weights():
    units = (0.0, 0.899, 0.901, 0.999999999)

    assert [choose(table(V1, V2), {}, each).variant.name for each in units] == ["v1", "v1", "v2", "v2"]


def test_weight_zero_is_never_chosen():
    variants = table(raised(V1, 0), V2, raised(V3, 0))

    # 1.0 stands for the rest that rounding may leave beyond the last weight.
    chosen = {choose(variants, {}, unit).variant.name for unit in np.linspace(0, 1, 101)}
    assigned = {assign(variants.route, key).name for key in CALLERS}

    assert chosen == assigned == {"v2"}


@few
@given(drawn=st.lists(weights, min_size=2, max_size=5), index=st.integers(0, 4), factor=st.floats(1.1, 50))
def test_keys_share_by_weight_and_a_raised_weight_only_adds_callers(drawn, index, factor):
    """Keys spread by the weights of 2 to 5 variants; 0.04 is five standard deviations of 4,000 keys."""
    variants = [Variant(f"v{number}", "m", 1, weight) for number, weight in enumerate(drawn)]
    touched = variants[index % len(variants)]
    after = [raised(each, each.weight * factor) if each is touched else each for each in variants]

    names = [(assign(route(*variants), key).name, assign(route(*after), key).name) for key in CALLERS]

    counts = Counter(old for old, _ in names)
    for name, share in shares(route(*variants)).items():
        assert counts[name] / len(CALLERS) == pytest.approx(share, abs=0.04)
    assert {new for old, new in names if old != new} <= {touched.name}


def test_published_vectors_hold(root):
    """Every implementation must compute the results in docs/route_vectors.json; they never change."""
    document = json.loads((root / "docs" / "route_vectors.json").read_text())

    assert len(document["units"]) >= 5
    assert len(document["assignments"]) >= 20
    for case in document["units"]:
        assert unit_of(case["salt"], case["name"], case["key"]) == case["unit"], case
    for case in document["assignments"]:
        variants = tuple(Variant(name, "m", 1, weight) for name, weight in case["weights"].items())
        shared = Route(variants, variants[0].name, Salts(case["salt"], "b"))
        assert assign(shared, case["key"]).name == case["variant"], case


def test_shadow_gets_its_share():
    """A key is mirrored always or never, other requests by chance; 0.04 is five standard deviations."""
    mirrored: set[str] = set()
    for percent in (0, 30, 60, 100):
        shadow = msgspec.structs.replace(SHADOW, percent=percent)
        by_chance = [is_mirrored(shadow, "b", "", unit) for unit in np.linspace(0, 1, 4000, endpoint=False)]
        by_key = {key for key in CALLERS if is_mirrored(shadow, "b", key, unit=0.5)}

        assert np.mean(by_chance) == pytest.approx(percent / 100, abs=0.001)
        assert len(by_key) / len(CALLERS) == pytest.approx(percent / 100, abs=0.04)
        assert by_key == {key for key in CALLERS if is_mirrored(shadow, "b", key, unit=0.1)}
        assert mirrored <= by_key, "a higher percentage only adds keys"
        mirrored = by_key


def test_route_survives_its_own_text():
    full = route(V1, V2, shadows=(SHADOW,), max_in_flight=7, generation=3)

    assert parse_route(format_route(full)) == full
    assert set(json.loads(format_route(route(V1)))) == {"variants", "default", "salts"}


def changed(**fields) -> bytes:
    return json.dumps(ROUTE | fields).encode()


def variant(**fields) -> bytes:
    return changed(variants=[ONE | fields])


@cases(
    ("text", "message"),
    cut=(b'{"variants": [', "Input data was truncated"),
    empty=(changed(variants=[]), "Expected `array` of length >= 1 - at `$.variants`, got []"),
    unknown=(
        changed(wieghts=1),
        "Object contains unknown field `wieghts`: expected one of variants, default, salts",
    ),
    default=(changed(default="v9"), "default must be one of v1, got 'v9'"),
    limit=(changed(max_in_flight=65), "Expected `int` <= 64 - at `$.max_in_flight`, got 65"),
    twice=(
        changed(shadows=[{"name": "v1", "model": "m", "version": 1, "percent": 5}]),
        "names of variants and shadows must differ, got v1, v1",
    ),
    weights=(variant(weight=0), "one weight must be positive, got 0 for all"),
    tiny_weight=(variant(weight=1e-320), "weight of 'v1' must be 0, or 1e-09 to 1e+09, got 9.99989e-321"),
    not_a_number=(variant(weight=float("nan")), "JSON is malformed: invalid character"),
    infinite=(
        variant(weight=0).replace(b'"weight": 0', b'"weight": 1e999'),
        "Number out of range - at `$.variants[0]",
    ),
    name=(variant(name="v1\n"), "Expected `str` matching regex"),
    header=(variant(headers={"x-api-key": ["a"]}), "Expected `str` matching regex '^x-route-"),
)
def test_wrong_route_is_rejected(text, message):
    with pytest.raises(InvalidConfig) as error:
        parse_route(text)

    assert str(error.value).startswith(message)


def test_published_schema_is_the_one_in_use(root):
    schema = json.loads((root / "docs" / "route.schema.json").read_text())

    assert schema == json.loads(json.dumps(json_schema()))
    Draft202012Validator.check_schema(schema)
