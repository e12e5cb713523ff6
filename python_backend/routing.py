"""Which variant of a route serves a request: pure, with no clock, no randomness and no Triton."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import inf, log
from typing import Any

from python_backend.errors import InvalidConfig, InvalidRequest

# What a variant is written with: field, what is expected of it, and how to tell.
FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": (
        f"1 to {blake2b.MAX_KEY_SIZE} bytes of text",
        lambda value: isinstance(value, str) and 1 <= len(value.encode()) <= blake2b.MAX_KEY_SIZE,
    ),
    "model": ("a model's name", lambda value: isinstance(value, str)),
    "version": ("a version number from 1 on", lambda value: isinstance(value, int) and value >= 1),
    "weight": (
        "a finite number from 0 on",
        lambda value: isinstance(value, (int, float)) and 0 <= value < inf,
    ),
}
FORCE_VARIANT, FORCE_VERSION, ROUTE_KEY = "x-variant", "x-model-version", "x-route-key"


@dataclass(frozen=True, slots=True)
class Variant:
    """One side of a route: `version` of `model` is what is called, `weight` its relative share.

    `network_version` is the version of the network that this pinned model runs; callers know it as
    the model version.
    """

    name: str
    model: str
    version: int
    weight: float
    network_version: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The variant that serves a request, and why: `variant`, `version`, `route-key` or `weight`."""

    variant: Variant
    reason: str


def parse_variants(text: str, network_version: Callable[[str, int], str]) -> tuple[Variant, ...]:
    """Read a route's variants from JSON: a list of objects with name, model, version and weight.

    Args:
        text: the JSON.
        network_version: tells the version of the network behind a version of a model.

    Raises:
        InvalidConfig: not such JSON, a field unknown, missing or of another type, a double name, or no
            positive weight.
    """
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise InvalidConfig(f"variants must be JSON: {error}") from None
    if not isinstance(entries, list):
        raise InvalidConfig(f"variants must be a JSON list, got {type(entries).__name__}")
    for entry in entries:
        _check_fields(entry)
    names = [entry["name"] for entry in entries]
    if len(set(names)) != len(names):
        raise InvalidConfig(f"variant names must differ, got {names}")
    if not any(entry["weight"] > 0 for entry in entries):
        raise InvalidConfig(f"one weight must be positive, got {[entry['weight'] for entry in entries]}")
    return tuple(
        Variant(**entry, network_version=network_version(entry["model"], entry["version"]))
        for entry in entries
    )


def _check_fields(entry: Any) -> None:
    if not isinstance(entry, dict) or set(entry) != set(FIELDS):
        raise InvalidConfig(f"a variant must have {', '.join(FIELDS)}, got {json.dumps(entry)}")
    for field, (expected, is_right) in FIELDS.items():
        value = entry[field]
        if isinstance(value, bool) or not is_right(value):
            raise InvalidConfig(f"{field} must be {expected}, got {json.dumps(value)}")


def choose(variants: tuple[Variant, ...], parameters: Mapping[str, str], unit: float) -> Choice:
    """Pick the variant for one request: forced variant, forced version, sticky key, then chance.

    Args:
        variants: the route's variants.
        parameters: the request's parameters; names are compared without case, empty values ignored.
        unit: a random number in [0, 1), used only when nothing else decides.

    Raises:
        InvalidRequest: a forced variant or version that the route does not have.
    """
    lowered = {name.lower(): str(value) for name, value in parameters.items()}
    if lowered.get(FORCE_VARIANT):
        names = {variant.name: variant for variant in variants}
        return Choice(_known(names, FORCE_VARIANT, lowered[FORCE_VARIANT]), "variant")
    if lowered.get(FORCE_VERSION):
        versions = {variant.network_version: variant for variant in reversed(variants)}
        return Choice(_known(versions, FORCE_VERSION, lowered[FORCE_VERSION]), "version")
    if lowered.get(ROUTE_KEY):
        return Choice(assign(variants, lowered[ROUTE_KEY]), "route-key")
    return Choice(_by_weight(variants, unit), "weight")


def assign(variants: tuple[Variant, ...], key: str) -> Variant:
    """Pick the variant that serves `key`; the same one on every server, every time.

    Raising one weight moves keys only towards that variant, so a rollout never swaps a caller between
    two variants it did not touch. At least one weight is positive, as `parse_variants` checked.

    Source: weighted rendezvous hashing, score -w / ln(u);
        Schindelhauer & Schomaker, "Weighted Distributed Hash Tables", SPAA 2005.
    """
    open_variants = [variant for variant in variants if variant.weight > 0]
    return max(open_variants, key=lambda variant: -variant.weight / log(_unit(variant.name, key)))


def _unit(name: str, key: str) -> float:
    """Hash name and key to 53 bits in the open interval (0, 1)."""
    digest = blake2b(key.encode(), key=name.encode(), digest_size=8).digest()
    return ((int.from_bytes(digest) >> 11) + 0.5) / 2**53


def _by_weight(variants: tuple[Variant, ...], unit: float) -> Variant:
    left = unit * sum(variant.weight for variant in variants)
    for variant in variants:
        if left < variant.weight:
            return variant
        left -= variant.weight
    # Rounding can leave a rest beyond the last weight.
    return [variant for variant in variants if variant.weight > 0][-1]


def _known(variants: Mapping[str, Variant], header: str, value: str) -> Variant:
    if value not in variants:
        raise InvalidRequest(f"unknown {header} '{value}', known are: {', '.join(sorted(variants))}")
    return variants[value]
