"""Routes, and the choice of a variant for a request; pure, without clock, randomness or Triton."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import log
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from nereid.base.contract import ROUTE_HEADER_PREFIX, ROUTE_KEY_HEADER, VARIANT_HEADER, VERSION_HEADER
from nereid.base.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:  # NumPy slows the start of each command
    import numpy as np

# Reasons for a variant, from `choose` and from the router.
FORCED = frozenset({"variant", "version"})
BREAKER, RETRY, ANSWER = "breaker", "retry", "answer"
# Python's `$` also matches before a line end, ECMAScript's (of JSON Schema) does not.
Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}(?!\n)$", description="Letters, digits, `.`, `_` and `-`.")
]
Version = Annotated[int, Meta(ge=1, description="Version of the model: a numbered folder in the repository.")]
DeadlineMs = Annotated[
    int, Meta(ge=1, le=3_600_000, description="Milliseconds after which the client gets an error.")
]
Salt = Annotated[
    str,
    Meta(
        pattern=r"^[ -~]{1,64}(?!\n)$",
        description="Printable ASCII; key of the hash that assigns route keys.",
    ),
]
DEADLINE_MS = 10_000
MAX_VARIANTS, MAX_WEIGHT = 16, 10**9
# A smaller weight has no share of its own, and one of 1e-320 loses its digits.
MIN_WEIGHT = 1 / MAX_WEIGHT
# Upper bounds of the settings of one instance of a route.
MAX_IN_FLIGHT, MAX_MIRRORED = 64, 16
# Requests, attempts that continue without a slot (late, or their client left), and mirrored requests each
# occupy one thread.
ROUTE_THREADS = 2 * MAX_IN_FLIGHT + MAX_MIRRORED


class Variant(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One side of a route: `version` of `model`, with its relative share of the traffic."""

    name: Name
    model: Annotated[str, Meta(min_length=1, description="A model of the repository.")]
    version: Version
    weight: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_WEIGHT)] | Annotated[float, Meta(ge=0, le=float(MAX_WEIGHT))],
        Meta(description="Relative share of the traffic; 0 serves only on request."),
    ]
    headers: Annotated[
        dict[
            Annotated[str, Meta(pattern=rf"^{ROUTE_HEADER_PREFIX}[a-z0-9-]+(?!\n)$")],
            Annotated[tuple[str, ...], Meta(min_length=1)],
        ],
        Meta(description="A request whose headers all have one of these values gets this variant."),
    ] = {}
    deadline_ms: DeadlineMs = DEADLINE_MS


