"""The search: objective, settings and candidates, then successive halving and a final comparison.

In the final comparison, the default is also measured against itself (A/A). A gain counts only if it exceeds
that noise.
"""

import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from nereid.base.task import AS_MODELS
from nereid.base.task_registry import TASK_BY_BACKEND
from nereid.insight.tune.load_generator import LoadResult
from nereid.insight.tune.profiles import DELAY, INSTANCES, MAX_BATCH_SIZE, PREFERRED, value_of

# The results of one measurement of a candidate, by concurrency.
LoadResults: TypeAlias = Mapping[int, LoadResult]
Kind = Literal["throughput", "latency"]
# One point of the space, in the order of its names; the empty one is the current config.
CandidateSettings: TypeAlias = tuple[tuple[str, int], ...]
Space: TypeAlias = Mapping[str, tuple[int, ...]]
CURRENT_CONFIG: CandidateSettings = ()
DELAYS_US = (0, 500, 2_000, 5_000)
PREFERRED_SIZES = (2, 4, 8, 16)
THREADS, DECODE_THREADS = "intra_op_thread_count", "decode_threads"
# The parameter's name in the config of a network, and of a fused model.
RUN_ROWS = {"onnxruntime": "nereid.run_batch_size", "fused": "run_batch_size"}
# Rows of one run of a network; 0 is the whole batch, or for a fused model its network's setting.
RUN_SIZES = (0, 1, 2, 4, 8)
# `max_batch_size` is never lowered, since clients may rely on it; batches below this size cost throughput.
USUAL_ROWS = 8
# Seconds at each concurrency of the first measurements; every halving doubles the time per candidate.
FIRST_ROUND_S, MAX_FINAL_ROUND_S = 1.0, 2.0
# The fraction of the time for the final comparison, its limit if that share is too short, and the numbers of
# rounds.
FINAL_SHARE, MAX_FINAL_SHARE = 1 / 3, 0.7
MIN_ROUNDS, MAX_ROUNDS = 3, 9
# The number of candidates, and the share of the search's time for their first measurements.
MAX_CANDIDATES, FIRST_SHARE = 32, 1 / 2
RESAMPLES, QUANTILE = 2_000, 0.95
Round: TypeAlias = dict[CandidateSettings, LoadResults]


@dataclass(frozen=True, slots=True)
class Objective:
    """The number that candidates are compared by, subject to a p99 of at most `p99_ms`.

    `throughput` is the highest rate among the concurrencies that meet the p99. `latency` is the median at
    concurrency 1, because in a few seconds a p99 rests on a handful of requests.
    """

    kind: Kind
    p99_ms: float = float("inf")

    def is_met(self, load: LoadResult) -> bool:
        """Return whether the p99 is low enough."""
        return 0 < load.p99_ms <= self.p99_ms

    def concurrency(self, loads: LoadResults) -> int:
        """Return the concurrency that counts: the best with a low p99, else the lowest p99."""
        if self.kind == "latency":
            return min(loads)
        met = [number for number, load in loads.items() if self.is_met(load)]
        if met:
            return max(met, key=lambda number: loads[number].rate)
        return min(loads, key=lambda number: loads[number].p99_ms)

    def rank(self, loads: LoadResults) -> tuple[bool, float]:
        """Return a key that sorts better loads first: by value if the p99 is met, else by the p99."""
        load = loads[self.concurrency(loads)]
        if not self.is_met(load):
            return True, load.p99_ms
        return False, -load.rate if self.kind == "throughput" else load.p50_ms

    def ratio(self, load: LoadResult, other: LoadResult) -> float:
        """Return the factor by which one load is better than another."""
        return load.rate / other.rate if self.kind == "throughput" else other.p50_ms / load.p50_ms

    def __str__(self) -> str:
        name = "images/s at saturation" if self.kind == "throughput" else "p50 at concurrency 1"
        return name + (f", p99 <= {self.p99_ms:g} ms" if self.p99_ms < float("inf") else "")


