"""A route, and which of its variants serves a request: pure, with no clock, no randomness and no Triton."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import log
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from nereid.serving_errors import InvalidConfig, InvalidRequest

FORCE_VARIANT, FORCE_VERSION, ROUTE_KEY = "x-variant", "x-model-version", "x-route-key"
# A variant's reason to serve, of what `choose` decides and of what happens after.
FORCED = frozenset({"variant", "version"})
BREAKER, RETRY = "breaker", "retry"
# Python's `$` also matches before a line end, ECMAScript's (of JSON Schema) does not.
Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}(?!\n)$", description="Letters, digits, `.`, `_` and `-`.")
]
Version = Annotated[int, Meta(ge=1, description="Version of the model, a folder of the repository.")]
DeadlineMs = Annotated[
    int, Meta(ge=1, le=3_600_000, description="Milliseconds after which the answer is an error.")
]
Salt = Annotated[
    str,
    Meta(pattern=r"^[ -~]{1,64}(?!\n)$", description="Printable ASCII, the hash's key; another shuffles."),
]
DEADLINE_MS = 10_000
MOST_VARIANTS, MOST_WEIGHT = 16, 10**9
# What one instance of a route can be set to at most.
MOST_IN_FLIGHT, MOST_MIRRORED = 64, 16
# Each holds a thread: as many calls again may be late, whose clients have been told.
MOST_CALLS = 2 * MOST_IN_FLIGHT + MOST_MIRRORED


class Variant(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One side of a route: `version` of `model` is what is called, `weight` its relative share."""

    name: Name
    model: Annotated[str, Meta(min_length=1, description="A model of the repository.")]
    version: Version
    weight: Annotated[
        Annotated[int, Meta(ge=0, le=MOST_WEIGHT)] | Annotated[float, Meta(ge=0, le=float(MOST_WEIGHT))],
        Meta(description="Relative share; 0 for only when asked for."),
    ]
    headers: Annotated[
        dict[
            Annotated[str, Meta(pattern=r"^x-route-[a-z0-9-]+(?!\n)$")],
            Annotated[tuple[str, ...], Meta(min_length=1)],
        ],
        Meta(description="Requests whose headers all have one of these values get this variant."),
    ] = {}
    deadline_ms: DeadlineMs = DEADLINE_MS


class Shadow(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that is asked the same as the variant that has answered, and compared with it."""

    name: Name
    model: Annotated[str, Meta(min_length=1, description="A model of the repository.")]
    version: Version
    percent: Annotated[
        Annotated[int, Meta(ge=0, le=100)] | Annotated[float, Meta(ge=0, le=100)],
        Meta(description="How many of the requests are mirrored."),
    ]
    deadline_ms: DeadlineMs = DEADLINE_MS


class Salts(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What sticky keys are hashed with: routes with equal salts give a key the same place in both."""

    variants: Salt
    shadows: Salt


class BreakerSettings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a variant that fails gets no more requests, and for how long."""

    window_s: Annotated[float, Meta(gt=0, le=3600, description="How far back requests are looked at.")] = 1.0
    min_requests: Annotated[int, Meta(ge=1, le=10_000, description="At least so many of the last.")] = 5
    error_ratio: Annotated[float, Meta(gt=0, le=1, description="Share of failures that opens it.")] = 0.5
    open_s: Annotated[float, Meta(gt=0, le=3600, description="Seconds until one request tries again.")] = 5.0


class Route(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of a route file: the variants behind one public name."""

    variants: Annotated[tuple[Variant, ...], Meta(min_length=1, max_length=MOST_VARIANTS)]
    default: Annotated[str, Meta(description="The variant that serves for one that is failing.")]
    salts: Salts
    shadows: tuple[Shadow, ...] = ()
    max_in_flight: Annotated[
        int,
        Meta(ge=1, le=MOST_IN_FLIGHT, description="Requests at once; the next one is refused as overload."),
    ] = MOST_IN_FLIGHT
    shadow_max_in_flight: Annotated[
        int,
        Meta(ge=0, le=MOST_MIRRORED, description="Nothing is mirrored while so many requests are in flight."),
    ] = 1
    breaker: BreakerSettings = BreakerSettings()
    generation: Annotated[
        int, Meta(ge=0, le=2**53, description="Counts changes; `nereid route` writes it.")
    ] = 0
    schema: Annotated[str, Meta(description="For editors.")] = msgspec.field(name="$schema", default="")

    def __post_init__(self) -> None:
        names = [each.name for each in self.targets()]
        if len(set(names)) != len(names):
            raise ValueError(f"names of variants and shadows must differ, got {', '.join(names)}")
        if not any(variant.weight > 0 for variant in self.variants):
            raise ValueError("one weight must be positive, got 0 for all")
        if self.default not in (known := [variant.name for variant in self.variants]):
            raise ValueError(f"default must be one of {', '.join(known)}, got '{self.default}'")

    @property
    def default_variant(self) -> Variant:
        """The variant that serves for one that is failing."""
        return next(variant for variant in self.variants if variant.name == self.default)

    def targets(self) -> tuple[Variant | Shadow, ...]:
        """Return all that name a model: variants, then shadows."""
        return (*self.variants, *self.shadows)


OBJECTS: dict[str, type[Struct]] = {
    "": Route,
    "variants": Variant,
    "shadows": Shadow,
    "salts": Salts,
    "breaker": BreakerSettings,
}


@dataclass(frozen=True, slots=True)
class Table:
    """A route as it is in use: with the SHA-256 of its file, and what callers know as the model versions.

    `network_versions` has, by the variant's name, the version of the network that its pinned model runs.
    """

    route: Route
    sha256: str
    network_versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Choice:
    """The variant that serves a request, and why: `variant`, `version`, `header`, `route-key` or `weight`."""

    variant: Variant
    reason: str


def parse_route(text: bytes) -> Route:
    """Read the JSON of a route file.

    Raises:
        InvalidConfig: not such JSON; the message names the place, what was expected and what came.
    """
    try:
        return msgspec.json.decode(text, type=Route)
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"JSON must be UTF-8: {error}") from None
    except msgspec.DecodeError as error:  # the base of ValidationError, too
        raise InvalidConfig(_explain(str(error), text)) from None


