"""The verdict: outcomes of requests, growth of memory, and what is left."""

import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from loadtest import record
from loadtest.torture.observation import Sample
from loadtest.torture.traffic import Tally
from nereid.backends.routing.assignment import ROUTE_THREADS

MIN_SAMPLES, PARTS = 8, 5
# The growth that counts as none in the whole time without changes, as a share of the memory and at least so
# much; and the memory that one round of changes may keep. Triton 24.10 keeps about 0.13 MB of each load, and
# a round has several.
SHARE, MIN_GROWTH_MB, MAX_KEPT_MB = 0.01, 1.0, 1.0
# A route starts the threads of its pool when they are first needed.
ALLOWED_MORE = {"threads, server": ROUTE_THREADS}
MEMORY, IN_ALL = "memory, ", "memory in all, "
COLUMNS: record.Columns = {
    "measure": "{what}",
    **{name: f"{{{name}:.1f}} MB" for name in ("start", "end", "bound")},
    "verdict": lambda row: "kept" if row["is_good"] else "**failed**",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One verdict: start, end and bound of a number."""

    what: str
    start: float
    end: float
    bound: float
    is_good: bool

    def text(self) -> str:
        """Return the verdict in one line."""
        return f"{self.what}: expected at most {self.bound:g}, got {self.end:g} (before: {self.start:g})"


def judge_traffic(tallies: Sequence[Tally], may_fail: bool) -> Iterator[Verdict]:
    """Judge all outcomes; requests may fail because of faults, but a wrong outcome is never allowed."""
    yield absent("wrong outcomes", [fault for tally in tallies for fault in tally.wrong])
    yield absent("kinds without a right outcome", [tally.kind.name for tally in tallies if not tally.right])
    if not may_fail:
        yield absent("failed requests", [failure.text for tally in tallies for failure in tally.failed])
        starved = [tally.kind.name for tally in tallies if 4 * tally.right < tally.due]
        yield absent("kinds sent too rarely", starved)


def judge_memory(steady: Sequence[Sample], calm: Sequence[Sample], rounds: int) -> Iterator[Verdict]:
    """Judge the growth of each process without changes, and what changes keep in each process tree.

    Args:
        steady: samples before all changes.
        calm: samples between changes.
        rounds: the number of rounds of changes from the first to the last calm sample.

    Raises:
        ValueError: there are too few samples.
    """
    if len(steady) < MIN_SAMPLES:
        raise ValueError(f"expected {MIN_SAMPLES} samples, got {len(steady)}; fix: a longer soak")
    for name in sorted(name for name in steady[0] if name.startswith(MEMORY) and name in steady[-1]):
        values = [sample[name] for sample in steady if name in sample]
        yield grown(name, values, max(SHARE * statistics.median(values), MIN_GROWTH_MB))
    for name in sorted(name for name in steady[0] if name.startswith(IN_ALL) and rounds):
        values = [sample[name] for sample in calm]
        yield grown(f"{name}, {rounds} rounds of changes", values, MAX_KEPT_MB * rounds)


def grown(what: str, values: Sequence[float], allowed: float) -> Verdict:
    """Compare the medians of the first and the last part of a series, in MB.

    Growth is certain only if the parts differ by more than their noise: by the quarters that are nearest.
    """
    part = max(2, len(values) // PARTS)
    first, last = sorted(values[:part]), sorted(values[-part:])
    start, end = statistics.median(first), statistics.median(last)
    is_certain = last[part // 4] > first[-1 - part // 4]
    return Verdict(what, start, end, start + allowed, not (is_certain and end > start + allowed))


def judge_quiet(before: Sample, after: Sample) -> Iterator[Verdict]:
    """Judge the counts that traffic and changes leave in running processes: none may grow."""
    for name, count in sorted(before.items()):
        bound = count + ALLOWED_MORE.get(name, 0)
        yield Verdict(name, count, after[name], bound, after[name] <= bound)


def absent(what: str, found: Collection[object]) -> Verdict:
    """Judge a collection that must be empty; the verdict shows its first members."""
    names = ", ".join(map(str, list(found)[:3]))
    return Verdict(f"{what} ({names})" if names else what, 0, len(found), 0, not found)
