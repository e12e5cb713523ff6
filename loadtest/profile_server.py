"""Flame graphs of a server and a gateway under load: where each process spends its time.

The load goes through the gateway to the route, and from there to both variants. Each process is watched in
turn, so that the samplers do not disturb each other: by py-spy, and then all of them by Linux's `perf`.

    python -m loadtest.profile_server [--seconds 5] [--folder FOLDER]
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from loadtest import servers
from loadtest.flame_graph import draw, read_perf, read_pyspy
from nereid import assets
from nereid.triton import stub_processes
from nereid.tune import load_generator
from nereid.tune.load_generator import HOST, post_request

CALLERS, RATE_HZ = 8, 200
# Before the first graph, and for the starts of the samplers.
WARM_UP_S, SPARE_S = 1.0, 5.0
ROUTE, PINNED = "classify", "classify_v1"
PY_SPY = Path(sys.executable).with_name("py-spy")
PY_SPY_MISSING = "py-spy not found; fix: pip install 'nereid-serving[load]'"
# Processes of another parent can be read by root only, or by their user if the kernel allows it.
DENIED = "fix: run it as root, or sysctl kernel.yama.ptrace_scope=0; in a container --cap-add SYS_PTRACE"


@contextlib.contextmanager
def loaded(port: int, seconds: float, folder: Path) -> Iterator[None]:
    """Send requests through a gateway for a number of seconds; the context ends after the last one.

    Raises:
        LoadFailed: requests failed.
    """
    request, photo = folder / "request", assets.COFFEE.read_bytes()
    request.write_bytes(post_request(HOST, port, "/predict", photo, {"Content-Type": "image/jpeg"}))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(load_generator.run, port, [request], [CALLERS], seconds)
        yield
        sent.result()


def watch(name: str, pid: int, seconds: float, folder: Path) -> Path:
    """Write the flame graph of a Python process and its children, with the functions of its libraries.

    Raises:
        SystemExit: py-spy cannot read the process; the message has the reason.
    """
    raw, target = folder / f"{name}.folded", folder / f"{name}.svg"
    words = ["record", "--pid", str(pid), "--native", "--subprocesses", "--format", "raw"]
    words += ["--rate", str(RATE_HZ), "--duration", f"{seconds:g}", "--output", str(raw)]
    done = subprocess.run([PY_SPY, *words], capture_output=True, text=True)
    if done.returncode or not raw.exists():
        raise SystemExit(f"py-spy failed for {name}, pid {pid}: {done.stderr.strip()[-500:]}\n{DENIED}")
    target.write_text(draw(read_pyspy(raw.read_text()), f"{name}: running threads"))
    return target


def watch_cpu(pids: list[int], seconds: float, folder: Path) -> tuple[Path | None, str]:
    """Write the flame graph of the CPU time of several processes; returns it, or why there is none."""
    if not (perf := shutil.which("perf")):
        return None, "perf not found; fix: apt-get install linux-perf"
    data, target = folder / "perf.data", folder / "cpu.svg"
    words = ["record", "-F", str(RATE_HZ), "-g", "-o", str(data), "-p", ",".join(map(str, pids))]
    taken = subprocess.run([perf, *words, "--", "sleep", f"{seconds:g}"], capture_output=True, text=True)
    words = ["script", "-i", str(data), "-F", "comm,ip,sym,dso"]
    shown = subprocess.run([perf, *words], capture_output=True, text=True)
    data.unlink(missing_ok=True)
    if not (stacks := read_perf(shown.stdout)):
        return None, f"perf has no samples: {(taken.stderr + shown.stderr).strip()[-500:]}"
    target.write_text(draw(stacks, "CPU time of tritonserver, its models and the gateway"))
    return target, ""


def profile(seconds: float, folder: Path) -> list[Path]:
    """Serve, load and watch; returns the flame graphs."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(servers.supervised(assets.REPOSITORY, scratch, os.environ))
        record = server.record
        gateway = stack.enter_context(servers.gateway(record.ports.http))
        stubs = {each.model: each.process.pid for each in stub_processes.find(record.pid, assets.REPOSITORY)}
        watched = {"gateway": gateway.pid, "route": stubs[ROUTE], "model": stubs[PINNED]}
        stack.enter_context(loaded(gateway.port, (len(watched) + 1) * seconds + SPARE_S, scratch))
        time.sleep(WARM_UP_S)
        found = [watch(name, pid, seconds, folder) for name, pid in watched.items()]
        cpu, missing = watch_cpu([record.pid, gateway.pid, *stubs.values()], seconds, folder)
    if missing:
        print(f"cpu.svg is left out: {missing}", file=sys.stderr)
    return [*found, *([cpu] if cpu else ())]


def main() -> int:
    """Write the flame graphs, and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each flame graph, default: 5")
    parser.add_argument("--folder", type=Path, help="folder of the flame graphs, default: a new one")
    args = parser.parse_args()
    if not PY_SPY.exists():
        raise SystemExit(PY_SPY_MISSING)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="nereid-profile-"))
    folder.mkdir(parents=True, exist_ok=True)
    for path in profile(args.seconds, folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
