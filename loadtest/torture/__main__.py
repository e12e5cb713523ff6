"""Torture a real server: minutes of traffic and changes, and rounds of faults.

`nereid serve` and `nereid gateway` get valid and invalid requests of many kinds. Every outcome is compared
with the expected one. A soak fails on any other outcome, and if memory grows or anything is left over. Around
a fault requests may fail; the next fault follows when all succeed again. A wrong answer is never allowed.

    python -m loadtest.torture [--minutes 20] [--rounds 200 [--seed 1]] [--record NAME]
"""

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loadtest import record, servers
from loadtest.torture import requests, verdict
from loadtest.torture.changes import Changes, Photo
from loadtest.torture.faults import FAULTS, Gateway, Scene, own_file_systems
from loadtest.torture.observation import Observer, Sample
from loadtest.torture.traffic import Target, Traffic
from loadtest.torture.verdict import MIN_SAMPLES, Verdict
from nereid.base import assets
from nereid.insight.tune import photos

# Parts of a soak: the traffic before the measurement, and the measurement without changes.
WARM_UP = 0.2
WARM_UP_S = (5.0, 600.0)
STEADY = 0.5
# Seconds between two rounds of changes, the limit on their short effects, and the least between samples.
CALM_S = (6.0, 20.0)
WARMING_CALM_S = 1.0
SETTLING_S = 2.0
MIN_PERIOD_S = 0.4
CYCLES, MAX_SAMPLES = 40, 200
# A fault is over after this time without a failed request; a server that needs longer has not recovered.
RECOVERED_S, MAX_RECOVERY_S, ROUNDS_PER_SERVER = 1.5, 30.0, 20
MAX_SHOWN = 20
COLUMNS: record.Columns = {
    "fault": "{fault}",
    "rounds": "{rounds}",
    "back after, median": "{median:.1f} s",
    "worst": "{max:.1f} s",
    "failed requests": "{failed}",
}


@dataclass(slots=True)
class Findings:
    """All that was found: verdicts, reasons of an early end, faults, and the numbers of the record."""

    verdicts: list[Verdict] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    rounds: list[record.Row] = field(default_factory=list)
    requests: int = 0
    changes: int = 0

    @contextlib.contextmanager
    def noting(self, traffic: Traffic | None = None, may_fail: bool = False) -> Iterator[None]:
        """Note an error as text, so that earlier observations are kept; meanwhile run and judge traffic."""
        try:
            with traffic or contextlib.nullcontext():
                yield
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        if traffic:
            self.requests += traffic.sent
            self.verdicts += verdict.judge_traffic(traffic.tallies, may_fail)


def torture(
    folder: Path, seconds: float, faults: Sequence[str], draw: random.Random, found: Findings
) -> None:
    """Serve a copy of the repository under traffic: first a soak, if it has seconds, then the faults."""
    models = shutil.copytree(assets.REPOSITORY, folder / "models")
    (run := folder / "run").mkdir()
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(servers.supervised(models, run, os.environ, ["--allow-shm"]))
        target = Target(running.server_info.url("http"), running.server_info.url("grpc"))
        gateway = Gateway(target, stack)
        small, large = (Photo(photos.jpeg(size_wh), models) for size_wh in photos.SIZES_WH.values())
        scene = Scene(running, gateway, Changes(running, folder / "new", [small, large]), draw)
        observer, kinds = Observer(running, gateway), requests.kinds(small, large)
        if seconds:
            _soak(scene, observer, Traffic(kinds, target), Traffic(kinds, target), seconds, found)
        if faults and not found.errors:
            _play(scene, observer, Traffic(kinds, target), faults, found)
        found.changes += scene.changes.rounds
        observer.note()
    for resource, left in zip(("processes", "shared memory"), observer.left(), strict=True):
        found.verdicts.append(verdict.absent(f"{resource}, after the server", left))
    if found.errors:
        print(f"the server's log ends:\n{servers.log_tail(run / 'log')}", file=sys.stderr)