def median(measured: Sequence[LoadResults]) -> LoadResults:
    """Return the median over measurements, separately for each number."""
    medians = {}
    for concurrency in measured[0]:
        columns = zip(*(astuple(loads[concurrency]) for loads in measured), strict=True)
        medians[concurrency] = LoadResult(*map(statistics.median, columns))
    return medians


def space(config: Any, backend: str, cores: int) -> Space:
    """Return the values of each setting that takes effect.

    Args:
        backend: the model's backend. A `fused` model has the settings of both its parts.
    """
    settings: dict[str, tuple[int, ...]] = {}
    if len(config.instance_group) <= 1:
        settings[INSTANCES] = tuple(sorted({*_doublings(cores), cores, cores + max(1, cores // 2)}))
    is_on_cpu = all(group.kind != group.KIND_GPU for group in config.instance_group)
    if is_on_cpu and _runs_networks(config, backend):
        settings[THREADS] = _doublings(cores)
    if is_on_cpu and backend == "preprocess":
        settings[DECODE_THREADS] = _doublings(cores)
    if config.max_batch_size and not config.HasField("sequence_batching"):
        smallest = max(config.max_batch_size, USUAL_ROWS)
        settings[MAX_BATCH_SIZE] = tuple(sorted({config.max_batch_size, smallest, 2 * smallest}))
        settings[PREFERRED] = PREFERRED_SIZES
        settings[DELAY] = DELAYS_US
        if is_on_cpu and backend in RUN_ROWS:
            settings[RUN_ROWS[backend]] = RUN_SIZES
    settings = {name: tuple(sorted({*values, value_of(config, name)})) for name, values in settings.items()}
    if PREFERRED in settings:  # without a preferred size, Triton prefers the largest batch
        settings[PREFERRED] = tuple(value for value in settings[PREFERRED] if value)
    return settings


def _runs_networks(config: Any, backend: str) -> bool:
    """Return whether the model runs networks in its own processes."""
    if backend in RUN_ROWS:
        return True
    task_backend = TASK_BY_BACKEND[backend].backend if backend in TASK_BY_BACKEND else None
    location = task_backend.networks if task_backend else ""
    if location and "networks" in config.parameters:
        location = config.parameters["networks"].string_value
    return bool(location) and location != AS_MODELS


def _doublings(limit: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(limit.bit_length()))


def points(space: Space, cores: int) -> Iterator[CandidateSettings]:
    """Yield all sensible points of the grid."""
    for values in itertools.product(*space.values()):
        candidate = tuple(zip(space, values, strict=True))
        if is_sensible(candidate, cores):
            yield candidate


def is_sensible(candidate: CandidateSettings, cores: int) -> bool:
    """Return whether a point is worth a measurement: not too many threads, and possible batches."""
    value = dict(candidate)
    threads = value.get(INSTANCES, 1) * value.get(THREADS, 1) * value.get(DECODE_THREADS, 1)
    return threads <= 2 * max(cores, value.get(INSTANCES, 1)) and (
        value.get(PREFERRED, 0) <= value.get(MAX_BATCH_SIZE, 0)
    )


def settings_of(space: Space, config: Any) -> CandidateSettings:
    """Return the point of the space that a config has."""
    return tuple((name, value_of(config, name)) for name in space)


def sample(
    grid: Sequence[CandidateSettings], space: Space, count: int, seed: int, without: CandidateSettings
) -> list[CandidateSettings]:
    """Draw candidates in which the values of each setting occur about equally often."""
    draw, left = random.Random(seed), {*grid} - {without}
    columns = [_shuffle(draw, values, 4 * count) for values in space.values()]
    balanced = [tuple(zip(space, row, strict=True)) for row in zip(*columns, strict=True)]
    rest = draw.sample(sorted(left), len(left))
    return [candidate for candidate in dict.fromkeys([*balanced, *rest]) if candidate in left][:count]


def _shuffle(draw: random.Random, values: Sequence[int], length: int) -> list[int]:
    """Repeat the values in random orders, so that each part of the column has every value about once."""
    column: list[int] = []
    while len(column) < length:
        column += draw.sample(values, len(values))
    return column[:length]


class NotMeasured(Exception):
    """A candidate cannot be loaded, or fails requests; the message says why."""


@dataclass(frozen=True, slots=True)
class FinalComparison:
    """Rounds in which the default, the default again, and the best candidate were measured in turn."""

    default: Sequence[LoadResults]
    default_repeat: Sequence[LoadResults]
    best: Sequence[LoadResults]

    def lenient_default(self) -> LoadResults:
        """Return the default's median, with the lower quartile of its p99.

        Missing the p99 by chance does not disqualify the default.
        """
        runs = [*self.default, *self.default_repeat]
        return {
            number: replace(load, p99_ms=sorted(loads[number].p99_ms for loads in runs)[len(runs) // 4])
            for number, load in median(runs).items()
        }

    def gain(self, objective: Objective) -> float:
        """Return the gain of the best candidate, 0.1 for 10 %: the median over rounds."""
        return statistics.median(self._ratios(objective, self.best, median(self.best))) - 1

    def noise(self, objective: Objective) -> float:
        """Return the deviation of the median gain of the default against itself (A/A).

        The rounds are resampled; the deviation is the 95th percentile over the resamples.
        """
        ratios, draw = self._ratios(objective, self.default_repeat, self.lenient_default()), random.Random(0)
        deviations = sorted(
            abs(statistics.median(draw.choices(ratios, k=len(ratios))) - 1) for _ in range(RESAMPLES)
        )
        return deviations[int(QUANTILE * RESAMPLES)]

    def _ratios(
        self, objective: Objective, measured: Sequence[LoadResults], typical: LoadResults
    ) -> list[float]:
        """Compare with the default round by round, each at the concurrency at which it counts."""
        at, default_at = (objective.concurrency(loads) for loads in (typical, self.lenient_default()))
        pairs = zip(measured, self.default, strict=True)
        return [objective.ratio(result[at], default[default_at]) for result, default in pairs]


@dataclass(slots=True)
class Search:
    """One search, which starts no measurement that would miss the deadline.

    Args:
        measure: serves a candidate and loads it for a number of seconds at each concurrency, or raises
            NotMeasured.
        concurrency_count: the number of concurrencies at which a candidate is loaded.

    `seen` holds the last measurement of each candidate, `failures` the reason why a candidate has none.
    """

    measure: Callable[[CandidateSettings, float], LoadResults]
    objective: Objective
    concurrency_count: int
    clock: Callable[[], float]
    deadline: float
    report: Callable[[str], None] = lambda line: None
    seen: dict[CandidateSettings, LoadResults] = field(default_factory=dict)
    failures: dict[CandidateSettings, str] = field(default_factory=dict)
    # Time that the last measurements took beyond their seconds of load.
    overheads_s: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=4))

    def run(self, candidates: Sequence[CandidateSettings]) -> tuple[CandidateSettings, FinalComparison]:
        """Search for the best candidate; return it with its final comparison with the default.

        Raises:
            NotMeasured: the default cannot be measured.
        """
        self._try(CURRENT_CONFIG, FIRST_ROUND_S)
        if CURRENT_CONFIG in self.failures:
            raise NotMeasured(self.failures[CURRENT_CONFIG])
        remaining_s = self.deadline - self.clock()
        needed_s = MIN_ROUNDS * 3 * self._takes_s(FIRST_ROUND_S)
        final_s = min(max(FINAL_SHARE * remaining_s, needed_s), MAX_FINAL_SHARE * remaining_s)
        ranked = self._halve(candidates, self.deadline - final_s)
        if not ranked:
            return CURRENT_CONFIG, FinalComparison((), (), ())
        return ranked[0], self._run_final_comparison(ranked[0])

    def _halve(self, candidates: Sequence[CandidateSettings], deadline: float) -> list[CandidateSettings]:
        """Measure the candidates, then the better half again for twice as long; return the best first.

        The time of a measurement is unknown in advance: a bad default may be far slower than the others.
        """
        now_s = self.clock()
        first_deadline = now_s + FIRST_SHARE * (deadline - now_s)
        ranked = candidates
        for rung in itertools.count():
            rounds, seconds = _budget(rung)
            self.report(f"{len(ranked)} candidates, {rounds} x {seconds:g} s at each concurrency")
            done = self._rounds(ranked, rounds, seconds, deadline if rung else first_deadline)
            # A candidate that failed in a later round is out, even if its earlier rounds were good.
            sound = [c for c in ranked if c not in self.failures]
            measured = [c for c in sound if c in done[0]]
            if rung and len(measured) < len(sound):
                return sound
            self.seen |= {c: median([loads[c] for loads in done if c in loads]) for c in measured}
            measured.sort(key=lambda candidate: self.objective.rank(self.seen[candidate]))
            ranked = measured[: math.ceil(len(measured) / 2)]
            if len(measured) <= 2:
                return measured
        raise AssertionError  # the loop ends on its own

    def _rounds(
        self, candidates: Sequence[CandidateSettings], count: int, seconds: float, deadline: float
    ) -> list[Round]:
        """Measure all candidates in rounds, every other round in reverse order.

        A round without enough time is dropped, unless it is the first.
        """
        done: list[Round] = []
        for number in range(count):
            measured: Round = {}
            for candidate in candidates[:: -1 if number % 2 else 1]:
                if self.clock() + self._takes_s(seconds) > deadline:
                    return done or [measured]
                if candidate not in self.failures and (loads := self._try(candidate, seconds)):
                    measured[candidate] = loads
            done.append(measured)
        return done

    def _run_final_comparison(self, best: CandidateSettings) -> FinalComparison:
        candidates = (CURRENT_CONFIG, best, CURRENT_CONFIG)
        rounds: list[dict[int, LoadResults]] = []
        seconds = self._final_round_s()
        self.report(
            "the best candidate against the default, and the default against itself: "
            f"{seconds:.1f} s at each concurrency"
        )
        for number in range(MAX_ROUNDS):
            if self.clock() + len(candidates) * self._takes_s(seconds) > self.deadline:
                break
            order = (number % 3, (number + 1) % 3, (number + 2) % 3)
            measured = {index: loads for index in order if (loads := self._try(candidates[index], seconds))}
            if len(measured) < len(candidates):
                return FinalComparison((), (), ())
            rounds.append(measured)
        default, challenger, default_repeat = ([loads[index] for loads in rounds] for index in range(3))
        if rounds:
            self.seen |= {CURRENT_CONFIG: median(default), best: median(challenger)}
        return FinalComparison(default, default_repeat, challenger)

    def _final_round_s(self) -> float:
        """Return the load duration in seconds that leaves time for enough rounds."""
        rounds = MIN_ROUNDS + 2
        each_s = (self.deadline - self.clock()) / (3 * rounds)
        return min(
            MAX_FINAL_ROUND_S, max(FIRST_ROUND_S, (each_s - max(self.overheads_s)) / self.concurrency_count)
        )

    def _takes_s(self, seconds: float) -> float:
        return max(self.overheads_s) + self.concurrency_count * seconds

    def _try(self, candidate: CandidateSettings, seconds: float) -> LoadResults | None:
        started_at = self.clock()
        try:
            loads = self.measure(candidate, seconds)
        except NotMeasured as error:
            self.failures[candidate] = str(error)
            self.seen.pop(candidate, None)
            return None
        self.overheads_s.append(self.clock() - started_at - self.concurrency_count * seconds)
        self.seen.setdefault(candidate, loads)
        return loads


def _budget(rung: int) -> tuple[int, float]:
    """Return rounds and seconds of each; together they are twice the previous rung's."""
    return (1, FIRST_ROUND_S) if rung == 0 else (2, FIRST_ROUND_S * 2 ** (rung - 1))


def pareto_front(results: Mapping[CandidateSettings, LoadResults]) -> list[tuple[CandidateSettings, int]]:
    """Return the Pareto front: candidates and concurrencies that none beats in both rate and p99."""
    front: list[tuple[CandidateSettings, int]] = []
    points = [(load.rate, load.p99_ms, c, n) for c, loads in results.items() for n, load in loads.items()]
    lowest_p99 = float("inf")
    for _, p99_ms, candidate, number in sorted(points, key=lambda point: (-point[0], point[1])):
        if p99_ms < lowest_p99:
            front.append((candidate, number))
            lowest_p99 = p99_ms
    return front
