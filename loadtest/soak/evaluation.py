"""The evaluation of a soak: its verdicts and its record."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.soak.observation import SERVER, Quiet, Sample, lasting
from loadtest.soak.traffic import Tally
from loadtest.soak.verdict import MIN_SAMPLES, Verdict, absent, growth, not_more, thinned, trend
from nereid.routing.assignment import ROUTE_THREADS

# The numbers of a process tree that are compared before and after.
COUNTED = {"open_files": "open files", "threads": "threads", "processes": "processes"}
# Growth that counts as none, in the whole time without changes; and the memory that one round of changes may
# keep. Triton 24.10 keeps about 0.13 MB of each load, and a round has several.
MIN_GROWTH_MB, MAX_CHARGE_MB = 1.0, 1.0
# A route starts the threads of its pool when they are first needed.
ALLOWED_MORE = {(SERVER, "threads"): ROUTE_THREADS}


@dataclass(frozen=True, slots=True)
class Outcome:
    """All observations of a soak.

    `samples` are of the measured part, `steady` those before all changes, and `calm` those between changes.
    `rounds` is the number of rounds of changes from the first to the last calm sample. `trouble` has the
    reasons of missing observations, such as those `after` the soak.
    """

    tallies: Sequence[Tally]
    samples: Sequence[Sample]
    steady: Sequence[Sample]
    calm: Sequence[Sample]
    rounds: int
    before: Quiet
    after: Quiet | None
    left_over: frozenset[str]
    changes: dict[str, int]
    busy: float
    trouble: Sequence[str]


def calm(samples: Sequence[Sample], spans: Sequence[tuple[float, float]]) -> list[Sample]:
    """Return the samples within some spans."""
    return [each for each in samples if any(begin <= each.at_s <= end for begin, end in spans)]


def judge(outcome: Outcome, share: float) -> list[Verdict]:
    """Return the verdicts of a soak; after trouble, those of the available observations."""
    zombies = lasting(outcome.samples) | {pid for last in outcome.samples[-1:] for pid, _ in last.zombies}
    verdicts = [
        absent("wrong outcomes", sum(each.wrong for each in outcome.tallies)),
        absent("kinds sent too rarely", [each.kind.name for each in outcome.tallies if each.is_starved]),
        absent("zombies", sorted(zombies)),
        absent("shared memory regions, after the server", sorted(outcome.left_over)),
    ]
    if len(outcome.steady) >= MIN_SAMPLES or not outcome.trouble:
        verdicts += _memory(outcome.steady, share)
    if outcome.rounds and (len(outcome.calm) >= MIN_SAMPLES or not outcome.trouble):
        verdicts += _charges(outcome.calm, outcome.rounds)
    if outcome.after:
        verdicts += _left(outcome.before, outcome.after)
    return verdicts


def _memory(samples: Sequence[Sample], share: float) -> Iterator[Verdict]:
    """Judge each process that ran at the start and at the end; without changes, none may grow."""
    names = sorted(samples[0].memory.keys() & samples[-1].memory.keys()) if samples else []
    if not names:
        raise ValueError("memory: expected samples of processes, got none; fix: a longer soak")
    for name in names:
        found = [(each.at_s / 60, each.memory[name] / 1e6) for each in samples if name in each.memory]
        minutes, megabytes = zip(*found, strict=True)
        yield growth(f"memory, {name}", "MB", minutes, megabytes, share, MIN_GROWTH_MB)


def _charges(samples: Sequence[Sample], rounds: int) -> Iterator[Verdict]:
    """Judge the memory that each round of changes keeps."""
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"changes: expected {MIN_SAMPLES} samples, got {len(samples)}; fix: a longer soak")
    minutes = [(each.at_s - samples[0].at_s) / 60 for each in samples]
    for tree in samples[0].usage:
        found = trend(minutes, [each.usage[tree].memory_bytes / 1e6 for each in samples])
        charge, least = (slope * minutes[-1] / rounds for slope in (found.slope, found.low))
        is_good = least <= 0 or charge <= MAX_CHARGE_MB
        yield Verdict(
            f"memory per round of changes, {tree}", "MB", 0, round(charge, 2), MAX_CHARGE_MB, is_good
        )


def _left(before: Quiet, after: Quiet) -> Iterator[Verdict]:
    for tree, usage in before.usage.items():
        for field, name in COUNTED.items():
            counts = getattr(usage, field), getattr(after.usage[tree], field)
            yield not_more(f"{name}, {tree}", *counts, ALLOWED_MORE.get((tree, field), 0))
    yield not_more("shared memory regions", len(before.regions), len(after.regions))
    yield absent("registered regions", after.registered)
    for name, value in after.gauges.items():
        yield absent(f"`{name}`", value)
    yield absent("repairs and restarts by the supervisor", after.repairs)


def result(outcome: Outcome, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the record of a soak."""
    samples = thinned(outcome.samples)
    return {
        "busy_cores": round(outcome.busy, 2),
        "changes": outcome.changes,
        "requests": sum(each.sent for each in outcome.tallies),
        "rows": [asdict(each) for each in verdicts],
        "traffic": [
            {"kind": each.kind.name, "is_good": each.kind.is_good, "sent": each.sent, "wrong": each.wrong}
            for each in outcome.tallies
        ],
        "series": {
            "seconds": [round(each.at_s - samples[0].at_s, 1) for each in samples],
            "is_steady": [each in outcome.steady for each in samples],
            "is_calm": [each in outcome.calm for each in samples],
            **{
                f"{name} memory": [each.memory.get(name) for each in samples]
                for name in sorted({name for each in samples[:1] for name in each.memory})
            },
            **{
                f"{tree} {field}": [getattr(each.usage[tree], field) for each in samples]
                for tree in outcome.before.usage
                for field in ("memory_bytes", *COUNTED)
            },
        },
    }