class Shadow(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that gets a copy of served requests, and is compared with the variant."""

    name: Name
    model: Annotated[str, Meta(min_length=1, description="A model of the repository.")]
    version: Version
    percent: Annotated[
        Annotated[int, Meta(ge=0, le=100)] | Annotated[float, Meta(ge=0, le=100)],
        Meta(description="Percentage of the requests that are mirrored."),
    ]
    deadline_ms: DeadlineMs = DEADLINE_MS


class Salts(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Keys of the hash of route keys: routes with equal salts place a route key equally."""

    variants: Salt
    shadows: Salt


class BreakerSettings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Condition under which a failing variant gets no more requests, and the duration."""

    window_s: Annotated[float, Meta(gt=0, le=3600, description="Seconds of past requests that count.")] = 1.0
    min_requests: Annotated[
        int, Meta(ge=1, le=10_000, description="Minimum number of past requests that count.")
    ] = 5
    error_ratio: Annotated[
        float, Meta(gt=0, le=1, description="Share of failures that opens the breaker.")
    ] = 0.5
    open_s: Annotated[float, Meta(gt=0, le=3600, description="Seconds until one trial request.")] = 5.0


class Route(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Content of a route file: the variants behind one public name."""

    variants: Annotated[tuple[Variant, ...], Meta(min_length=1, max_length=MAX_VARIANTS)]
    default: Annotated[str, Meta(description="The variant that replaces a failing one.")]
    salts: Salts
    shadows: tuple[Shadow, ...] = ()
    max_in_flight: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_IN_FLIGHT,
            description="Limit of concurrent requests; a further one is rejected as overload.",
        ),
    ] = MAX_IN_FLIGHT
    shadow_max_in_flight: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_MIRRORED,
            description="No request is mirrored while this many requests are in flight.",
        ),
    ] = 1
    breaker: BreakerSettings = BreakerSettings()
    fallbacks: Annotated[
        tuple[Name, ...],
        Meta(description="Variants to try, in this order, if the default variant fails as well."),
    ] = ()
    answer: Annotated[
        dict[str, Any], Meta(description="Value of each output, for requests that no variant can answer.")
    ] = {}
    generation: Annotated[
        int, Meta(ge=0, le=2**53, description="Counts changes; `nereid route` writes it.")
    ] = 0
    schema: Annotated[str, Meta(description="For editors.")] = msgspec.field(name="$schema", default="")

    def __post_init__(self) -> None:
        names = [target.name for target in self.targets()]
        if len(set(names)) != len(names):
            raise ValueError(f"names of variants and shadows must differ, got {', '.join(names)}")
        if small := [variant for variant in self.variants if 0 < variant.weight < MIN_WEIGHT]:
            allowed = f"0, or {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
            raise ValueError(f"weight of '{small[0].name}' must be {allowed}, got {small[0].weight:g}")
        if not any(variant.weight > 0 for variant in self.variants):
            raise ValueError("one weight must be positive, got 0 for all")
        if self.default not in (known := [variant.name for variant in self.variants]):
            raise ValueError(f"default must be one of {', '.join(known)}, got '{self.default}'")
        for index, name in enumerate(self.fallbacks):
            others = [other for other in known if other not in (self.default, *self.fallbacks[:index])]
            if name not in others:
                expected = f"one of {', '.join(others)}" if others else "omitted: no other variant remains"
                raise ValueError(f"fallbacks[{index}] must be {expected}, got '{name}'")
        if self.answer and ANSWER in known:
            raise ValueError(f"no variant may be named '{ANSWER}' in a route with an answer")

    @property
    def replacements(self) -> tuple[Variant, ...]:
        """The variants that replace a failing one, in the order in which they are tried."""
        by_name = {variant.name: variant for variant in self.variants}
        return tuple(by_name[name] for name in (self.default, *self.fallbacks))

    @property
    def has_fallbacks(self) -> bool:
        """Whether the route has alternatives besides its default for requests of a failing variant."""
        return bool(self.fallbacks or self.answer)

    def targets(self) -> tuple[Variant | Shadow, ...]:
        """Return the variants, then the shadows."""
        return (*self.variants, *self.shadows)


OBJECTS: dict[str, type[Struct]] = {
    "": Route,
    "variants": Variant,
    "shadows": Shadow,
    "salts": Salts,
    "breaker": BreakerSettings,
}


