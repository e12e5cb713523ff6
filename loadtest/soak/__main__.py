"""Serve for minutes under mixed traffic and changes, and fail on anything that is left of it.

`nereid serve` and `nereid gateway` get good and bad requests of many kinds, each with the answer that it must
have, while versions are published and retired, weights change and models are loaded again. It fails on a
wrong answer, on memory that grows, on open files, threads, processes and shared memory that are left, on
zombies, and on anything that the supervisor had to mend.

    python -m loadtest.soak [--minutes 20]
"""

import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest import processes, record, servers
from loadtest.soak import verdict
from loadtest.soak.outcome import Outcome, calm, judge, result
from loadtest.soak.scene import Scene, noted
from loadtest.soak.verdict import MOST_SAMPLES
from loadtest.soak.watch import Sampler, Watch
from nereid import assets

# The largest part of what a tree takes that it may grow by; see docs/soak.md.
SHARE = 0.01
# Between two rounds of changes.
CALM_S, WARMING_CALM_S = (6.0, 20.0), 1.0
CYCLES, LEAST_PERIOD_S = 40, 0.4
WARM_UP, WARM_UP_S = 0.1, (5.0, 120.0)
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
        return max(LEAST_PERIOD_S, self.seconds / MOST_SAMPLES)


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def soak(repository: Path, folder: Path, plan: Plan) -> Outcome:
    """Serve a repository, and have it asked and changed for as long as planned.

    Raises:
        SystemExit: that cannot even be done for as long as it takes to warm up.
    """
    busy, after = 0.0, None
    with (
        servers.supervised(repository, folder, os.environ, ["--allow-shm"]) as running,
        servers.gateway(running.record.ports.grpc) as gateway,
    ):
        watch = Watch(running, gateway.pid, gateway.port)
        scene = Scene.of(running, gateway, folder)
        warming = scene.warming().play(plan.warm_up_s, WARMING_CALM_S)
        if warming.trouble:
            raise SystemExit(f"failed, while warming up: {warming.trouble[0]}")
        before = watch.quiet()
        cpu_s, began_s = processes.cpu_s(running.pid), time.monotonic()
        with Sampler(watch.sample, plan.period_s) as sampler:
            played = scene.play(plan.seconds, plan.calm_s, sampler.has, lambda: sampler.failure)
        trouble = [*(told for each in warming.tallies for told in each.told), *played.trouble]
        with noted(trouble, "nothing can be seen afterwards"):
            busy = (processes.cpu_s(running.pid) - cpu_s) / (time.monotonic() - began_s)
            after = watch.quiet()
    return Outcome(
        played.tallies,
        sampler.samples,
        calm(sampler.samples, played.calm),
        before,
        after,
        watch.regions(),
        scene.changes.counts,
        busy,
        [*filter(None, [sampler.failure]), *trouble],
    )


def main() -> int:
    """Soak, print, record; exit status 1 if anything has failed."""
    parser = record.parser(__doc__, minutes=20.0, share=SHARE)
    parser.add_argument("--repository", type=Path, default=assets.REPOSITORY, help="a copy of it is served")
    args = record.parsed(parser)
    plan = Plan(args.minutes, args.share)
    with tempfile.TemporaryDirectory() as scratch:
        repository = shutil.copytree(args.repository, Path(scratch) / "models")
        (run := Path(scratch) / "run").mkdir()
        outcome = soak(repository, run, plan)
    verdicts = judge(outcome, plan.share)
    found = asdict(plan) | result(outcome, verdicts)
    print(verdict.traffic_markdown(found["traffic"]))
    print(verdict.markdown(found["rows"]))
    if not outcome.trouble:
        args.record.write(found)
    elif args.record.name:
        print("nothing is recorded: this was no whole soak", file=sys.stderr)
    failures = [*(each.told() for each in verdicts if not each.is_good), *outcome.trouble]
    failures += [told for each in outcome.tallies for told in each.told][:MOST_TOLD]
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    record.end(main)
