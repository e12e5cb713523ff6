"""The plan of a rollout: candidate, steps, limits, and what happens if nothing is decided."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from nereid.backends.routing.assignment import Name
from nereid.backends.triton.metrics import ROUTE_METRICS
from nereid.base.errors import WrongUsage

SHADOW: Literal["shadow"] = "shadow"
# Upper bounds of the route's latency buckets, in seconds.
BOUNDS = tuple(float(bound) for bound in ROUTE_METRICS["request_duration_seconds"].buckets)
Percent = Annotated[int, Meta(gt=0, le=100)] | Annotated[float, Meta(gt=0, le=100)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Increase = Annotated[float, Meta(gt=0, lt=1)]
Risk = Annotated[float, Meta(gt=0, le=0.5)]
Seconds = Annotated[float, Meta(gt=0, le=30 * 86400)]


@dataclass(frozen=True, slots=True)
class Pair:
    """The two variants that are compared, each by name and version, and the shadow of the candidate."""

    candidate: tuple[str, str]
    control: tuple[str, str]
    shadow: str = ""


class Hooks(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Commands, or URLs that begin with `http://`, that receive the state of the rollout as JSON."""

    before_step: Annotated[
        str, Meta(description="Runs before each step; if it fails, the rollout pauses.")
    ] = ""
    after_decision: Annotated[str, Meta(description="Runs after each decision; its failure is logged.")] = ""


class RolloutPlan(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a candidate gets the traffic of a route, and when it loses it again."""

    candidate: Annotated[Name, Meta(description="The variant of the route that gets the traffic.")]
    steps: Annotated[
        tuple[Literal["shadow"] | Percent, ...],
        Meta(
            min_length=1, max_length=32, description="Percentages of the traffic; the first may be `shadow`."
        ),
    ] = (1, 5, 25, 50, 100)
    hold_s: Annotated[Seconds, Meta(description="Minimum duration of a step.")] = 60.0
    patience_s: Annotated[
        Seconds, Meta(description="Duration after which a step without a decision is inconclusive.")
    ] = 3600.0
    min_requests: Annotated[
        int, Meta(ge=1, description="Requests of the candidate before a step may pass.")
    ] = 100
    max_error_ratio: Annotated[Ratio, Meta(description="Limit of the candidate's failed requests.")] = 0.05
    max_error_increase: Annotated[
        Increase, Meta(description="Increase of the failed requests that must be ruled out.")
    ] = 0.01
    slo_ms: Annotated[
        float, Meta(ge=0, description="A slower request is slow; 0 for 1.2 times the control's median.")
    ] = 0.0
    max_slow_ratio: Annotated[Ratio, Meta(description="Limit of the candidate's slow requests.")] = 1.0
    max_slow_increase: Annotated[
        Increase,
        Meta(
            description="Increase of the slow requests that must be ruled out; up to half of it never fails."
        ),
    ] = 0.1
    max_latency_increase: Annotated[
        float, Meta(gt=0, description="Increase of the median latency that fails a step at its end.")
    ] = 0.2
    max_disagreement: Annotated[
        Increase, Meta(description="Limit of the shadow's responses that disagreed or failed.")
    ] = 0.05
    shadow_percent: Annotated[Percent, Meta(description="Part of the requests that a shadow gets.")] = 100
    risk: Annotated[Risk, Meta(description="Probability that an equally good candidate is rolled back.")] = (
        0.01
    )
    power: Annotated[
        float,
        Meta(ge=0.5, lt=1, description="Probability that a candidate as bad as the limits passes no step."),
    ] = 0.95
    if_inconclusive: Annotated[
        Literal["pause", "rollback"], Meta(description="Effect of a step that stays without a decision.")
    ] = "pause"
    hooks: Hooks = Hooks()
    schema: Annotated[str, Meta(description="For editors.")] = msgspec.field(name="$schema", default="")

    def __post_init__(self) -> None:
        if any(hook.startswith("https:") for hook in (self.hooks.before_step, self.hooks.after_decision)):
            raise ValueError("a hook must be a command or a URL that begins with http://, got https:")
        shares = [step for step in self.steps if step != SHADOW]
        if SHADOW in self.steps[1:]:
            raise ValueError(f"only the first step may be `shadow`, got {_words(self.steps)}")
        if not shares or shares != sorted(set(shares)) or shares[-1] != 100:
            raise ValueError(f"steps must increase up to 100, got {_words(self.steps)}")
        if self.patience_s < self.hold_s:
            raise ValueError(f"patience_s must be at least hold_s {self.hold_s:g}, got {self.patience_s:g}")


def _words(steps: tuple[str | float, ...]) -> str:
    return ", ".join(str(step) for step in steps)


def parse_plan(text: bytes, source: str) -> RolloutPlan:
    """Read the JSON of a plan.

    Raises:
        WrongUsage: it is not a plan; the message has `source`, the place and the expected value.
    """
    try:
        return msgspec.json.decode(text, type=RolloutPlan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WrongUsage(f"{source}: {error}") from None


def make_plan(**values: Any) -> RolloutPlan:
    """Return a plan with checked values.

    Raises:
        WrongUsage: a value is invalid; the message has its name and the expected value.
    """
    try:
        return msgspec.convert(values, RolloutPlan)
    except msgspec.ValidationError as error:
        raise WrongUsage(re.sub(r" - at `\$\.?([^`]*)`$", r" for \1", str(error))) from None


def read_steps(text: str) -> list[str | float]:
    """Parse `shadow,1,5,25,50,100`.

    Raises:
        WrongUsage: a step is neither `shadow` nor a number.
    """
    return [SHADOW if word.strip() == SHADOW else _number(word) for word in text.split(",")]


def _number(word: str) -> float:
    try:
        return int(word) if word.strip().isdecimal() else float(word)
    except ValueError:
        raise WrongUsage(f"expected steps such as shadow,1,5,25,50,100, got '{word.strip()}'") from None