@dataclass(frozen=True, slots=True)
class LoadedRoute:
    """A route in use, the SHA-256 of its file, and the model versions that clients see.

    `network_versions` maps a variant's name to the version of the network that its pinned model runs.
    `answer` has one row per output, for requests that no variant can answer.
    """

    route: Route
    sha256: str
    network_versions: Mapping[str, str]
    answer: "Mapping[str, np.ndarray]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """The variant for a request, and the reason: `variant`, `version`, `header`, `route-key` or `weight`."""

    variant: Variant
    reason: str


def parse_route(encoded: bytes) -> Route:
    """Read the JSON of a route file.

    Raises:
        InvalidConfig: not a route; the message names the place, and the expected and the given value.
    """
    try:
        return msgspec.json.decode(encoded, type=Route)
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"JSON must be UTF-8: {error}") from None
    except msgspec.DecodeError as error:  # also the base of ValidationError
        raise InvalidConfig(_explain(str(error), encoded)) from None


def with_default(route: Route, name: str) -> Route:
    """Return the route with another default, removed from its fallbacks."""
    fallbacks = tuple(fallback for fallback in route.fallbacks if fallback != name)
    return msgspec.structs.replace(route, default=name, fallbacks=fallbacks)


def format_route(route: Route) -> bytes:
    """Return the JSON of a route file: one field per line, without defaults."""
    return msgspec.json.format(msgspec.json.encode(route), indent=2) + b"\n"


def choose(loaded: LoadedRoute, parameters: Mapping[str, Any], random_unit: float) -> VariantChoice:
    """Pick the variant for one request: forced variant, forced version, header rule, sticky key, then chance.

    Args:
        parameters: the request's parameters; names are compared without case, empty values ignored.
        random_unit: a random number in [0, 1), used if the request decides nothing.

    Raises:
        InvalidRequest: the route does not have the forced variant or version.
    """
    variants = loaded.route.variants
    if not parameters:
        return VariantChoice(_by_weight(variants, random_unit), "weight")
    lowered = lower(parameters)
    if lowered.get(VARIANT_HEADER):
        names = {variant.name: variant for variant in variants}
        return VariantChoice(_known(names, VARIANT_HEADER, lowered[VARIANT_HEADER]), "variant")
    if lowered.get(VERSION_HEADER):
        versions = {loaded.network_versions[variant.name]: variant for variant in reversed(variants)}
        return VariantChoice(_known(versions, VERSION_HEADER, lowered[VERSION_HEADER]), "version")
    for variant in variants:
        rules = variant.headers.items()
        if rules and all(lowered.get(name) in values for name, values in rules):
            return VariantChoice(variant, "header")
    if lowered.get(ROUTE_KEY_HEADER):
        return VariantChoice(assign(loaded.route, lowered[ROUTE_KEY_HEADER]), "route-key")
    return VariantChoice(_by_weight(variants, random_unit), "weight")


def lower(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return request parameters for comparison: names in lower case, values as text."""
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
    """Return the variant's score for `key`, -w / ln(u), 0 without weight: the highest score gets the key."""
    return -variant.weight / log(hash_to_unit_interval(salt, variant.name, key))


def is_mirrored(shadow: Shadow, salt: str, key: str, random_unit: float) -> bool:
    """Return whether a request is mirrored to `shadow`: by its key if it has one, else by chance.

    Args:
        salt: the route's salt for shadows.
        key: the request's sticky key, or an empty string.
        random_unit: a random number in [0, 1), used without a key.
    """
    drawn = hash_to_unit_interval(salt, shadow.name, key) if key else random_unit
    return drawn * 100 < shadow.percent


def hash_to_unit_interval(salt: str, name: str, key: str) -> float:
    """Hash name and key to 52 bits in the open interval (0, 1): keyed BLAKE2b of `NAME 0x00 KEY`."""
    message = f"{name}\0{key}".encode(errors="surrogatepass")
    digest = blake2b(message, key=salt.encode(), digest_size=8).digest()
    return ((int.from_bytes(digest) >> 12) + 0.5) / 2**52


def shares(route: Route) -> dict[str, float]:
    """Return each variant's share, 0 to 1, of the requests that only chance or a sticky key decides."""
    total = sum(variant.weight for variant in route.variants)
    return {variant.name: variant.weight / total for variant in route.variants}


def _by_weight(variants: tuple[Variant, ...], random_unit: float) -> Variant:
    left = random_unit * sum(variant.weight for variant in variants)
    for variant in variants:
        if left < variant.weight:
            return variant
        left -= variant.weight
    # Rounding can leave a remainder beyond the last weight.
    return [variant for variant in variants if variant.weight > 0][-1]


def _known(variants: Mapping[str, Variant], header: str, value: str) -> Variant:
    if value not in variants:
        raise InvalidRequest(f"unknown {header} '{value}': expected one of {', '.join(sorted(variants))}")
    return variants[value]


def _explain(message: str, encoded: bytes) -> str:
    match = re.search(r" - at `\$(?P<path>[^`]*)`$", message)
    path = match["path"] if match else ""
    if "unknown field" in message:
        kind = OBJECTS[re.sub(r"\W|\d", "", path)]
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
        return f"{message}: expected one of {known}"
    if not re.fullmatch(r"(\.\w+|\[\d+\])+", path) or ", got" in message:
        return message
    try:
        value = json.loads(encoded)
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            value = value[int(index)] if index else value[name]
    # msgspec stops at the first fault: the text after it may be invalid JSON, or repeat a name.
    except (ValueError, LookupError, TypeError, RecursionError):
        return message
    return f"{message}, got {json.dumps(value)[:100]}"
