"""What a rollout counts: the requests of candidate and control, and those of the candidate's shadow."""

import math
from dataclasses import dataclass

from nereid.backends.triton.metrics import ROUTE_PREFIX
from nereid.base.metrics_page import BUCKET, Snapshot
from nereid.models.rollout.evidence import Tally
from nereid.models.rollout.judge import Look
from nereid.models.rollout.plan import BOUNDS

# Outcomes that are the fault of a variant. The others are the fault of the caller or of the load.
FAULTS = frozenset({"inference_failed", "deadline_exceeded", "unavailable", "error"})
# Reasons for a variant that the route chooses itself. Callers that name a variant are not a random sample,
# and the requests of one key all go to one variant.
CHANCE, KEY = "weight", "route-key"
ERROR, SLOW, DISAGREEMENT = "error", "slow", "disagreement"
REQUESTS, SHADOWS = f"{ROUTE_PREFIX}requests_total", f"{ROUTE_PREFIX}shadow_requests_total"
DURATIONS = f"{ROUTE_PREFIX}request_duration_seconds"
COUNTERS = (REQUESTS, SHADOWS, DURATIONS + BUCKET)


@dataclass(frozen=True, slots=True)
class Pair:
    """The two variants that are compared, each by name and version, and the shadow of the candidate."""

    candidate: tuple[str, str]
    control: tuple[str, str]
    shadow: str = ""


def look(growth: Snapshot, pair: Pair, slow_s: float) -> Look:
    """Return the counts of a rollout.

    Args:
        growth: of the route's counters.
        pair: the variants to compare.
        slow_s: a bucket's upper bound; slower requests count as `slow`.
    """
    ours, theirs = (_Counts.of(growth, each, slow_s) for each in (pair.candidate, pair.control))
    labels = {"shadow": pair.shadow}
    agreed = int(growth.total(SHADOWS, labels | {"outcome": "agreed"}))
    disagreed = int(growth.total(SHADOWS, {**labels, "outcome": ("disagreed", "failed")}))
    return Look(
        {
            ERROR: (ours.errors, theirs.errors),
            SLOW: (ours.slow, theirs.slow),
            DISAGREEMENT: (Tally(agreed + disagreed, disagreed), Tally(0, 0)),
        },
        (ours.latencies, theirs.latencies),
        (ours.drawn, theirs.drawn),
    )


@dataclass(frozen=True, slots=True)
class _Counts:
    """The counts of one variant, without callers that named it and without requests for another variant."""

    errors: Tally
    slow: Tally
    latencies: list[int]
    drawn: int

    @classmethod
    def of(cls, growth: Snapshot, variant: tuple[str, str], slow_s: float) -> "_Counts":
        labels = dict(zip(("variant", "version"), variant, strict=True))
        chosen = {**labels, "reason": (CHANCE, KEY)}
        # Older servers send no label `chosen`.
        found = growth.buckets(DURATIONS, labels=labels | {"outcome": "ok"}, without={"chosen": "false"})
        buckets = {bound: int(found.get((), {}).get(bound, 0)) for bound in (*BOUNDS, math.inf)}
        slow = sum(count for bound, count in buckets.items() if bound > slow_s)
        return cls(
            Tally(
                int(growth.total(REQUESTS, chosen)),
                int(growth.total(REQUESTS, {**chosen, "outcome": FAULTS})),
            ),
            Tally(sum(buckets.values()), slow),
            list(buckets.values()),
            int(growth.total(REQUESTS, labels | {"reason": CHANCE})),
        )
