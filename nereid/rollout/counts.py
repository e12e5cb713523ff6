"""The counts of a route's variants on a metrics page, and their growth from one look to the next.

Counters begin anew when a server or a process of the route restarts. A page with a smaller count than the one
before shows that they were reset, and its growth is not counted.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from nereid import metrics_page
from nereid.rollout.evidence import Tally
from nereid.rollout.judge import Look
from nereid.rollout.plan import BOUNDS
from nereid.triton.metrics import ROUTE_PREFIX

# Outcomes that are the fault of a variant. The others are the fault of the caller or of the load.
FAULTS = frozenset({"inference_failed", "deadline_exceeded", "unavailable", "error"})
# Reasons for a variant that the route chooses itself. Callers that name a variant are not a random sample,
# and the requests of one key all go to one variant.
CHANCE, KEY = "weight", "route-key"
ERROR, SLOW, DISAGREEMENT = "error", "slow", "disagreement"
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Counts:
    """All counts of a route since its server started.

    `requests` has the requests by variant, version and whether they failed, of callers that named no variant;
    `drawn` has those of them that chance gave to a variant. `latencies` has the requests by variant, version
    and upper bound in seconds, cumulative as on the page, without those in place of another variant;
    `shadows` has the requests of a shadow by shadow and outcome.
    """

    requests: Mapping[tuple[str, str, bool], int]
    drawn: Mapping[tuple[str, str], int]
    latencies: Mapping[tuple[str, str, float], int]
    shadows: Mapping[tuple[str, str], int]

    def is_continuation_of(self, earlier: "Counts") -> bool:
        """Return whether no count has fallen since an earlier page."""
        return (
            _continues(self.requests, earlier.requests)
            and _continues(self.drawn, earlier.drawn)
            and _continues(self.latencies, earlier.latencies)
            and _continues(self.shadows, earlier.shadows)
        )


def _continues(new: Mapping[Key, int], old: Mapping[Key, int]) -> bool:
    return all(new.get(key, 0) >= count for key, count in old.items())


def read(page: str, route: str) -> Counts:
    """Parse the counts of one route; those of its instances are added."""
    requests = Counter[tuple[str, str, bool]]()
    drawn = Counter[tuple[str, str]]()
    latencies = Counter[tuple[str, str, float]]()
    shadows = Counter[tuple[str, str]]()
    for sample in metrics_page.parse(page):
        labels, value = sample.labels, int(sample.value)
        if labels.get("route") != route:
            continue
        match sample.name.removeprefix(ROUTE_PREFIX):
            case "requests_total" if labels["reason"] in (CHANCE, KEY):
                variant = labels["variant"], labels["version"]
                requests[*variant, labels["outcome"] in FAULTS] += value
                drawn[variant] += value if labels["reason"] == CHANCE else 0
            case "request_duration_seconds_bucket" if labels["outcome"] == "ok" and _is_chosen(labels):
                latencies[labels["variant"], labels["version"], float(labels["le"])] += value
            case "shadow_requests_total":
                shadows[labels["shadow"], labels["outcome"]] += value
    return Counts(requests, drawn, latencies, shadows)


def _is_chosen(labels: Mapping[str, str]) -> bool:
    """Return whether a duration is of the chosen variant; older servers send no such label."""
    return labels.get("chosen") != "false"


@dataclass(frozen=True, slots=True)
class Pair:
    """The two variants that are compared, each by name and version, and the shadow of the candidate."""

    candidate: tuple[str, str]
    control: tuple[str, str]
    shadow: str = ""


def growth(old: Counts, new: Counts, pair: Pair, slow_s: float) -> Look:
    """Return the counts between two pages, of which the second continues the first.

    Args:
        old, new: two pages of one server.
        pair: the variants to compare.
        slow_s: a bucket's upper bound; slower requests count as `slow`.
    """

    def errors(variant: tuple[str, str]) -> Tally:
        good, bad = (
            new.requests.get((*variant, fault), 0) - old.requests.get((*variant, fault), 0)
            for fault in (False, True)
        )
        return Tally(good + bad, bad)

    def latencies(variant: tuple[str, str]) -> list[int]:
        below = [
            new.latencies.get((*variant, bound), 0) - old.latencies.get((*variant, bound), 0)
            for bound in (*BOUNDS, math.inf)
        ]
        return [here - before for here, before in zip(below, [0, *below], strict=False)]

    def slow(variant: tuple[str, str]) -> Tally:
        key = (*variant, slow_s)
        total = sum(latencies(variant))
        return Tally(total, total - new.latencies.get(key, 0) + old.latencies.get(key, 0))

    def shadow(outcome: str) -> int:
        key = (pair.shadow, outcome)
        return new.shadows.get(key, 0) - old.shadows.get(key, 0)

    def drawn(variant: tuple[str, str]) -> int:
        return new.drawn.get(variant, 0) - old.drawn.get(variant, 0)

    agreed, disagreed = shadow("agreed"), shadow("disagreed") + shadow("failed")
    both = pair.candidate, pair.control
    return Look(
        {
            ERROR: (errors(both[0]), errors(both[1])),
            SLOW: (slow(both[0]), slow(both[1])),
            DISAGREEMENT: (Tally(agreed + disagreed, disagreed), Tally(0, 0)),
        },
        (latencies(both[0]), latencies(both[1])),
        (drawn(both[0]), drawn(both[1])),
    )
