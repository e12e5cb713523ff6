"""Incidents of a served route: the alert that each one must fire, silence before it, and `nereid why`.

Debian's Prometheus watches a real server and gateway with the committed rules. All of their durations are
divided by 60; thresholds stay. Each incident has a calm phase before it, in which no page may fire, and ends
when its alert ends.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import yaml
from onnx import helper, numpy_helper

from loadtest import record, servers, time_scale
from loadtest.torture.changes import ROUTE, write_candidate
from loadtest.torture.faults import busy
from loadtest.torture.requests import GOOD, JPEG, Connection, post, to_gateway
from loadtest.torture.traffic import Failed, Kind, Target, Traffic
from nereid import assets
from nereid.processes import available_cores, end_with_parent
from nereid.publish.publisher import Gates, publish
from nereid.server.ports import free_ports
from nereid.triton import stub_processes

PROGRAM, START_S, TIMEOUT_S = "prometheus", 30.0, 10.0
CALLERS, PER_S = 3, 10.0
CALM_S, WARM_S, SETTLED_S = 10.0, 15.0, 3.0
# Limits of a phase; the alerts need less. `nereid why` looks at this much of an incident.
FIRES_S, RESOLVES_S, SETTLES_S, WHY_S = 75.0, 90.0, 60.0, 15
# Multiplications with which one request takes longer than 250 ms, and the weights with that version.
WORK, SIDE, SLOW, DYING = 1500, 256, "v3", "classify_v2"
NORMAL, WITH_SLOW = ("v1=50", "v2=50", f"{SLOW}=0"), ("v1=50", "v2=25", f"{SLOW}=25")
GATES = Gates(is_change_accepted=True, max_slowdown=1000, max_memory_ratio=100)
# Photos with damage in the incident, between two looks for processes to kill, busy processes for each core.
DAMAGED_SHARE, KILL_S, BUSY_PER_CORE = 0.3, 1.0, 48
HEADINGS = ("incident", "alert", "fired after", "ended after", "cause", "failed requests")


@dataclass(slots=True)
class Scene:
    """A served route under load, with the address of the Prometheus that watches it."""

    running: servers.Supervised
    prometheus: str
    damaged_share: float = 0.0

    def firing(self, seconds: float) -> set[tuple[str, str]]:
        """Return name and severity of the alerts that fired at any moment of the last seconds."""
        query = f'max_over_time(ALERTS{{alertstate="firing"}}[{max(1, round(seconds))}s])'
        answer = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": query}, timeout=TIMEOUT_S)
        labels = (each["metric"] for each in answer.raise_for_status().json()["data"]["result"])
        return {(each["alertname"], each["severity"]) for each in labels}

    def pages(self, seconds: float) -> list[str]:
        """Return the names of the page alerts that fired in the last seconds."""
        return sorted(name for name, severity in self.firing(seconds) if severity == "page")

    def nereid(self, *words: str) -> str:
        """Run a command of `nereid` for the repository, and return its output."""
        command = [sys.executable, "-m", "nereid", *words, "--repository", str(self.running.repository)]
        environment = {**self.running.environment}
        return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    def post(self, numbers: Iterator[int], connection: Connection) -> str:
        """Send a photo, of which a share is cut off after its first bytes."""
        number, share = next(numbers), self.damaged_share
        is_damaged = int((number + 1) * share) > int(number * share)
        status, document = post(connection, "/predict", GOOD[: 5000 if is_damaged else None], JPEG)
        if status != HTTPStatus.OK:
            raise Failed(f"{status} {document}")
        return ""


Cause = Callable[[Scene], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _slow_version(scene: Scene) -> Iterator[None]:
    scene.nereid("route", "set", *WITH_SLOW)
    try:
        yield
    finally:
        scene.nereid("route", "set", *NORMAL)


@contextlib.contextmanager
def _dying_processes(scene: Scene) -> Iterator[None]:
    """Kill the processes of a model whenever the supervisor has replaced them."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(KILL_S):
            for stub in stub_processes.find(scene.running.record.pid, scene.running.repository):
                if stub.model == DYING:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(stub.process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _damaged_images(scene: Scene) -> Iterator[None]:
    scene.damaged_share = DAMAGED_SHARE
    yield
    scene.damaged_share = 0.0


def _busy_loops(scene: Scene) -> contextlib.AbstractContextManager[None]:
    return busy(BUSY_PER_CORE * available_cores())


LATENCY, ERRORS = ("RouteSlow", "GatewaySlow"), ("RouteErrors", "GatewayErrors", "ServerNotReady")
INVALID = ("RouteInvalidImages", "GatewayInvalidImages")
# What lets an incident happen, the alerts of which one must fire, and the causes that `nereid why` may give.
INCIDENTS: dict[str, tuple[Cause, tuple[str, ...], str, tuple[str, ...]]] = {
    "a slow version gets traffic": (_slow_version, LATENCY, "page", (f"network, {SLOW}", f"queue, {SLOW}")),
    "processes of a model die": (_dying_processes, ERRORS, "page", ("unavailable",)),
    "30 % damaged images": (_damaged_images, INVALID, "ticket", ("invalid_image",)),
    "other programs take the cores": (_busy_loops, LATENCY, "page", ("cores",)),
}


def play(name: str, scene: Scene, traffic: Traffic) -> record.Row:
    """Let an incident happen after a calm phase, wait until its alert ends, and return its row."""
    begin, alerts, severity, _ = INCIDENTS[name]
    expected = {(alert, severity) for alert in alerts}
    _wait_for(lambda: not scene.pages(SETTLED_S), SETTLES_S)
    time.sleep(CALM_S)
    pages, sent, began_s = scene.pages(CALM_S - 1), traffic.sent, time.monotonic()
    with begin(scene):
        fired = _wait_for(lambda: expected & scene.firing(SETTLED_S), FIRES_S)
        fired_s = time.monotonic() - began_s
        time.sleep(max(0.0, WHY_S - fired_s))
        why = json.loads(scene.nereid("why", "--since", f"{WHY_S}s", "--route", ROUTE, "--json"))
    over_s = time.monotonic()
    others = scene.firing(over_s - began_s)
    is_over = fired and _wait_for(lambda: not fired & scene.firing(SETTLED_S), RESOLVES_S)
    slow = f", {why['slow_variant']}" if why["slow_variant"] == SLOW else ""
    row = {
        "incident": name,
        "alert": min(fired)[0] if fired else None,
        "severity": severity,
        "fired_s": round(fired_s, 1),
        "others": sorted({alert for alert, _ in others}),
        "resolved_s": round(time.monotonic() - over_s, 1) if is_over else None,
        "cause": f"{why['cause']}{slow}",
        "requests": traffic.sent - sent,
        "failed": len(traffic.failures(began_s)),
        "calm_pages": pages,
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def _wait_for(condition: Callable[[], Any], limit_s: float) -> Any:
    """Return the first true value of a condition, or the last one when the time is over."""
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return found


def problems(row: record.Row) -> list[str]:
    """Return the differences of a row from the expected result."""
    _, alerts, severity, causes = INCIDENTS[row["incident"]]
    found = [f"{each} fired in the calm phase" for each in row["calm_pages"]]
    if not row["alert"]:
        found.append(f"expected {' or '.join(alerts)} ({severity}), got {row['others']}")
    elif row["resolved_s"] is None:
        found.append(f"{row['alert']} did not end")
    if row["cause"] not in causes:
        found.append(f"expected the cause '{' or '.join(causes)}', got '{row['cause']}'")
    return [f"{row['incident']}: {each}" for each in found]


def run(folder: Path, environment: Mapping[str, str]) -> list[record.Row]:
    """Let all incidents happen one after the other on one server under load; returns a row for each."""
    repository = shutil.copytree(assets.REPOSITORY, folder / "models")
    path = repository / f"{ROUTE}.route.json"
    route = json.loads(path.read_text())
    # No other variant replaces the default one, so its errors reach the callers.
    (route["default"],) = (each["name"] for each in route["variants"] if each["model"] == DYING)
    path.write_text(json.dumps(route))
    publish(repository, ROUTE, _slow_network(folder / "slow" / "model.onnx"), None, GATES, 0)
    (own := folder / "run").mkdir()
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(servers.supervised(repository, own, environment))
        gateway = stack.enter_context(servers.gateway(running))
        target = Target("", "", f"127.0.0.1:{gateway.port}")
        supervisor = f"127.0.0.1:{running.record.health_port}"
        addresses = {
            "server": running.record.url("metrics"),
            "gateway": target.gateway,
            "supervisor": supervisor,
        }
        scene = Scene(running, stack.enter_context(_prometheus(folder / "watch", addresses)))
        kinds = [Kind("photos", PER_S, to_gateway, partial(scene.post, itertools.count()))] * CALLERS
        traffic = stack.enter_context(Traffic(kinds, target))
        time.sleep(WARM_S)
        return [play(name, scene, traffic) for name in INCIDENTS]


def _slow_network(path: Path) -> Path:
    """Write the network with many multiplications of matrices, whose result it adds as nothing."""
    model = onnx.load(write_candidate(path, 0))
    graph = model.graph
    (output,) = (each.name for each in graph.output)
    for node in graph.node:
        node.output[:] = ["scores without" if each == output else each for each in node.output]
    constants = {"work": np.full((SIDE, SIDE), 1 / SIDE, np.float32), "zero": np.zeros((), np.float32)}
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    steps = [("ReduceMean", [graph.input[0].name], "mean"), ("Mul", ["work", "mean"], "work0")]
    steps += [("MatMul", [f"work{number}", "work"], f"work{number + 1}") for number in range(WORK)]
    steps += [("ReduceMean", [f"work{WORK}"], "rest"), ("Mul", ["rest", "zero"], "nothing")]
    for kind, inputs, result in [*steps, ("Add", ["scores without", "nothing"], output)]:
        options: dict[str, Any] = {"keepdims": 0} if kind == "ReduceMean" else {}
        graph.node.append(helper.make_node(kind, inputs, [result], **options))
    onnx.save(model, path)
    return path


@contextlib.contextmanager
def _prometheus(folder: Path, addresses: Mapping[str, str]) -> Iterator[str]:
    """Run Prometheus with the committed rules in scaled time; gives its address."""
    folder.mkdir()
    documents = {path.name: time_scale.rules(path) for path in (time_scale.RULES, time_scale.ALERTS)}
    documents["prometheus.yml"] = time_scale.scrapes(addresses)
    for name, document in documents.items():
        (folder / name).write_text(yaml.safe_dump(document, sort_keys=False, width=1000))
    address, log = f"127.0.0.1:{free_ports(1)[0]}", folder / "log"
    command = [PROGRAM, "--log.level=warn", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=end_with_parent())

    def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://{address}/-/ready").is_success
        return False

    try:
        if not _wait_for(is_ready, START_S):
            raise RuntimeError(f"expected that Prometheus is ready, got:\n{log.read_text()[-3000:]}")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def markdown(rows: Sequence[record.Row]) -> str:
    """Render the rows as the table of docs/monitoring.md."""
    return record.markdown(HEADINGS, map(_cells, rows))


def _cells(row: record.Row) -> list[str]:
    fired, resolved, others = row["fired_s"], row["resolved_s"], ", ".join(row["others"])
    return [
        row["incident"],
        f"`{row['alert']}` ({row['severity']})" if row["alert"] else f"missed; got {others}",
        f"{fired:.0f} s" if row["alert"] else "",
        f"{resolved:.0f} s" if resolved is not None else "no",
        f"`{row['cause']}`" if row["cause"] else "nothing unusual",
        f"{row['failed']:,} of {row['requests']:,}",
    ]
