"""Changes of a route by publishing: add a variant, remove a variant, or roll back."""

import msgspec
from msgspec.structs import replace

from nereid.backends.routing.assignment import Route, Variant, parse_route, with_default
from nereid.base.errors import OperationFailed
from nereid.base.serving_errors import InvalidConfig
from nereid.models.routes.change import Proposal, Propose
from nereid.models.routes.target import RouteState


class VariantInUse(OperationFailed):
    """Requests are sent to a variant that is to be removed."""


def added(name: str, model: str, weight: float, is_fallback: bool = False) -> Propose:
    """Propose the present route with one more variant, version 1 of the pinned `model`.

    It has the deadline of the default variant. A fallback comes before the other fallbacks.
    """

    def propose(present: RouteState) -> Proposal:
        route = present.route()
        if any(variant.model == model for variant in route.variants):
            return Proposal(route, "")
        number = int(weight) if weight == int(weight) else weight
        (default,) = [each for each in route.variants if each.name == route.default]
        variant = Variant(name=name, model=model, version=1, weight=number, deadline_ms=default.deadline_ms)
        fallbacks = (name, *route.fallbacks) if is_fallback else route.fallbacks
        variants, what = (*route.variants, variant), "fall back to" if is_fallback else "publish"
        return Proposal(_checked(replace(route, variants=variants, fallbacks=fallbacks)), f"{what} {model}")

    return propose


def removed(name: str, model: str, weight: float, is_fallback: bool = False) -> Propose:
    """Propose the present route without a variant that is unchanged since it was added.

    The proposal raises `VariantInUse` if its weight differs, it is the default or has header rules, or became
    a fallback.
    """

    def propose(present: RouteState) -> Proposal:
        route = present.route()
        ours = [v for v in route.variants if (v.name, v.model) == (name, model)]
        for variant in ours:
            became_fallback = name in route.fallbacks and not is_fallback
            if reason := reason_in_use(variant, name == route.default, weight, became_fallback):
                raise VariantInUse(f"cannot remove variant '{name}': {reason}")
        rest = tuple(v for v in route.variants if v not in ours)
        fallbacks = tuple(each for each in route.fallbacks if each not in {v.name for v in ours})
        return Proposal(_checked(replace(route, variants=rest, fallbacks=fallbacks)), f"retire {model}")

    return propose


def reason_in_use(variant: Variant, is_default: bool, weight: float, is_fallback: bool) -> str:
    """Return the reason for which requests can reach a variant; empty if it has only its first `weight`."""
    if variant.weight != weight:
        return (
            f"expected weight {weight:g}, got {variant.weight:g}; "
            f"fix: nereid route set {variant.name}={weight:g}, or nereid rollback {variant.model}"
        )
    if is_default:
        return "it is the route's default; fix: make another variant the default"
    if is_fallback:
        return "it is a fallback of the route; fix: remove it from `fallbacks` in the route file"
    return "it has header rules; fix: remove them from the route file" if variant.headers else ""


def rolled_back(current: tuple[str, ...], earlier: tuple[str, ...]) -> Propose:
    """Propose weight 0 for some variants, and for earlier ones the weights from before those had any.

    Args:
        current: names of the variants of the current version.
        earlier: names of the variants with earlier versions, the latest first. The first one gets all traffic
            if the history has no such weights.
    """

    def propose(present: RouteState) -> Proposal:
        route = present.route()
        weights = _weights_before(present, current, earlier) or _weights(route, earlier) or {earlier[0]: 1}
        # Variants of other networks keep theirs.
        ours = dict.fromkeys((*current, *earlier), 0) | weights
        variants = tuple(replace(v, weight=ours.get(v.name, v.weight)) for v in route.variants)
        default = max(weights, key=lambda n: weights[n]) if route.default in current else route.default
        note = f"roll back {', '.join(current)}"
        return Proposal(_checked(with_default(replace(route, variants=variants), default)), note)

    return propose


def _weights_before(
    present: RouteState, current: tuple[str, ...], earlier: tuple[str, ...]
) -> dict[str, float]:
    """Return the newest weights of the earlier variants from when the current ones had none."""
    for entry in reversed(present.all_entries):
        route = entry.parsed()
        if route and not _weights(route, current) and (weights := _weights(route, earlier)):
            return weights
    return {}


def _weights(route: Route, names: tuple[str, ...]) -> dict[str, float]:
    return {v.name: v.weight for v in route.variants if v.name in names and v.weight}


def _checked(route: Route) -> Route:
    """Return the route if a file may contain it; the `replace` of msgspec does not validate."""
    try:
        return parse_route(msgspec.json.encode(route))
    except InvalidConfig as error:
        raise OperationFailed(str(error)) from None
