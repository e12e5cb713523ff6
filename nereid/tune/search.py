"""The search: successive halving within a deadline, then a duel of the best with the default.

In the duel the default meets itself, too: a gain counts only if it is larger than what that shows (A/A).
"""

import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from nereid.tune.objective import Loads, Objective, median
from nereid.tune.space import DEFAULT, Candidate

# Seconds at each concurrency of the first measurements; every halving doubles what a candidate gets.
FIRST_S, DUEL_S = 1.0, 2.0
# What of the time is kept for the duel, more of it if that gives no rounds enough, and how many those are.
DUEL_SHARE, MOST_DUEL_SHARE = 1 / 3, 0.7
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
# How many candidates are drawn, and what of the search's time goes into a first look at them.
MOST_CANDIDATES, FIRST_SHARE = 32, 1 / 2
RESAMPLES, QUANTILE = 2_000, 0.95

Measure: TypeAlias = Callable[[Candidate, float], Loads]
Round: TypeAlias = dict[Candidate, Loads]


class NotMeasured(Exception):
    """A candidate cannot be served, or fails requests; the message says how."""


@dataclass(frozen=True, slots=True)
class Duel:
    """Rounds in which the default, the default again, and the best candidate were measured in turn."""

    default: Sequence[Loads]
    twin: Sequence[Loads]
    best: Sequence[Loads]

    def default_as_good(self) -> Loads:
        """Return the default's median, with a p99 that it is better than in a quarter of its measurements.

        What it misses by chance it has not missed.
        """
        seen = [*self.default, *self.twin]
        return {
            number: replace(load, p99_ms=sorted(each[number].p99_ms for each in seen)[len(seen) // 4])
            for number, load in median(seen).items()
        }

    def gain(self, objective: Objective) -> float:
        """Return by how much the best is better, 0.1 for 10 %: the median over rounds."""
        return statistics.median(self._ratios(objective, self.best, median(self.best))) - 1

    def noise(self, objective: Objective) -> float:
        """Return how far such a median strays for the default against itself (A/A).

        It is that of as many rounds drawn anew from those measured, in 95 of 100 draws.
        """
        seen, draw = self._ratios(objective, self.twin, self.default_as_good()), random.Random(0)
        strays = sorted(abs(statistics.median(draw.choices(seen, k=len(seen))) - 1) for _ in range(RESAMPLES))
        return strays[int(QUANTILE * RESAMPLES)]

    def _ratios(self, objective: Objective, measured: Sequence[Loads], as_good: Loads) -> list[float]:
        """Compare with the default round by round, each at the concurrency where it counts."""
        at, default_at = (objective.concurrency(each) for each in (as_good, self.default_as_good()))
        pairs = zip(measured, self.default, strict=True)
        return [objective.ratio(one[at], default[default_at]) for one, default in pairs]


@dataclass(slots=True)
class Search:
    """One search, until a deadline that no measurement is begun to miss.

    Args:
        measure: serves a candidate and loads it for so many seconds at each concurrency, or raises
            NotMeasured.
        objective: what is best.
        concurrency_count: at how many a candidate is loaded.
        clock: in seconds.
        deadline_s: by that clock.
        tell: takes lines about the progress.

    `seen` has the last measurement of every candidate, `refused` why one has none.
    """

    measure: Measure
    objective: Objective
    concurrency_count: int
    clock: Callable[[], float]
    deadline_s: float
    tell: Callable[[str], None] = lambda line: None
    seen: dict[Candidate, Loads] = field(default_factory=dict)
    refused: dict[Candidate, str] = field(default_factory=dict)
    # What the last measurements took beside their seconds of load.
    overheads_s: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=4))

    def run(self, draw: Callable[[int], list[Candidate]]) -> tuple[Candidate, Duel]:
        """Search; returns the best candidate, and how it did against the default.

        Args:
            draw: returns so many candidates at most.

        Raises:
            NotMeasured: the default cannot be measured.
        """
        self._try(DEFAULT, FIRST_S)
        if DEFAULT in self.refused:
            raise NotMeasured(self.refused[DEFAULT])
        left_s = self.deadline_s - self.clock()
        needed_s = LEAST_ROUNDS * 3 * self._takes_s(FIRST_S)
        duel_s = min(max(DUEL_SHARE * left_s, needed_s), MOST_DUEL_SHARE * left_s)
        ranked = self._halve(draw(MOST_CANDIDATES), self.deadline_s - duel_s)
        if not ranked:
            return DEFAULT, Duel((), (), ())
        return ranked[0], self._duel(ranked[0])

    def _halve(self, candidates: list[Candidate], until_s: float) -> list[Candidate]:
        """Measure what there is time for, and the better half again for twice as long; best first.

        How long a candidate takes shows only when it is measured: a bad default may take many times as long.
        """
        now_s = self.clock()
        first_s = now_s + FIRST_SHARE * (until_s - now_s)
        ranked = candidates
        for rung in itertools.count():
            rounds, seconds = _budget(rung)
            self.tell(f"{len(ranked)} candidates, {rounds} x {seconds:g} s at each concurrency")
            done = self._rounds(ranked, rounds, seconds, until_s if rung else first_s)
            # One that failed in a later round is out, whatever the earlier ones saw of it.
            sound = [each for each in ranked if each not in self.refused]
            measured = [each for each in sound if done and each in done[0]]
            is_complete = bool(done) and len(measured) == len(sound)
            if rung and not is_complete:
                return sound
            self.seen |= {c: median([each[c] for each in done if c in each]) for c in measured}
            measured.sort(key=lambda candidate: self.objective.rank(self.seen[candidate]))
            ranked = measured[: math.ceil(len(measured) / 2)]
            if len(measured) <= 2:
                return measured
        raise AssertionError  # the loop ends by itself

    def _rounds(
        self, candidates: Sequence[Candidate], count: int, seconds: float, until_s: float
    ) -> list[Round]:
        """Measure all candidates in turn, over and over, every other time backwards.

        A round that there is no time to end is dropped, unless it is the first.
        """
        done: list[Round] = []
        for number in range(count):
            seen: Round = {}
            for candidate in candidates[:: -1 if number % 2 else 1]:
                if self.clock() + self._takes_s(seconds) > until_s:
                    return done or [seen]
                if candidate not in self.refused and (loads := self._try(candidate, seconds)):
                    seen[candidate] = loads
            done.append(seen)
        return done

    def _duel(self, best: Candidate) -> Duel:
        default: list[Loads] = []
        twin: list[Loads] = []
        other: list[Loads] = []
        places = [(DEFAULT, default), (best, other), (DEFAULT, twin)]
        seconds = self._duel_s()
        self.tell(
            f"the best against the default, and that against itself: {seconds:.1f} s at each concurrency"
        )
        for number in range(MOST_ROUNDS):
            if self.clock() + len(places) * self._takes_s(seconds) > self.deadline_s:
                break
            samples = {}
            for place in (number % 3, (number + 1) % 3, (number + 2) % 3):
                samples[place] = self._try(places[place][0], seconds)
            if any(loads is None for loads in samples.values()):
                return Duel((), (), ())
            for place, loads in samples.items():
                places[place][1].append(loads)  # type: ignore[arg-type]
        if default:
            self.seen |= {DEFAULT: median(default), best: median(other)}
        return Duel(default, twin, other)

    def _duel_s(self) -> float:
        """Return for how long to load, so that there is time for rounds enough."""
        rounds = LEAST_ROUNDS + 2
        each_s = (self.deadline_s - self.clock()) / (3 * rounds)
        return min(DUEL_S, max(FIRST_S, (each_s - max(self.overheads_s)) / self.concurrency_count))

    def _takes_s(self, seconds: float) -> float:
        return max(self.overheads_s) + self.concurrency_count * seconds

    def _try(self, candidate: Candidate, seconds: float) -> Loads | None:
        begin_s = self.clock()
        try:
            loads = self.measure(candidate, seconds)
        except NotMeasured as error:
            self.refused[candidate] = str(error)
            self.seen.pop(candidate, None)
            return None
        self.overheads_s.append(self.clock() - begin_s - self.concurrency_count * seconds)
        self.seen.setdefault(candidate, loads)
        return loads


def _budget(rung: int) -> tuple[int, float]:
    """Return rounds, and seconds of each: together twice those of the rung before."""
    return (1, FIRST_S) if rung == 0 else (2, FIRST_S * 2 ** (rung - 1))


def front(seen: Mapping[Candidate, Loads]) -> list[tuple[Candidate, int]]:
    """Return the candidates, each with a concurrency, that nothing beats in both rate and p99."""
    found: list[tuple[Candidate, int]] = []
    points = [(load.rate, load.p99_ms, each, n) for each, loads in seen.items() for n, load in loads.items()]
    least_p99 = float("inf")
    for _, p99_ms, candidate, number in sorted(points, key=lambda point: (-point[0], point[1])):
        if p99_ms < least_p99:
            found.append((candidate, number))
            least_p99 = p99_ms
    return found
