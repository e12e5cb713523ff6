"""Faults in random order over the processes of a server under load: no wrong answer, and nothing left behind.

Callers send requests over HTTP and gRPC, and compare each answer with the version's own. In every round one
fault happens. The next round begins when all requests succeed again. After some rounds the server is stopped,
and a new one starts.

    python -m loadtest.chaos [--rounds 200] [--seed 1] [--record chaos]
"""

import contextlib
import ctypes
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest import record, servers
from loadtest.background_load import BackgroundLoad, Request
from loadtest.faults import END_S, FAULTS, TIMEOUT_S, Scene
from loadtest.recovery import PUBLIC_NAME, back_after_s, is_calm, is_ready
from loadtest.soak.changes import Changes
from loadtest.swap import References
from nereid import assets
from nereid.client.prediction import Prediction
from nereid.triton import stub_memory

CALLERS, PAUSE_S = 4, 0.02
# A fault is over after this time without a failed request; a server that needs longer has not recovered.
CALM_S, MAX_RECOVERY_S = 1.5, 30.0
ROUNDS_PER_SERVER = 20
# Sizes of the file systems of the chaos test, which one fault fills.
DISK_BYTES, SHARED_MEMORY_BYTES = 2**30, 2**29
# Source: the kernel's include/uapi/linux/sched.h.
CLONE_NEWNS = 0x20000
HEADINGS = ("fault", "rounds", "back after, median", "worst", "failed requests")


@dataclass(frozen=True, slots=True)
class Round:
    """One fault: the seconds until all requests succeeded again, and the failed requests."""

    fault: str
    back_s: float
    failed: int


def play(scene: Scene, fault: str, load: BackgroundLoad) -> Round:
    """Let a fault happen, and wait until all requests succeed.

    Raises:
        SystemExit: they do not, within a limit.
    """
    began_s, first = time.monotonic(), len(load.requests)
    FAULTS[fault](scene)
    over_s = time.monotonic()
    while not (
        load.waits_since_s() > over_s
        and is_calm(load.requests[first:], over_s, CALM_S)
        and is_ready(scene.running.record)
    ):
        if time.monotonic() - over_s > MAX_RECOVERY_S:
            ends = "\n".join(each.failure for each in load.requests[-10:])
            raise SystemExit(f"{fault}: no recovery within {MAX_RECOVERY_S:g} s; the last requests:\n{ends}")
        time.sleep(0.1)
    found = [
        Request(each.begin_s - began_s, each.end_s - began_s, each.failure) for each in load.requests[first:]
    ]
    return Round(fault, back_after_s(found), sum(bool(each.failure) for each in found))


def rounds_of(faults: list[str], draw: random.Random, folder: Path, wrong: list[str]) -> list[Round]:
    """Return the rounds with one server; `wrong` gets the wrong answers, and what it leaves behind."""
    repository = shutil.copytree(assets.REPOSITORY, folder / "repository")
    (own := folder / "run").mkdir()
    (candidates := folder / "candidates").mkdir()
    references = References(repository)

    def check(prediction: Prediction) -> str:
        if fault := references.check(prediction):
            wrong.append(fault)
        return fault

    processes, servers_seen = set[psutil.Process](), set[str]()
    found = []
    with servers.supervised(repository, own, os.environ) as running:
        scene = Scene(running, Changes(running, candidates, [references]), draw)
        with BackgroundLoad(running.record, PUBLIC_NAME, CALLERS, PAUSE_S, TIMEOUT_S, check) as load:
            for fault in faults:
                processes |= scene.processes()
                servers_seen |= scene.servers()
                found.append(play(scene, fault, load))
    # A killed process needs a moment to end.
    _, left_processes = psutil.wait_procs(processes, timeout=END_S)
    wrong += [f"process {each.pid} is left: {each.status()}" for each in left_processes]
    left = [each.name for name in sorted(servers_seen) for each in stub_memory.FOLDER.glob(f"{name}*")]
    wrong += [f"/dev/shm/{name} is left" for name in left]
    return found


def summarise(found: list[Round]) -> list[record.Row]:
    """Return a row for each fault."""
    by_fault: dict[str, list[Round]] = defaultdict(list)
    for each in found:
        by_fault[each.fault].append(each)
    return [
        {
            "fault": fault,
            "rounds": len(rounds),
            **record.spread((each.back_s for each in rounds), 2),
            "failed": sum(each.failed for each in rounds),
        }
        for fault, rounds in by_fault.items()
    ]


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/supervision.md."""
    return record.markdown(
        HEADINGS,
        (
            (row["fault"], row["rounds"], f"{row['median']:.1f} s", f"{row['max']:.1f} s", row["failed"])
            for row in rows
        ),
    )


@contextlib.contextmanager
def own_file_systems() -> Iterator[Path]:
    """Mount a small disk, which it gives, and a small `/dev/shm`, for this process and its children only.

    Raises:
        SystemExit: the system does not allow it.
    """
    with tempfile.TemporaryDirectory() as folder:
        if ctypes.CDLL(None).unshare(CLONE_NEWNS):
            raise SystemExit("expected the right to mount file systems, got none\nfix: run it as root")
        _mount("--make-rprivate", "/")
        for place, size in ((folder, DISK_BYTES), (str(stub_memory.FOLDER), SHARED_MEMORY_BYTES)):
            _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", place)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def main() -> int:
    """Play, print and record; exit status 1 after a wrong answer, or if something is left behind."""
    args = record.parsed(record.parser(__doc__, rounds=200, seed=1))
    draw, wrong, found = random.Random(args.seed), list[str](), list[Round]()
    # Each fault as often as every other one.
    faults = [[*FAULTS][number % len(FAULTS)] for number in range(args.rounds)]
    draw.shuffle(faults)
    with own_file_systems() as disk:
        for start in range(0, args.rounds, ROUNDS_PER_SERVER):
            with tempfile.TemporaryDirectory(dir=disk) as scratch:
                found += rounds_of(faults[start : start + ROUNDS_PER_SERVER], draw, Path(scratch), wrong)
            print(f"{len(found)} of {args.rounds} rounds", file=sys.stderr)
    rows = summarise(found)
    print(markdown(rows))
    result = {"seed": args.seed, "rounds": args.rounds, "callers": CALLERS, "rows": rows}
    return record.finish(args.record, result, wrong)


if __name__ == "__main__":
    record.end(main)
