"""Faults in random order over the processes of a server under load: no wrong answer, and nothing left behind.

Callers send requests over HTTP and gRPC, and compare each answer with the version's own. In every round one
fault happens. The next round begins when all requests succeed again. After some rounds the server is stopped,
and a new one starts.

    python -m loadtest.chaos [--rounds 200] [--seed 1] [--record chaos]
"""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loadtest import record, servers
from loadtest.background_load import BackgroundLoad, Request
from loadtest.recovery import PUBLIC_NAME, back_after_s, is_calm, is_ready
from loadtest.soak.changes import Changes
from loadtest.swap import References
from nereid import assets, files
from nereid.client.prediction import Prediction
from nereid.contract import VARIANT_HEADER
from nereid.processes import available_cores, end_with_parent
from nereid.server.embedded_server import infer_path
from nereid.triton import stub_memory, stub_processes

CALLERS, PAUSE_S, TIMEOUT_S = 4, 0.02, 10.0
# A fault is over after this time without a failed request; a server that needs longer has not recovered.
CALM_S, MAX_RECOVERY_S = 1.5, 30.0
ROUNDS_PER_SERVER = 20
SHORT_S = 2.0
IDLE_CONNECTIONS, LEAVING_CALLERS = 300, 100
HEADINGS = ("fault", "rounds", "back after, median", "worst", "failed requests")


@dataclass(frozen=True, slots=True)
class Scene:
    """A running server, and what draws its faults."""

    running: servers.Supervised
    changes: Changes
    draw: random.Random

    @property
    def stubs(self) -> list[stub_processes.Stub]:
        """The present stubs, in a fixed order."""
        found = stub_processes.find(self.running.record.pid, self.running.repository)
        return sorted(found, key=lambda stub: (stub.model, stub.instance, stub.process.pid))

    def pids(self) -> set[int]:
        """Return the present processes of the server."""
        return {self.running.record.pid, *(stub.process.pid for stub in self.stubs)}

    def servers(self) -> set[str]:
        """Return the names that begin those of the server's files in /dev/shm."""
        maps = Path(f"/proc/{self.running.record.pid}/maps").read_text()
        return set(re.findall(rf"{stub_memory.FOLDER}/({stub_memory.PREFIX}[0-9a-f]+)-", maps))

    def address(self) -> tuple[str, int]:
        """Return the address of Triton's HTTP port."""
        return "127.0.0.1", self.running.record.ports.http


def kill_stub(scene: Scene) -> None:
    """Kill one process of a model."""
    os.kill(scene.draw.choice(scene.stubs).process.pid, signal.SIGKILL)


def stop_stub(scene: Scene) -> None:
    """Stop one process of a model, which then hangs."""
    os.kill(scene.draw.choice(scene.stubs).process.pid, signal.SIGSTOP)


def kill_server(scene: Scene) -> None:
    """Kill `tritonserver`."""
    os.kill(scene.running.record.pid, signal.SIGKILL)


def end_server(scene: Scene) -> None:
    """Ask `tritonserver` to end."""
    os.kill(scene.running.record.pid, signal.SIGTERM)


