"""Explain in words and numbers which variant a request gets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nereid.backends.routing import assignment
from nereid.backends.routing.assignment import (
    ANSWER,
    FORCED,
    LoadedRoute,
    Route,
    Variant,
    VariantChoice,
    hash_to_unit_interval,
    is_mirrored,
    lower,
    score,
    shares,
)
from nereid.base.contract import ROUTE_HEADERS, ROUTE_KEY_HEADER
from nereid.models.routes.location import percent


@dataclass(frozen=True, slots=True)
class VariantScore:
    """A variant's score for a sticky key, from its hash value in (0, 1) and its weight."""

    variant: str
    unit: float
    weight: float
    score: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The variant that a request gets if all variants are healthy, and the reason.

    Args:
        variant: empty if chance decides, by `shares`.
        candidates: scores of all variants, if a sticky key decides.
        mirrored: probability that the request is mirrored, 0 to 1, by shadow.
        ignored: the given headers that routes do not read.
        fallbacks: what answers, in this order, while the variant is unreachable.
    """

    variant: str
    reason: str
    why: str
    shares: Mapping[str, float]
    candidates: tuple[VariantScore, ...]
    mirrored: Mapping[str, float]
    ignored: tuple[str, ...]
    fallbacks: tuple[str, ...] = ()


def explain(loaded: LoadedRoute, parameters: Mapping[str, str]) -> Explanation:
    """Explain the variant for a request with these parameters or headers.

    Raises:
        InvalidRequest: the request names a variant or version that the route does not have.
    """
    choice = assignment.choose(loaded, parameters, random_unit=0.0)
    is_chance = choice.reason == "weight"
    key = lower(parameters).get(ROUTE_KEY_HEADER, "")
    variant_shares = shares(loaded.route)
    return Explanation(
        variant="" if is_chance else choice.variant.name,
        reason=choice.reason,
        why=_why(loaded, choice, key),
        shares=variant_shares if is_chance else {},
        candidates=_candidates(loaded.route, key) if choice.reason == "route-key" else (),
        mirrored=_mirrored(loaded.route, None if is_chance else choice.variant, key),
        ignored=tuple(name for name in parameters if not re.fullmatch(ROUTE_HEADERS, name)),
        fallbacks=_fallbacks(loaded.route, choice),
    )


def _fallbacks(route: Route, choice: VariantChoice) -> tuple[str, ...]:
    """Return the variants after the chosen one, then `answer`; after each variant, if chance chooses."""
    if choice.reason in FORCED:
        return ()
    is_known = choice.reason != "weight"
    names = [
        replacement.name
        for replacement in route.replacements
        if not (is_known and replacement is choice.variant)
    ]
    return (*names, *([ANSWER] if route.answer else []))


def _why(loaded: LoadedRoute, choice: VariantChoice, key: str) -> str:
    name, version = choice.variant.name, loaded.network_versions[choice.variant.name]
    rules = " and ".join(
        f"{header} is one of {', '.join(values)}" for header, values in choice.variant.headers.items()
    )
    percentages = ", ".join(f"{name} {percent(share)}" for name, share in shares(loaded.route).items())
    return {
        "variant": f"{name} serves because the request names variant '{name}'.",
        "version": f"{name} serves because it is the first variant whose network has version {version}.",
        "header": f"{name} serves because its header rule is met: {rules}.",
        "route-key": f"{name} serves because it has the highest score of all variants for key {key!r}.",
        "weight": f"Chance decides, by weight: {percentages}.",
    }[choice.reason]


def _candidates(route: Route, key: str) -> tuple[VariantScore, ...]:
    salt = route.salts.variants
    scores = [
        VariantScore(
            variant.name,
            hash_to_unit_interval(salt, variant.name, key),
            variant.weight,
            score(variant, salt, key),
        )
        for variant in route.variants
    ]
    return tuple(sorted(scores, key=lambda variant: -variant.score))


def _mirrored(route: Route, variant: Variant | None, key: str) -> dict[str, float]:
    salt = route.salts.shadows
    likely = {}
    for shadow in route.shadows:
        # The server never mirrors a request to the model that serves it.
        if variant and (shadow.model, shadow.version) == (variant.model, variant.version):
            likely[shadow.name] = 0.0
        else:
            likely[shadow.name] = float(is_mirrored(shadow, salt, key, 0)) if key else shadow.percent / 100
    return likely
