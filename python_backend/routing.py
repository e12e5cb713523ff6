"""Which variant of a route serves a request: pure, with no clock, no randomness and no Triton."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import log

from python_backend.errors import InvalidConfig, InvalidRequest

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


def parse_variants(text: str, network_version: Callable[[str], str]) -> tuple[Variant, ...]:
    """Read a route's variants from JSON: a list of objects with name, model, version and weight.

    Args:
        text: the JSON.
        network_version: tells the version of the network behind a model.

    Raises:
        InvalidConfig: not such JSON, an unknown or missing field, a double name, or no positive weight.
    """
    try:
        variants = tuple(
            Variant(**entry, network_version=network_version(entry["model"])) for entry in json.loads(text)
        )
    except (ValueError, TypeError, KeyError) as error:
        expected = "a JSON list of {name, model, version, weight}"
        raise InvalidConfig(f"variants must be {expected}: {type(error).__name__} {error}") from None
    names = [variant.name for variant in variants]
    for name in names:
        if not 1 <= len(name.encode()) <= blake2b.MAX_KEY_SIZE:
            raise InvalidConfig(f"variant name must have 1 to {blake2b.MAX_KEY_SIZE} bytes, got '{name}'")
    if len(set(names)) != len(names):
        raise InvalidConfig(f"variant names must differ, got {names}")
    weights = [variant.weight for variant in variants]
    for weight in weights:
        if not isinstance(weight, (int, float)):
            raise InvalidConfig(f"weight must be a number, got {weight!r}")
    if min(weights, default=0) < 0 or sum(weights) <= 0:
        raise InvalidConfig(f"weights must not be negative and one must be positive, got {weights}")
    return variants


def choose(variants: tuple[Variant, ...], parameters: Mapping[str, str], unit: float) -> Choice:
    """Pick the variant for one request: forced variant, forced version, sticky key, then chance.

    Args:
        variants: the route's variants.
        parameters: the request's parameters; names are compared without case.
        unit: a random number in [0, 1), used only when nothing else decides.

    Raises:
        InvalidRequest: a forced variant or version that the route does not have.
    """
    lowered = {name.lower(): str(value) for name, value in parameters.items()}
    if FORCE_VARIANT in lowered:
        names = {variant.name: variant for variant in variants}
        return Choice(_known(names, FORCE_VARIANT, lowered[FORCE_VARIANT]), "variant")
    if FORCE_VERSION in lowered:
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