def pause_server(scene: Scene) -> None:
    """Stop `tritonserver` for some time."""
    pid = scene.running.record.pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(scene.draw.uniform(0.1, SHORT_S))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def take_cores(scene: Scene) -> None:
    """Run more busy processes than there are cores."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command, preexec_fn=end_with_parent()) for _ in range(2 * available_cores())]
    time.sleep(SHORT_S)
    for each in busy:
        each.kill()
        each.wait()


def open_idle_connections(scene: Scene) -> None:
    """Open many connections that send nothing."""
    with contextlib.ExitStack() as held:
        for _ in range(IDLE_CONNECTIONS):
            with contextlib.suppress(TimeoutError):
                held.enter_context(socket.create_connection(scene.address(), SHORT_S))
        time.sleep(SHORT_S)


def leave_early(scene: Scene) -> None:
    """Send many requests, of which some are incomplete, and leave before the responses."""
    body = assets.COFFEE.read_bytes()
    head = f"POST {infer_path(PUBLIC_NAME)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    request = f"{head}{VARIANT_HEADER}: v1\r\nInference-Header-Content-Length: 0\r\n\r\n".encode() + body
    with contextlib.ExitStack() as held:
        for _ in range(LEAVING_CALLERS):
            connection = held.enter_context(socket.create_connection(scene.address(), TIMEOUT_S))
            connection.sendall(request[: scene.draw.randint(1, 2 * len(request))])
        time.sleep(0.05)


def publish(scene: Scene) -> None:
    """Publish a version, roll it back and retire it, change weights, and reload a model."""
    scene.changes.cycle()


def lack_files(scene: Scene) -> None:
    """Let `tritonserver` open only two more files, while many connections arrive."""
    pid = scene.running.record.pid
    _, most = before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = len([*Path(f"/proc/{pid}/fd").iterdir()])
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 2, most))
    try:
        open_idle_connections(scene)
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def damage_route(scene: Scene) -> None:
    """Cut off the route file for some time."""
    path = scene.running.repository / f"{PUBLIC_NAME}.route.json"
    text = path.read_bytes()
    files.replace(path, text[: scene.draw.randrange(len(text) // 2)])
    time.sleep(SHORT_S)
    files.replace(path, text)


def damage_journal(scene: Scene) -> None:
    """Change a bit of the journal before its last line, between two rounds of publications."""
    scene.changes.cycle()
    path = files.state_folder(scene.running.repository) / "journal.jsonl"
    content = bytearray(path.read_bytes())
    end = content.rstrip().rfind(b"\n")
    content[scene.draw.randrange(end)] ^= 1 << scene.draw.randrange(8)
    path.write_bytes(content)
    scene.changes.cycle()


IDLE = f"{IDLE_CONNECTIONS} idle connections"
FAULTS: dict[str, Callable[[Scene], None]] = {
    "a stub is killed": kill_stub,
    "a stub is stopped": stop_stub,
    "`tritonserver` is killed": kill_server,
    "`tritonserver` gets SIGTERM": end_server,
    "`tritonserver` is stopped for up to 2 s": pause_server,
    "other programs take the cores for 2 s": take_cores,
    IDLE: open_idle_connections,
    f"{LEAVING_CALLERS} callers leave early": leave_early,
    f"{IDLE}, and two files to open": lack_files,
    "a publication and a rollback": publish,
    "the route file is damaged for 2 s": damage_route,
    "a bit of the journal is damaged": damage_journal,
}


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

    pids, servers_seen = set[int](), set[str]()
    found = []
    with servers.supervised(repository, own, os.environ) as running:
        scene = Scene(running, Changes(running, candidates, [references]), draw)
        with BackgroundLoad(running.record, PUBLIC_NAME, CALLERS, PAUSE_S, TIMEOUT_S, check) as load:
            for fault in faults:
                pids |= scene.pids()
                servers_seen |= scene.servers()
                found.append(play(scene, fault, load))
    wrong += [f"process {pid} is left" for pid in sorted(pids) if Path(f"/proc/{pid}").exists()]
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


def main() -> int:
    """Play, print and record; exit status 1 after a wrong answer, or if something is left behind."""
    args = record.parsed(record.parser(__doc__, rounds=200, seed=1))
    draw, wrong, found = random.Random(args.seed), list[str](), list[Round]()
    # Each fault as often as every other one.
    faults = [[*FAULTS][number % len(FAULTS)] for number in range(args.rounds)]
    draw.shuffle(faults)
    for start in range(0, args.rounds, ROUNDS_PER_SERVER):
        with tempfile.TemporaryDirectory() as scratch:
            found += rounds_of(faults[start : start + ROUNDS_PER_SERVER], draw, Path(scratch), wrong)
        print(f"{len(found)} of {args.rounds} rounds", file=sys.stderr)
    rows = summarise(found)
    print(markdown(rows))
    result = {"seed": args.seed, "rounds": args.rounds, "callers": CALLERS, "rows": rows}
    return record.finish(args.record, result, wrong)


if __name__ == "__main__":
    record.end(main)