def format_route(route: Route) -> bytes:
    """Return the JSON of a route file: one field a line, defaults left out."""
    return msgspec.json.format(msgspec.json.encode(route), indent=2) + b"\n"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a route file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Nereid route",
        **msgspec.json.schema(Route),
    }


def choose(table: Table, parameters: Mapping[str, Any], unit: float) -> Choice:
    """Pick the variant for one request: forced variant, forced version, header rule, sticky key, then chance.

    Args:
        table: the route.
        parameters: the request's parameters; names are compared without case, empty values ignored.
        unit: a random number in [0, 1), used only when nothing else decides.

    Raises:
        InvalidRequest: a forced variant or version that the route does not have.
    """
    variants = table.route.variants
    if not parameters:
        return Choice(_by_weight(variants, unit), "weight")
    lowered = lower(parameters)
    if lowered.get(FORCE_VARIANT):
        names = {variant.name: variant for variant in variants}
        return Choice(_known(names, FORCE_VARIANT, lowered[FORCE_VARIANT]), "variant")
    if lowered.get(FORCE_VERSION):
        versions = {table.network_versions[variant.name]: variant for variant in reversed(variants)}
        return Choice(_known(versions, FORCE_VERSION, lowered[FORCE_VERSION]), "version")
    for variant in variants:
        rules = variant.headers.items()
        if rules and all(lowered.get(name) in values for name, values in rules):
            return Choice(variant, "header")
    if lowered.get(ROUTE_KEY):
        return Choice(assign(table.route, lowered[ROUTE_KEY]), "route-key")
    return Choice(_by_weight(variants, unit), "weight")


def lower(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return request parameters as they are compared: names without case, values as text."""
    return {name.lower(): str(value) for name, value in parameters.items()}


def assign(route: Route, key: str) -> Variant:
    """Pick the variant that serves `key`; the same one on every server, every time.

    Raising one weight moves keys only towards that variant, so a rollout never swaps a caller between
    two variants it did not touch.

    Source: weighted rendezvous hashing, score -w / ln(u);
        Schindelhauer & Schomaker, "Weighted Distributed Hash Tables", SPAA 2005.
    """
    return max(route.variants, key=lambda variant: score(variant, route.salts.variants, key))


def score(variant: Variant, salt: str, key: str) -> float:
    """Return how much `variant` wants `key`, -w / ln(u): the highest score gets it; 0 without weight."""
    return -variant.weight / log(unit_of(salt, variant.name, key))


def is_mirrored(shadow: Shadow, salt: str, key: str, unit: float) -> bool:
    """Tell whether a request goes to `shadow`, too: the same keys always, others by chance.

    Args:
        shadow: where it may go.
        salt: the route's for shadows.
        key: the request's sticky key, or nothing.
        unit: a random number in [0, 1), used without a key.
    """
    drawn = unit_of(salt, shadow.name, key) if key else unit
    return drawn * 100 < shadow.percent


def unit_of(salt: str, name: str, key: str) -> float:
    """Hash name and key to 52 bits in the open interval (0, 1): keyed BLAKE2b of `NAME 0x00 KEY`."""
    message = f"{name}\0{key}".encode(errors="surrogatepass")
    digest = blake2b(message, key=salt.encode(), digest_size=8).digest()
    return ((int.from_bytes(digest) >> 12) + 0.5) / 2**52


def shares(route: Route) -> dict[str, float]:
    """Return, by variant, the share of requests that only chance or a sticky key decides on: 0 to 1."""
    total = sum(variant.weight for variant in route.variants)
    return {variant.name: variant.weight / total for variant in route.variants}


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


def _explain(message: str, text: bytes) -> str:
    """Add to msgspec's words what came at the place they name, or what may stand there."""
    found = re.search(r" - at `\$(?P<place>[^`]*)`$", message)
    place = found["place"] if found else ""
    if "unknown field" in message:
        kind = OBJECTS[re.sub(r"\W|\d", "", place)]
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
        return f"{message}, known are: {known}"
    if not re.fullmatch(r"(\.\w+|\[\d+\])+", place) or ", got" in message:
        return message
    try:
        value = json.loads(text)
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
            value = value[int(index)] if index else value[name]
    # msgspec stops at the first fault: what follows may be no JSON, or name the same place again.
    except (ValueError, LookupError, TypeError, RecursionError):
        return message
    return f"{message}, got {json.dumps(value)[:100]}"
