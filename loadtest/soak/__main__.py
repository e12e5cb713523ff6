"""Serve for minutes under mixed traffic and changes, and fail on anything that is left of it.

`nereid serve` and `nereid gateway` get good and bad requests of many kinds, each with the answer that it must
have, while versions are published and retired, weights change and models are loaded again. It fails on a
wrong answer, on memory that grows, on open files, threads, processes and shared memory that are left, on
zombies, and on anything that the supervisor had to mend.

    python -m loadtest.soak [--minutes 20]
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest import ending, photos, processes, record, servers
from loadtest.soak import bad, good, verdict
from loadtest.soak.changes import Changes
from loadtest.soak.good import Photo
from loadtest.soak.traffic import Kind, Tally, Target, Traffic
from loadtest.soak.verdict import FEWEST, Verdict, grown, kept, none
from loadtest.soak.watch import LOOK_S, SERVER, Quiet, Sample, Sampler, Watch, lasting
from loadtest.swap import References
from ops import embedded
from python_backend.routing import MOST_CALLS

# The largest part of what a tree takes that it may grow by; see docs/soak.md.
SHARE = 0.01
# Between two rounds of changes, and before what they leave behind at once has gone.
CALM_S, WARMING_CALM_S, SETTLING_S = (6.0, 20.0), 1.0, 2.0
CYCLES, SAMPLES, LEAST_PERIOD_S = 40, 200, 0.4
WARM_UP, WARM_UP_S = 0.1, (5.0, 120.0)
# What is counted of a tree before and after.
COUNTED = {"open_files": "open files", "threads": "threads", "processes": "processes"}
# A route starts the threads of its pool as they are first needed.
MAY_COME = {(SERVER, "threads"): MOST_CALLS}
MOST_TOLD = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to soak, and by how much memory may grow."""

    minutes: float
    share: float = SHARE

    @property
    def seconds(self) -> float:
        """How long is measured."""
        return self.minutes * 60

    @property
    def warm_up_s(self) -> float:
        """How long traffic flows before."""
        return _within(self.seconds * WARM_UP, WARM_UP_S)

    @property
    def calm_s(self) -> float:
        """How long nothing changes between two rounds of changes."""
        return _within(self.seconds / CYCLES, CALM_S)

    @property
    def period_s(self) -> float:
        """How long from one sample to the next."""
        return max(LEAST_PERIOD_S, self.seconds / SAMPLES)


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a soak has shown; `samples` are of the measured part, `calm` those while nothing changed."""

    tallies: Sequence[Tally]
    samples: Sequence[Sample]
    calm: Sequence[Sample]
    before: Quiet
    after: Quiet
    left_over: frozenset[str]
    changes: dict[str, int]
    busy: float
    trouble: Sequence[str]


def soak(repository: Path, folder: Path, plan: Plan) -> Outcome:
    """Serve a repository, and have it asked and changed for as long as planned."""
    prefix = f"soak-{os.getpid()}-"
    words = ["--allow-shm", "--", f"--backend-config=python,shm-region-prefix-name={prefix}"]
    with (
        servers.supervised(repository, folder, os.environ, words) as running,
        servers.gateway(running.record.ports.grpc) as gateway,
    ):
        watch = Watch(running, gateway.pid, gateway.port, prefix)
        scene = Scene.of(running, gateway, folder)
        warming, _ = replace(scene, kinds=[kind.warming() for kind in scene.kinds]).play(
            plan.warm_up_s, WARMING_CALM_S
        )
        before = watch.quiet()
        cpu_s, began_s = processes.cpu_s(running.pid), time.monotonic()
        with Sampler(watch.sample, plan.period_s) as sampler:
            tallies, spans = scene.play(plan.seconds, plan.calm_s, sampler.has)
        busy = (processes.cpu_s(running.pid) - cpu_s) / (time.monotonic() - began_s)
        after = watch.quiet()
    return Outcome(
        tallies,
        sampler.samples,
        calm(sampler.samples, spans),
        before,
        after,
        watch.regions(),
        scene.changes.counts,
        busy,
        [*filter(None, [sampler.failure]), *(told for each in warming for told in each.told)],
    )


@dataclass(frozen=True, slots=True)
class Scene:
    """Who asks what of whom, and what changes meanwhile."""

    kinds: Sequence[Kind]
    target: Target
    changes: Changes

    @classmethod
    def of(cls, running: servers.Supervised, gateway: servers.Gateway, folder: Path) -> "Scene":
        """Make the photos and what is published, and know what each version answers."""
        files = {name: photos.jpeg(size_wh) for name, size_wh in photos.SIZES_WH.items()}
        known = {name: Photo(file, References(running.repository, file)) for name, file in files.items()}
        record = running.record
        return cls(
            [*good.kinds(known), *bad.kinds(files[good.LARGE])],
            Target(record.url("http"), record.url("grpc"), f"127.0.0.1:{gateway.port}"),
            Changes(running, folder, [each.references for each in known.values()]),
        )

    def play(
        self, seconds: float, calm_s: float, has_enough: Callable[[float], bool] = lambda since_s: True
    ) -> tuple[list[Tally], list[tuple[float, float]]]:
        """Ask for so long, and change things every `calm_s`; returns what came of it, and the calm spans.

        The last span goes on until it `has_enough` samples: a machine may be slow.
        """
        spans = []
        with Traffic(self.kinds, self.target) as traffic:
            deadline = time.monotonic() + seconds
            while True:
                began_s = time.monotonic()
                time.sleep(calm_s)
                is_last = time.monotonic() > deadline
                while is_last and not has_enough(began_s + SETTLING_S):
                    time.sleep(LOOK_S)
                spans.append((began_s + SETTLING_S, time.monotonic()))
                if is_last:
                    break
                self.changes.cycle()
        return traffic.tallies, spans


def calm(samples: Sequence[Sample], spans: Sequence[tuple[float, float]]) -> list[Sample]:
    """Return the samples of these spans."""
    return [each for each in samples if any(begin <= each.at_s <= end for begin, end in spans)]


def judge(outcome: Outcome, share: float) -> list[Verdict]:
    """Return all judgements of a soak."""
    before, after = outcome.before, outcome.after
    minutes = [(each.at_s - outcome.samples[0].at_s) / 60 for each in outcome.calm]
    memory = [
        grown(
            f"memory, {tree}",
            "MB",
            minutes,
            [each.usage[tree].memory_bytes / 1e6 for each in outcome.calm],
            share,
        )
        for tree in before.usage
    ]
    counts = [
        kept(
            f"{name}, {tree}",
            getattr(before.usage[tree], field),
            getattr(after.usage[tree], field),
            MAY_COME.get((tree, field), 0),
        )
        for tree in before.usage
        for field, name in COUNTED.items()
    ]
    zombies = lasting(outcome.samples) | {pid for pid, _ in outcome.samples[-1].zombies}
    return [
        none("requests not as they must be", sum(each.wrong for each in outcome.tallies)),
        none("kinds sent too rarely", [each.kind.name for each in outcome.tallies if each.is_starved]),
        *memory,
        *counts,
        none("zombies", sorted(zombies)),
        kept("shared memory regions", len(before.regions), len(after.regions)),
        none("shared memory regions, after the server", sorted(outcome.left_over)),
        none("regions that the server was told of", after.registered),
        *(none(f"`{name}`", value) for name, value in after.gauges.items()),
        none("repairs and restarts by the supervisor", after.repairs),
    ]


def result(outcome: Outcome, verdicts: Sequence[Verdict], plan: Plan) -> dict[str, Any]:
    """Return what is recorded of a soak."""
    first_s = outcome.samples[0].at_s
    thinned = outcome.samples[:: -(-len(outcome.samples) // SAMPLES)]
    return {
        "minutes": plan.minutes,
        "share": plan.share,
        "busy_cores": round(outcome.busy, 2),
        "changes": outcome.changes,
        "requests": sum(each.sent for each in outcome.tallies),
        "rows": [verdict.as_row(each) for each in verdicts],
        "traffic": [
            {"kind": each.kind.name, "is_good": each.kind.is_good, "sent": each.sent, "wrong": each.wrong}
            for each in outcome.tallies
        ],
        "series": {
            "seconds": [round(each.at_s - first_s, 1) for each in thinned],
            "is_calm": [each in outcome.calm for each in thinned],
            **{
                f"{tree} {field}": [getattr(each.usage[tree], field) for each in thinned]
                for tree in outcome.before.usage
                for field in ("memory_bytes", "open_files", "threads", "processes")
            },
        },
    }


def main() -> int:
    """Soak, print, record; exit status 1 if anything has failed."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="how long is measured")
    parser.add_argument("--share", type=float, default=SHARE, help="of its memory, how much a tree may grow")
    parser.add_argument("--repository", type=Path, default=embedded.REPOSITORY, help="a copy of it is served")
    parser.add_argument("--record", default="", help="store the result as loadtest/results/NAME.json")
    args = parser.parse_args()
    if args.record and not record.is_committed():
        parser.error(record.UNCOMMITTED)
    plan = Plan(args.minutes, args.share)
    with ending.tidy(), tempfile.TemporaryDirectory() as scratch:
        repository = shutil.copytree(args.repository, Path(scratch) / "models")
        (run := Path(scratch) / "run").mkdir()
        outcome = soak(repository, run, plan)
    if outcome.trouble and len(outcome.calm) < FEWEST:
        print(*(f"failed: {each}" for each in outcome.trouble), sep="\n", file=sys.stderr)
        return 1
    verdicts = judge(outcome, plan.share)
    found = result(outcome, verdicts, plan)
    print(verdict.traffic_markdown(found["traffic"]))
    print(verdict.markdown(found["rows"]))
    if args.record:
        record.write(args.record, found)
    failures = [*(each.told() for each in verdicts if not each.is_good), *outcome.trouble]
    failures += [told for each in outcome.tallies for told in each.told][:MOST_TOLD]
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
