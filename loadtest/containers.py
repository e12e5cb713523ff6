"""Start and failures of docker-compose.yml in a real container engine, with callers that retry.

Four callers over HTTP and gRPC classify the sample photo through the gateway, or through the proxy. Meanwhile
a process or a container is killed, or an operator changes something. The base images are stand-ins: Triton is
that of the wheel (tools/containers/bases.sh). Needs root and Debian's apt.

    python -m loadtest.containers [--record containers]
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import onnx

from loadtest import record
from nereid import assets
from tools.containers import compose
from tools.containers.compose import CommandFailed, Load, Project

SETTLE_ANSWERS = 100
# Of each caller, after the server is ready: the last error is then behind all of them.
SETTLE_RIGHT = 25
WATCHDOG_S = 300
HEADINGS = ("profile", "event", "ready again", "last error after", "failed", "requests")
SERVER = "bin/tritonserver"
NETWORK = "efficientnet_lite0/1/model.onnx"
# Takes memory until the kernel ends a process of the container.
HOG = """
def kills():
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            return int(dict(line.split() for line in open(path))["oom_kill"])
        except OSError:
            pass
before, taken = kills(), []
while kills() == before:
    taken.append(bytearray(b"x") * (32 << 20))
"""


def exhaust_memory(project: Project, service: str, words: str) -> None:
    """Let the kernel end a process of a container because its memory is exhausted."""
    for pid in project.pids(service, words)[:1]:
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    project.compose("exec", "-T", service, "python3", "-c", HOG, limit_s=WATCHDOG_S)


def kill(project: Project, service: str, words: str) -> None:
    """Kill the first process of a service whose command line contains the words."""
    os.kill(project.pids(service, words)[0], 9)


def kill_main(project: Project, service: str) -> None:
    """Kill a container's first process, as a crash does; Docker's restart policy applies."""
    container = project.compose("ps", "--quiet", service).strip()
    os.kill(int(project.engine.run("docker", "inspect", "--format", "{{.State.Pid}}", container)), 9)


def publish(project: Project, source: str) -> None:
    """Publish a network with a share, from a file in the container."""
    project.nereid("publish", "classify", source, "--share", "10%", "--max-slowdown", "100")


def drop(project: Project) -> None:
    """Publish a network through the drop folder."""
    changed = onnx.load(assets.REPOSITORY / NETWORK)
    changed.doc_string = "of other bytes"
    onnx.save(changed, project.folder / "new.onnx")
    project.compose("cp", "new.onnx", "publisher:/incoming/classify@new.onnx")
    end_s = time.monotonic() + WATCHDOG_S
    while "published as version" not in (log := project.compose("logs", "publisher")):
        if ": rejected: " in log or time.monotonic() > end_s:
            raise SystemExit(f"not published: {log[-1000:]}")
        time.sleep(1)


def restart_each(project: Project, services: Sequence[str]) -> None:
    """Restart one server after the other."""
    for service in services:
        project.compose("restart", service)
        project.up()


def observed(project: Project, profile: str, event: str, act: Callable[[], object]) -> record.Row:
    """Return what callers see when something happens to a running project."""
    with Load(project) as load:
        begin_s, before = time.monotonic(), load.answered
        act()
        acted_s = time.monotonic()
        # A killed process is noticed by the next probe only.
        load.wait_answers(SETTLE_ANSWERS)
        while not project.is_ready():
            if time.monotonic() - begin_s > WATCHDOG_S:
                raise SystemExit(f"not ready {WATCHDOG_S} s after: {event}")
            time.sleep(0.1)
        ready_s = time.monotonic()
        load.wait_right_answers(SETTLE_RIGHT)
    failures = load.failures
    print(f"{event}: {len(failures)} failures {sorted({each.reason for each in failures})[:3]}")
    return {
        "profile": profile,
        "event": event,
        "ready_s": round(ready_s - acted_s, 1),
        "last_error_s": round(max(each.ended_s for each in failures) - acted_s, 1) if failures else None,
        "failed": len(failures),
        "requests": load.answered - before,
    }


def default_rows(project: Project) -> list[record.Row]:
    """Return what happens to the services of the default profile."""
    server = "triton-cpu"
    events: dict[str, Callable[[], object]] = {
        "a network is published by a command": lambda: publish(project, f"/data/models/{NETWORK}"),
        "a network is published by a drop folder": lambda: drop(project),
        "a changed route": lambda: project.nereid("route", "set", "v1=40", "v2=40", "v3=20"),
        "a rollback": lambda: project.nereid("rollback", "classify"),
        "a killed process of a model": lambda: kill(project, server, "triton_python_backend_stub"),
        "`tritonserver` killed": lambda: kill(project, server, SERVER),
        "the gateway killed": lambda: kill(project, server, "nereid gateway"),
        "memory exhausted, `tritonserver` ended by the kernel": lambda: exhaust_memory(
            project, server, SERVER
        ),
        "the container's first process killed": lambda: kill_main(project, server),
    }
    return [observed(project, "cpu", event, act) for event, act in events.items()]


def scale_rows(project: Project) -> list[record.Row]:
    """Return what happens to two servers behind the proxy."""
    servers = ("server-a", "server-b")
    events: dict[str, Callable[[], object]] = {
        "the container's first process killed": lambda: kill_main(project, servers[0]),
        "memory exhausted, `tritonserver` ended by the kernel": lambda: exhaust_memory(
            project, servers[0], SERVER
        ),
        "both servers restarted in turn": lambda: restart_each(project, servers),
    }
    return [observed(project, "scale", event, act) for event, act in events.items()]


def first_answer(project: Project) -> str:
    """Return the label of the sample photo, as `curl` with the printed key gets it."""
    response = httpx.post(
        f"http://{project.url('http')}/predict",
        params={"top_k": 1},
        headers={"X-API-Key": project.key},
        content=assets.COFFEE.read_bytes(),
    )
    return str(response.raise_for_status().json()["predictions"][0]["label"])


def image_sizes_mb(project: Project) -> dict[str, float]:
    """Return the sizes of the built images by name, in MB."""
    listed = project.compose("config", "--images").split()
    ours = sorted({name for name in listed if name.startswith("nereid-")})
    command = ("docker", "image", "inspect", "--format", "{{.Size}}")
    return {name: round(int(project.engine.run(*command, name)) / 1e6) for name in ours}


def markdown(rows: list[record.Row]) -> str:
    """Render the events as the table of docs/containers.md."""

    def cells(row: record.Row) -> list[str]:
        last = "" if row["last_error_s"] is None else f"{row['last_error_s']} s"
        return [
            row["profile"],
            row["event"],
            f"{row['ready_s']} s",
            last,
            f"{row['failed']}",
            f"{row['requests']}",
        ]

    return record.markdown(HEADINGS, map(cells, rows))


def main() -> int:
    """Measure, print and record; exit status 1 if an operator's change lost a request."""
    args = record.parsed(record.parser(__doc__ or ""))
    with tempfile.TemporaryDirectory() as scratch, compose.engine() as engine:
        folder = compose.copy_checkout(Path(scratch) / "checkout")
        with compose.project(engine, folder) as project:
            begin_s = time.monotonic()
            project.up("--build")
            up_s = time.monotonic() - begin_s
            label = first_answer(project)
            answer_s = time.monotonic() - begin_s
            sizes_mb = image_sizes_mb(project)
            rows = default_rows(project)
        with compose.project(engine, folder, "scale") as project:
            project.up("--build")
            sizes_mb |= image_sizes_mb(project)
            rows += scale_rows(project)
    print(markdown(rows))
    start = {"up_s": round(up_s), "answer_s": round(answer_s), "label": label, "images_mb": sizes_mb}
    print(start)
    losses = {row["event"] for row in rows if row["failed"] and "killed" not in row["event"]}
    missed = [f"requests failed: {event}" for event in sorted(losses) if "memory" not in event]
    return record.finish(args.record, {"start": start, "rows": rows}, missed)


if __name__ == "__main__":
    try:
        record.end(main)
    except (CommandFailed, compose.NoEngine) as reason:
        raise SystemExit(str(reason)) from None
