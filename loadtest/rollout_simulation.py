"""The judge of a rollout against simulated traffic: false rollbacks, and requests until a decision.

Each rollout gets the same steps and evaluations as a real one; only the requests are drawn from known
rates. A fixed-size test is evaluated as often, for comparison.

    python -m loadtest.rollout_simulation [--rollouts 10000] [--record rollout_simulation]
"""

import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from loadtest import record
from nereid.base.processes import available_cores
from nereid.models.rollout.judge import EventCount, EventLimit, PairCounts, StepJudge, StepLimits, StepOutcome
from nereid.models.rollout.plan import BOUNDS

# An evaluation has 1,000 requests; a step takes at least 12 evaluations, and is inconclusive after 600.
SHARES = (0.01, 0.05, 0.25, 0.5)
RATE = 1000
MIN_LOOKS = 12
MAX_POLLS = 600
ERROR, SLOW = "error", "slow"
STALL_LOOKS = 5
# Median and spread of the simulated latencies, as of a classifier on a busy CPU, and the objective for them.
MEDIAN_S, SIGMA, SLOW_S = 0.012, 0.5, 0.016
OBJECTIVES = StepLimits(
    (
        EventLimit(ERROR, max_rate=0.05, increase=0.01),
        EventLimit(SLOW, max_rate=1.0, increase=0.1, tolerated=0.05, is_in_blocks=True),
    ),
    max_latency_ratio=1.2,
    risk=0.01 / len(SHARES),
    miss_risk=0.05,
    min_requests=100,
)
# One-sided 1 % of the normal distribution.
FIXED_Z = 2.326
COLUMNS: record.Columns = {
    "candidate": "{candidate}",
    "rollouts": "{rollouts:,}",
    "rolled back": "{rolled_back:.2%}",
    "promoted": "{promoted:.2%}",
    "requests, median": "{median:,}",
    "p95": "{p95:,}",
    "candidate's requests": "{candidates:,}",
    "fixed-size test, rolled back": "{fixed:.1%}",
}


@dataclass(frozen=True, slots=True)
class Service:
    """A simulated variant."""

    error_rate: float
    slower: float = 1.0
    stalled_part: float = 0.0

    @cache  # noqa: B019  # a few services exist, as long as the program
    def buckets(self, is_stalled: bool = False) -> np.ndarray:
        """Return the probability of each latency bucket; stalled requests take twice as long."""
        slower = self.slower * (1 + is_stalled)
        edges = [math.log(bound / (MEDIAN_S * slower)) / SIGMA / math.sqrt(2) for bound in BOUNDS]
        below = np.array([0.0, *((1 + math.erf(edge)) / 2 for edge in edges), 1.0])
        return np.diff(below)


CONTROL = Service(0.005)
CANDIDATES = {
    "equal": CONTROL,
    "equal, both stall 15 % of the time for 5 evaluations": Service(0.005, stalled_part=0.15),
    "+1 percentage point of errors": Service(0.015),
    "+5 percentage points of errors": Service(0.055),
    "+20 % latency": Service(0.005, 1.2),
    "+50 % latency": Service(0.005, 1.5),
}


@dataclass(frozen=True, slots=True)
class End:
    """The end of one rollout: its outcome, its requests, and whether the test with peeking rolled it back."""

    outcome: StepOutcome
    requests: int
    candidate_requests: int
    is_rolled_back_by_fixed: bool


