"""A soak: minutes of mixed traffic and changes, which must leave nothing behind.

`nereid serve` and `nereid gateway` get valid and invalid requests of many kinds, each with its expected
outcome. Meanwhile versions are published and retired, weights change and models are reloaded. The soak
fails on a wrong outcome, growing memory, zombies and repairs by the supervisor. It also fails on open files,
threads, processes and shared memory that remain.

    python -m loadtest.soak [--minutes 20]
"""

import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest import record, resource_usage, servers
from loadtest.soak import verdict
from loadtest.soak.evaluation import Outcome, calm, judge, result
from loadtest.soak.observation import Observer, Sampler
from loadtest.soak.scenario import Scenario, noted
from loadtest.soak.verdict import MAX_SAMPLES
from nereid import assets

# The limit on the growth of a process tree's memory, as a share of it; see docs/soak.md.
SHARE = 0.01
# Seconds between two rounds of changes.
CALM_S, WARMING_CALM_S = (6.0, 20.0), 1.0
CYCLES, MIN_PERIOD_S = 40, 0.4
# Parts of the duration: the traffic before the measurement, and the measurement without changes.
WARM_UP, WARM_UP_S, STEADY = 0.2, (5.0, 600.0), 0.5
MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """The duration of a soak, and the limit on the growth of memory."""

    minutes: float
    share: float = SHARE

    @property
    def seconds(self) -> float:
        """The duration of the measurement."""
        return self.minutes * 60

    @property
    def warm_up_s(self) -> float:
        """The duration of the traffic before the measurement."""
        return _within(self.seconds * WARM_UP, WARM_UP_S)

    @property
    def steady_s(self) -> float:
        """The duration of the measurement without changes."""
        return self.seconds * STEADY

    @property
    def calm_s(self) -> float:
        """The time between two rounds of changes."""
        return _within(self.seconds / CYCLES, CALM_S)

    @property
    def period_s(self) -> float:
        """The time from one sample to the next."""
        return max(MIN_PERIOD_S, self.seconds / MAX_SAMPLES)


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def soak(repository: Path, folder: Path, plan: Plan) -> Outcome:
    """Serve a repository under traffic and changes.

    Raises:
        SystemExit: the warm-up failed.
    """
    busy, after = 0.0, None
    with (
        servers.supervised(repository, folder, os.environ, ["--allow-shm"]) as running,
        servers.gateway(running.record.ports.http) as gateway,
    ):
        observer = Observer(running, gateway.pid, gateway.port)
        scenario = Scenario.of(running, gateway, folder)
        warming = scenario.warming().play(plan.warm_up_s, WARMING_CALM_S, WARMING_CALM_S)
        if warming.trouble:
            raise SystemExit(f"the warm-up failed: {warming.trouble[0]}")
        before = observer.quiet()
        cpu_s, began_s = resource_usage.cpu_s(running.pid), time.monotonic()
        with Sampler(observer.sample, plan.period_s) as sampler:
            played = scenario.play(
                plan.seconds, plan.calm_s, plan.steady_s, sampler.has, lambda: sampler.failure
            )
        trouble = [*(line for each in warming.tallies for line in each.failures), *played.trouble]
        with noted(trouble, "the final observation failed"):
            busy = (resource_usage.cpu_s(running.pid) - cpu_s) / (time.monotonic() - began_s)
            after = observer.quiet()
    return Outcome(
        played.tallies,
        sampler.samples,
        calm(sampler.samples, played.calm[:1]),
        calm(sampler.samples, played.calm[1:]),
        max(0, len(played.calm) - 2),
        before,
        after,
        observer.regions(),
        scenario.changes.counts,
        busy,
        [*filter(None, [sampler.failure]), *trouble],
    )


def main() -> int:
    """Soak, print and record; exit status 1 if anything failed."""
    parser = record.parser(__doc__, minutes=20.0, share=SHARE)
    parser.add_argument("--repository", type=Path, default=assets.REPOSITORY, help="models; a copy is served")
    args = record.parsed(parser)
    plan = Plan(args.minutes, args.share)
    with tempfile.TemporaryDirectory() as scratch:
        repository = shutil.copytree(args.repository, Path(scratch) / "models")
        (run := Path(scratch) / "run").mkdir()
        outcome = soak(repository, run, plan)
        if outcome.trouble:
            print(f"the server's log ends:\n{servers.log_tail(run)}", file=sys.stderr)
    verdicts = judge(outcome, plan.share)
    found = asdict(plan) | result(outcome, verdicts)
    print(verdict.traffic_markdown(found["traffic"]))
    print(verdict.markdown(found["rows"]))
    if not outcome.trouble:
        args.record.write(found)
    elif args.record.name:
        print("not recorded: the soak was incomplete", file=sys.stderr)
    failures = [*(each.text() for each in verdicts if not each.is_good), *outcome.trouble]
    failures += [line for each in outcome.tallies for line in each.failures][:MAX_SHOWN]
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    record.end(main)
