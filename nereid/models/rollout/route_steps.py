"""The routes of a rollout: that of each step, and that after the candidate was withdrawn."""

from msgspec.structs import replace

from nereid.backends.routing.assignment import Route, Shadow, Table, Variant, shares, with_default
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.rollout.counts import Pair
from nereid.models.rollout.plan import SHADOW, RolloutPlan
from nereid.models.rollout.rollout_journal import Rollout
from nereid.models.routes.change import Proposal, Propose
from nereid.models.routes.target import RouteState


class ControlGone(OperationFailed):
    """The route has no control any more, so there is nobody to get the candidate's traffic."""


def compared(table: Table, candidate: str, control: str = "") -> Pair:
    """Return the candidate and its control: the only other variant with traffic, or the given one.

    Raises:
        WrongUsage: the candidate does not exist, or not exactly one other variant has traffic.
    """
    variants = table.route.variants
    known = ", ".join(each.name for each in variants)
    if candidate not in (each.name for each in variants):
        raise WrongUsage(f"unknown candidate '{candidate}': expected a variant of the route, {known}")
    others = [
        each.name
        for each in variants
        if each.name != candidate and (each.name == control if control else each.weight)
    ]
    if len(others) != 1:
        raise WrongUsage(
            f"expected one variant with traffic as the control of '{candidate}', got "
            f"{', '.join(others) or 'none'}; fix: nereid route set, with weight 0 for the others"
        )
    shadow = f"rollout-{candidate}"[:64]
    if shadow in (each.name for each in variants):
        raise WrongUsage(f"expected no variant '{shadow}', the name of the rollout's shadow; fix: rename it")
    versions = table.network_versions
    return Pair((candidate, versions[candidate]), (others[0], versions[others[0]]), shadow)


def first_step(route: Route, plan: RolloutPlan) -> int:
    """Return the first step above the candidate's present share, so that no sticky key moves back.

    Raises:
        WrongUsage: the candidate has all traffic already.
    """
    present = shares(route)[plan.candidate] * 100
    for number, step in enumerate(plan.steps):
        if (step == SHADOW and not present) or (step != SHADOW and step > present + 1e-9):
            return number
    raise WrongUsage(f"'{plan.candidate}' has all traffic of the route already")


def at_step(state: Rollout) -> Propose:
    """Propose the present route with the weights and the shadow of a rollout's step."""
    share, plan = state.share, state.plan
    is_shadow = plan.steps[state.step] == SHADOW

    def propose(present: RouteState) -> Proposal:
        route = present.route()
        target = _variant(route, plan.candidate)
        shadow = Shadow(
            state.pair.shadow, target.model, target.version, plan.shadow_percent, target.deadline_ms
        )
        note = f"rollout of {plan.candidate}: {state.step_name}"
        return Proposal(_with(route, state.pair, share, (shadow,) if is_shadow else ()), note)

    return propose


def withdrawn(state: Rollout) -> Propose:
    """Propose the present route without traffic for the candidate."""

    def propose(present: RouteState) -> Proposal:
        note = f"rollout of {state.plan.candidate}: {state.result}"
        route, control = present.route(), state.pair.control[0]
        if control not in (each.name for each in route.variants):
            raise ControlGone(f"the route has no variant '{control}' any more, so its weights stay")
        route = _with(route, state.pair, 0.0, ())
        # The default must be ready, and replaces failing variants.
        default = control if route.default == state.plan.candidate else route.default
        return Proposal(with_default(route, default), note)

    return propose


def _variant(route: Route, name: str) -> Variant:
    found = [each for each in route.variants if each.name == name]
    if not found:
        raise WrongUsage(f"the route has no variant '{name}' any more")
    return found[0]


def _with(route: Route, pair: Pair, share: float, shadows: tuple[Shadow, ...]) -> Route:
    """Return a route with the share of the candidate, 0 to 1, and only these shadows of the rollout."""
    weights = {pair.candidate[0]: _weight(share), pair.control[0]: _weight(1 - share)}
    variants = tuple(replace(each, weight=weights.get(each.name, each.weight)) for each in route.variants)
    kept = tuple(each for each in route.shadows if each.name != pair.shadow)
    return replace(route, variants=variants, shadows=(*kept, *shadows))


def _weight(share: float) -> float:
    percent = round(share * 100, 6)
    return int(percent) if percent == int(percent) else percent
