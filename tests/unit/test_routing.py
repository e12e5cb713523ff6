"""Routing: precedence, stickiness and shares, without a server."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from python_backend.errors import InvalidConfig, InvalidRequest
from python_backend.routing import Choice, Variant, assign, choose, parse_variants

V1 = Variant("v1", "classify_v1", 1, 90.0, "1")
V2 = Variant("v2", "classify_v2", 1, 10.0, "2")
V3 = Variant("v3", "classify_v3", 1, 25.0, "3")
CALLERS = [f"caller-{number}" for number in range(4000)]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"x-variant": "v2", "x-model-version": "1", "x-route-key": "k"}, Choice(V2, "variant")),
        ({"X-Variant": "v2"}, Choice(V2, "variant")),
        ({"x-model-version": "2", "x-route-key": "k"}, Choice(V2, "version")),
        ({"x-model-version": 2}, Choice(V2, "version")),
        ({"x-route-key": "k"}, Choice(assign((V1, V2), "k"), "route-key")),
        ({"x-variant": "", "x-model-version": "", "x-route-key": ""}, Choice(V1, "weight")),
        ({"other": "x"}, Choice(V1, "weight")),
        ({}, Choice(V1, "weight")),
    ],
    ids=[
        "variant first",
        "any case",
        "then version",
        "version as number",
        "then key",
        "empty key",
        "other",
        "none",
    ],
)
def test_precedence(parameters, expected):
    """Forced variant, forced version, sticky key, chance: the first that is given decides."""
    assert choose((V1, V2), parameters, unit=0.0) == expected


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"x-variant": "v9"}, "invalid request: unknown x-variant 'v9', known are: v1, v2"),
        ({"x-model-version": "9"}, "invalid request: unknown x-model-version '9', known are: 1, 2"),
    ],
    ids=["variant", "version"],
)
def test_unknown_name_is_refused(parameters, message):
    """A forced variant that is not there is never silently replaced."""
    with pytest.raises(InvalidRequest) as raised:
        choose((V1, V2), parameters, unit=0.0)

    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("unit", "name"), [(0.0, "v1"), (0.899, "v1"), (0.901, "v2"), (0.999999999, "v2")], ids=str
)
def test_chance_follows_the_weights(unit, name):
    """Weights 90 and 10 split the unit interval at 0.9."""
    assert choose((V1, V2), {}, unit).variant.name == name


def test_weight_zero_is_never_chosen():
    """A variant without weight is reached by force only, at either end of the list."""
    variants = (replace(V1, weight=0), V2, replace(V3, weight=0))

    chosen = {choose(variants, {}, unit).variant.name for unit in np.linspace(0, 1, 101, endpoint=False)}
    assigned = {assign(variants, key).name for key in CALLERS}

    assert chosen == assigned == {"v2"}


@pytest.mark.parametrize("variants", [(V1, V2), (V1, V2, V3)], ids=["two", "three"])
def test_keys_share_by_weight(variants):
    """Keys spread as the weights say; 3 % is over four standard deviations of 4,000 keys."""
    counts = Counter(assign(variants, key).name for key in CALLERS)

    total = sum(variant.weight for variant in variants)
    for variant in variants:
        assert counts[variant.name] / len(CALLERS) == pytest.approx(variant.weight / total, abs=0.03)


@pytest.mark.parametrize("weight", [10.5, 40.0, 5000.0], ids=lambda w: f"to-{w}")
def test_raising_a_weight_only_adds_callers_to_it(weight):
    """No caller is moved between variants that the change did not touch."""
    variants, raised = (V1, V2, V3), (V1, replace(V2, weight=weight), V3)

    moved = [(assign(variants, key).name, assign(raised, key).name) for key in CALLERS]

    assert {after for before, after in moved if before != after} == {"v2"}


def test_same_key_same_variant_everywhere():
    """The assignment is a fixed function of name and key: these answers must never change."""
    assigned = [assign((V1, replace(V2, weight=90.0)), key).name for key in ("alice", "bob", "carol", "dave")]

    assert assigned == ["v2", "v2", "v2", "v1"]


def write(*entries: dict) -> str:
    """Write a route as its config has it."""
    return json.dumps(entries)


ONE = {"name": "v1", "model": "classify_v1", "version": 1, "weight": 1}


def test_variants_are_read_with_their_network_version():
    """The route learns the network's version from the pinned model, not from a second statement of it."""
    variants = parse_variants(write(ONE), lambda model, version: f"{model}-{version}")

    assert variants == (Variant("v1", "classify_v1", 1, 1, "classify_v1-1"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "variants must be JSON: Expecting value"),
        ("{}", "variants must be a JSON list, got dict"),
        ("[]", "one weight must be positive, got []"),
        ("[1]", "a variant must have name, model, version, weight, got 1"),
        (write({"name": "v1"}), 'a variant must have name, model, version, weight, got {"name": "v1"}'),
        (write(ONE | {"wieght": 1}), "a variant must have name, model, version, weight, got {"),
        (write(ONE, ONE), "variant names must differ, got ['v1', 'v1']"),
        (write(ONE | {"weight": 0}), "one weight must be positive, got [0]"),
        (write(ONE | {"weight": -1}), "weight must be a finite number from 0 on, got -1"),
        (write(ONE | {"weight": "half"}), 'weight must be a finite number from 0 on, got "half"'),
        (write(ONE | {"weight": float("nan")}), "weight must be a finite number from 0 on, got NaN"),
        (write(ONE | {"weight": True}), "weight must be a finite number from 0 on, got true"),
        (write(ONE | {"version": -1}), "version must be a version number from 1 on, got -1"),
        (write(ONE | {"model": 5}), "model must be a model's name, got 5"),
        (write(ONE | {"name": "v" * 65}), "name must be 1 to 64 bytes of text"),
    ],
    ids=lambda value: value[:40],
)
def test_wrong_route_fails_the_load(text, message):
    """A route that could not serve is refused with what was expected and what came."""
    with pytest.raises(InvalidConfig) as raised:
        parse_variants(text, lambda model, version: "1")

    assert str(raised.value).startswith(message)