def rollout(candidate: Service, seed: int) -> End:
    """Play one rollout through all steps."""
    rng = np.random.default_rng(seed)
    spent, ours, peeked = 0, 0, False
    totals = np.zeros((2, 2))
    control = Service(CONTROL.error_rate, stalled_part=candidate.stalled_part)
    for share in SHARES:
        step = StepJudge(OBJECTIVES, share, BOUNDS)
        outcome, stalled = StepOutcome.CONTINUE, [0, 0]
        for number in range(MAX_POLLS):
            for index in range(2):
                begins = rng.random() < candidate.stalled_part / STALL_LOOKS
                stalled[index] = STALL_LOOKS if begins else max(0, stalled[index] - 1)
            look, errors = _draw(rng, (candidate, control), stalled, share)
            step.add(look)
            totals += errors
            spent, ours = spent + RATE, ours + int(errors[0, 0])
            peeked = peeked or _fixed(totals)
            outcome = step.verdict(is_over=number + 1 >= MIN_LOOKS).outcome
            if outcome != StepOutcome.CONTINUE:
                break
        if outcome != StepOutcome.PASS:
            return End(outcome, spent, ours, peeked)
    return End(StepOutcome.PASS, spent, ours, peeked)


def _draw(
    rng: np.random.Generator, services: tuple[Service, Service], stalled: list[int], share: float
) -> tuple[PairCounts, np.ndarray]:
    """Return the counts of a look, and requests and errors of both variants."""
    mine = int(rng.binomial(RATE, share))
    ours = _requests(rng, services[0], stalled[0] > 0, mine)
    theirs = _requests(rng, services[1], stalled[1] > 0, RATE - mine)
    look = PairCounts(
        {ERROR: (ours[0], theirs[0]), SLOW: (ours[1], theirs[1])}, (ours[2], theirs[2]), (mine, RATE - mine)
    )
    return look, np.array([[counts[0].requests, counts[0].events] for counts in (ours, theirs)])


def _requests(
    rng: np.random.Generator, service: Service, is_stalled: bool, requests: int
) -> tuple[EventCount, EventCount, list[int]]:
    """Return the errors, the slow requests and the latency buckets of some requests."""
    failed = int(rng.binomial(requests, service.error_rate))
    buckets = rng.multinomial(requests - failed, service.buckets(is_stalled))
    late = int(buckets[BOUNDS.index(SLOW_S) + 1 :].sum())
    return EventCount(requests, failed), EventCount(requests - failed, late), buckets.tolist()


def _fixed(totals: np.ndarray) -> bool:
    """Return whether the ordinary test of two proportions, one-sided at 1 %, rejects."""
    (n1, k1), (n0, k0) = totals
    pooled = (k1 + k0) / (n1 + n0)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / n1 + 1 / n0)) if n1 and n0 else 0.0
    return spread > 0 and (k1 / n1 - k0 / n0) / spread > FIXED_Z


def summarise(name: str, ends: list[End]) -> record.Row:
    """Return the row of one kind of candidate; requests are those until its end."""
    share = [end.outcome for end in ends]
    requests = np.array([end.requests for end in ends])
    return {
        "candidate": name,
        "rollouts": len(ends),
        "rolled_back": share.count(StepOutcome.FAIL) / len(ends),
        "promoted": share.count(StepOutcome.PASS) / len(ends),
        "median": int(np.median(requests)),
        "p95": int(np.percentile(requests, 95)),
        "candidates": int(np.median([end.candidate_requests for end in ends])),
        "fixed": sum(end.is_rolled_back_by_fixed for end in ends) / len(ends),
    }


def main() -> int:
    """Simulate, print and record; exit status 1 if too many equal candidates are rolled back."""
    args = record.parsed(record.parser(__doc__, rollouts=10_000, seed=1))
    rows = []
    with ProcessPoolExecutor(available_cores()) as pool:
        for name, candidate in CANDIDATES.items():
            seeds = range(args.seed, args.seed + args.rollouts)
            rows.append(summarise(name, [*pool.map(partial(rollout, candidate), seeds, chunksize=50)]))
    print(record.table(COLUMNS, rows))
    wrong = rows[0]["rolled_back"]
    return record.finish(
        args.record, {"rows": rows}, [f"{wrong:.2%} equal candidates rolled back"] if wrong > 0.01 else []
    )


if __name__ == "__main__":
    record.end(main)