def _soak(
    scene: Scene, observer: Observer, warming: Traffic, traffic: Traffic, seconds: float, found: Findings
) -> None:
    """Warm up with changes, then look at traffic without changes, then with changes."""
    with found.noting(warming, may_fail=False):
        deadline = time.monotonic() + min(max(seconds * WARM_UP, WARM_UP_S[0]), WARM_UP_S[1])
        while time.monotonic() < deadline:
            time.sleep(WARMING_CALM_S)
            scene.changes.cycle()
    if found.errors:
        return
    before, steady, calm = observer.quiet(), list[Sample](), list[Sample]()
    period_s = max(MIN_PERIOD_S, seconds / MAX_SAMPLES)
    calm_s, rounds = min(max(seconds / CYCLES, CALM_S[0]), CALM_S[1]), -1
    with found.noting(traffic, may_fail=False):
        deadline = time.monotonic() + seconds
        steady += observer.samples(seconds * STEADY, period_s, MIN_SAMPLES)
        while rounds < 0 or time.monotonic() < deadline:
            scene.changes.cycle()
            time.sleep(SETTLING_S)
            calm += observer.samples(calm_s, period_s)
            rounds += 1
    with found.noting():
        found.verdicts += verdict.judge_memory(steady, calm, rounds)
        found.verdicts += verdict.judge_quiet(before, observer.quiet())


def _play(scene: Scene, observer: Observer, traffic: Traffic, faults: Sequence[str], found: Findings) -> None:
    """Let one fault after the other happen; each must be over before the next one."""
    with found.noting(traffic, may_fail=True):
        traffic.wait_calm("the start", RECOVERED_S, MAX_RECOVERY_S, scene.running.is_ready)
        for fault in faults:
            observer.note()
            began_s = time.monotonic()
            FAULTS[fault](scene)
            traffic.wait_calm(fault, RECOVERED_S, MAX_RECOVERY_S, scene.running.is_ready)
            failures = traffic.failures(began_s)
            back_s = failures[-1].end_s - began_s if failures else 0.0
            found.rounds.append({"fault": fault, "back_s": back_s, "failed": len(failures)})
            print(f"{fault}: {len(failures)} failed requests, the last after {back_s:.1f} s", file=sys.stderr)


def summarise(rounds: Sequence[record.Row]) -> list[record.Row]:
    """Return a row for each fault: seconds until the last failure, and the number of failures."""
    by_fault: dict[str, list[record.Row]] = defaultdict(list)
    for row in rounds:
        by_fault[row["fault"]].append(row)
    return [
        {
            "fault": fault,
            "rounds": len(of),
            **record.spread((row["back_s"] for row in of), 2),
            "failed": sum(row["failed"] for row in of),
        }
        for fault, of in by_fault.items()
    ]


def _run(args: argparse.Namespace, found: Findings) -> None:
    draw = random.Random(args.seed)
    # Each fault as often as every other one.
    faults = [[*FAULTS][number % len(FAULTS)] for number in range(args.rounds)]
    draw.shuffle(faults)
    batches = [faults[at : at + ROUNDS_PER_SERVER] for at in range(0, len(faults), ROUNDS_PER_SERVER)]
    with own_file_systems() if faults else tempfile.TemporaryDirectory() as disk:
        for number, batch in enumerate(batches or [[]]):
            with tempfile.TemporaryDirectory(dir=disk) as scratch:
                seconds = args.minutes * 60 if not number else 0.0
                torture(Path(scratch), seconds, batch, draw, found)
            if found.errors:
                return


def main() -> int:
    """Torture, print and record; exit status 1 if anything failed."""
    parser = record.parser(__doc__, minutes=0.0, rounds=0, seed=1)
    args, findings = record.parsed(parser), Findings()
    if not (args.minutes or args.rounds):
        parser.error("expected --minutes or --rounds")
    _run(args, findings)
    memory = [asdict(check) for check in findings.verdicts if check.what.startswith("memory")]
    faults = summarise(findings.rounds)
    print(record.table(verdict.COLUMNS, memory), record.table(COLUMNS, faults), sep="\n")
    failures = [check.text() for check in findings.verdicts if not check.is_good] + findings.errors
    counts = {"requests": findings.requests, "changes": findings.changes, "checks": len(findings.verdicts)}
    print(f"{counts}: {len(failures)} failed")
    for failure in failures[:MAX_SHOWN]:
        print(f"failed: {failure}", file=sys.stderr)
    if not findings.errors:
        about = {"minutes": args.minutes, "rounds": args.rounds, "seed": args.seed}
        args.record.write(about | counts | {"memory": memory, "faults": faults})
    return int(bool(failures))


if __name__ == "__main__":
    record.end(main)
