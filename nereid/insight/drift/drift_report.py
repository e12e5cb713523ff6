"""The report of `nereid drift show`: drift, shadows and ground truth of one route."""

import contextlib
import http.client
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from nereid.base import prometheus_text
from nereid.base.errors import OperationFailed
from nereid.base.prometheus_text import MetricSamples
from nereid.insight.drift.monitor import STATE_FILE, DriftState, RouteDrift
from nereid.insight.drift.recording import History, shadow_series
from nereid.server.run_dir import GatewayInfo

PAGE_TIMEOUT_S = 5.0
# Two-sided 95 % of the normal distribution.
Z = 1.959964
# Time span of one row of shadow agreement.
AGREEMENT_SPAN_S = 1800.0
FEEDBACK = "nereid_gateway_feedback_total"


class Agreement(Struct, frozen=True):
    """Requests of a shadow in the half hour that ended `age_s` ago, and how many agreed with the variant."""

    shadow: str
    age_s: float
    requests: int
    agreed: int


class Accuracy(Struct, frozen=True):
    """Feedback about a variant since the gateway's start, and the 95 % interval of the correct fraction."""

    variant: str
    answers: int
    correct: int
    low: float
    high: float


class DriftReport(Struct, frozen=True):
    """Everything about one route; `at` is when the monitor last looked, in Unix time."""

    at: float
    window_s: float
    covered_s: float
    route: RouteDrift
    agreement: tuple[Agreement, ...]
    accuracy: tuple[Accuracy, ...]


def report(folder: Path, route: str, gateways: Sequence[GatewayInfo]) -> DriftReport:
    """Return the report of a route.

    Args:
        gateways: gateways whose feedback counts; those that need a key are left out.

    Raises:
        OperationFailed: the monitor has not polled the route yet.
    """
    try:
        state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=DriftState)
    except FileNotFoundError:
        raise OperationFailed(
            "no drift data yet: the monitor runs a few seconds after the start, then once a minute"
        ) from None
    for drift in state.routes:
        if drift.route == route:
            return DriftReport(
                state.at,
                state.window_s,
                state.covered_s,
                drift,
                tuple(agreement(History.load(folder), route, state.at)),
                tuple(accuracy(gateways, route)),
            )
    raise OperationFailed(f"the drift monitor does not know route '{route}' yet; it polls once a minute")


def agreement(history: History, route: str, now: float) -> list[Agreement]:
    """Return the agreement of each shadow of a route over time, the newest half hour first."""
    prefix = shadow_series(route, "")
    counts: dict[tuple[str, int], Counter[str]] = {}
    for slot in history.slots:
        age = int((now - slot.at) // AGREEMENT_SPAN_S)
        for name, added in slot.increase.items():
            if name.startswith(prefix):
                counts.setdefault((name.removeprefix(prefix), age), Counter()).update(added)
    return [
        Agreement(
            shadow, age * AGREEMENT_SPAN_S, outcomes["agreed"] + outcomes["disagreed"], outcomes["agreed"]
        )
        for (shadow, age), outcomes in sorted(counts.items())
        if outcomes["agreed"] + outcomes["disagreed"]
    ]


def wilson(correct: int, answers: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, 0 to 1; the whole range without an answer.

    Source: Wilson, Journal of the American Statistical Association 22 (1927).
    """
    if not answers:
        return 0.0, 1.0
    share, weight = correct / answers, Z**2 / answers
    middle = share + weight / 2
    spread = Z * math.sqrt(share * (1 - share) / answers + weight / 4 / answers)
    return max(0.0, (middle - spread) / (1 + weight)), min(1.0, (middle + spread) / (1 + weight))


def accuracy(gateways: Sequence[GatewayInfo], route: str) -> list[Accuracy]:
    """Return the accuracy of each variant of a route, from the feedback that the gateways have counted."""
    feedback = Counter[tuple[str, str]]()
    for gateway in gateways:
        with contextlib.suppress(OSError, http.client.HTTPException):  # such as a gateway that needs a key
            text = prometheus_text.fetch(gateway.url, PAGE_TIMEOUT_S)
            samples = MetricSamples.parse(text, (FEEDBACK,), {"model": route})
            for (variant, result), count in samples.sums(FEEDBACK, "variant", "result").items():
                feedback[variant, result] += int(count)
    accuracies = []
    for variant in sorted({variant for variant, _ in feedback}):
        correct = feedback[variant, "correct"]
        answers = correct + feedback[variant, "wrong"]
        accuracies.append(Accuracy(variant, answers, correct, *wilson(correct, answers)))
    return accuracies
