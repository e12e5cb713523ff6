"""Rollouts of five candidates under load: which are rolled back, how fast, and what callers notice.

Sixteen callers send requests to the route over HTTP and gRPC, and every response is checked. Each candidate
is published, rolled out with `nereid rollout start`, and retired. Every fiftieth request has a white photo,
for which one of the candidates fails.

    python -m loadtest.rollouts [--record rollouts]
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import PIL.Image
from onnx import helper, numpy_helper

from loadtest import record, servers
from loadtest.background_load import BackgroundLoad, Request
from loadtest.swap import BIAS, ROUTE, References, write_candidate
from nereid import assets
from nereid.assets import COFFEE
from nereid.publish.publisher import Gates, publish, retire
from nereid.rollout.rollout_journal import Journals, Line, State
from nereid.routes.target import find_route, read_state
from nereid.triton import stub_processes

CALLERS, PAUSE_S, WHITE_EVERY = 16, 0.05, 50
GATES = Gates(is_change_accepted=True, max_slowdown=100, max_memory_ratio=100)
PLAN = ("--steps", "shadow,10,50,100", "--hold-s", "10", "--patience-s", "600")
END_S, MAX_ROLLBACK_S = 1200.0, 5.0
SHADOWS_IN_FLIGHT = 16
# The error of the candidate that fails for white photos.
PLANTED = "Gather"
# Multiplications with which a request takes about 30 % longer.
EXTRA = 20
HEADINGS = (
    "candidate",
    "result",
    "step",
    "decided after",
    "requests",
    "candidate's requests",
    "rollback took",
    "failed requests",
    "reason",
)


def slower(folder: Path, extra: int = EXTRA) -> Path:
    """Write the network with more work, a number of multiplications of matrices."""
    path = write_candidate(folder, 0)
    model = onnx.load(path)
    graph, side = model.graph, 256
    graph.initializer.append(numpy_helper.from_array(np.full((side, side), 1 / side, np.float32), "work"))
    nodes = [
        helper.make_node("ReduceMean", [graph.input[0].name], ["mean"], axes=[0, 1, 2, 3], keepdims=0),
        helper.make_node("Mul", ["work", "mean"], ["work0"]),
    ]
    for number in range(extra):
        nodes.append(helper.make_node("MatMul", [f"work{number}", "work"], [f"work{number + 1}"]))
    nodes += [
        helper.make_node("ReduceMean", [f"work{extra}"], ["rest"], axes=[0, 1], keepdims=0),
        helper.make_node("Mul", ["rest", "zero"], ["nothing"]),
    ]
    graph.initializer.append(numpy_helper.from_array(np.array(0, np.float32), "zero"))
    return _with_output(model, nodes, path)


def wrong(folder: Path) -> Path:
    """Write the network that takes everything for the same class."""
    path = write_candidate(folder, 0)
    model = onnx.load(path)
    (bias,) = (each for each in model.graph.initializer if each.name == BIAS)
    values = numpy_helper.to_array(bias).copy()
    values[0] += 1000
    bias.CopyFrom(numpy_helper.from_array(values, BIAS))
    onnx.save(model, path)
    return path


def failing(folder: Path) -> Path:
    """Write the network that fails for white photos: it looks up an index that does not exist."""
    path = write_candidate(folder, 0)
    model = onnx.load(path)
    graph = model.graph
    for name, value in (("limit", np.float32(0.9)), ("table", np.zeros(1, np.float32))):
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    nodes = [
        helper.make_node("ReduceMean", [graph.input[0].name], ["means"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("ReduceMax", ["means"], ["brightest"], keepdims=0),
        helper.make_node("Greater", ["brightest", "limit"], ["is_white"]),
        helper.make_node("Cast", ["is_white"], ["index"], to=onnx.TensorProto.INT64),
        helper.make_node("Gather", ["table", "index"], ["nothing"]),
    ]
    return _with_output(model, nodes, path)


def _with_output(model: onnx.ModelProto, nodes: list[onnx.NodeProto], path: Path) -> Path:
    """Add `nothing`, which these nodes compute, to the output of a network, and store it."""
    graph = model.graph
    name = graph.output[0].name
    for node in graph.node:
        node.output[:] = ["scores without" if each == name else each for each in node.output]
    graph.node.extend(nodes)
    graph.node.append(helper.make_node("Add", ["scores without", "nothing"], [name]))
    onnx.save(model, path)
    return path


def fine(folder: Path) -> Path:
    """Write the network with another bias."""
    return write_candidate(folder, 1)


CANDIDATES: dict[str, Callable[[Path], Path]] = {
    "slower": slower,
    "wrong class": wrong,
    "fails for one photo in 50": failing,
    "its process dies": fine,
    "fine": fine,
}
DYING = "its process dies"
EXPECTED = {name: "promoted" if name == "fine" else "rolled back" for name in CANDIDATES}


@dataclass(frozen=True, slots=True)
class Trial:
    """One rollout: its state at the end, its events, and the requests meanwhile."""

    name: str
    state: State
    lines: tuple[Line, ...]
    requests: list[Request]


def roll_out(
    name: str, running: servers.Supervised, folder: Path, load: BackgroundLoad, known: References
) -> Trial:
    """Publish a candidate, roll it out, wait for the end, and retire it."""
    repository = running.repository
    source = CANDIDATES[name](folder / "candidate")
    done = publish(repository, ROUTE, source, running.record, GATES, 0)
    known.add(done.version, source.parent)
    variant = f"v{done.version}"
    first = len(load.requests)
    logs = Journals(repository, ROUTE)
    _nereid(running, "rollout", "start", variant, *PLAN)
    deadline, is_killed = time.monotonic() + END_S, name != DYING
    while (state := logs.latest()) and state.is_active and time.monotonic() < deadline:
        if not is_killed and state.phase == "measuring" and state.share:
            for stub in stub_processes.find(running.record.pid, repository):
                if stub.model == f"{ROUTE}_{variant}":
                    os.kill(stub.process.pid, signal.SIGKILL)
                    is_killed = True
        time.sleep(0.2)
    time.sleep(2)
    if state is None or state.is_active:
        raise SystemExit(f"the rollout of '{name}' has not ended: {state}")
    trial = Trial(name, state, logs.lines(state.number), load.requests[first:])
    route = read_state(find_route(repository, ROUTE)).route()
    if state.result == "promoted":
        _nereid(running, "route", "set", f"{variant}=0", f"{state.pair.control[0]}=100")
    assert {each.name for each in route.variants if each.weight} == {
        variant if state.result == "promoted" else state.pair.control[0]
    }
    retire(repository, ROUTE, done.version, running.record)
    return trial


def _nereid(running: servers.Supervised, *words: str) -> None:
    command = [sys.executable, "-m", "nereid", *words, "--repository", str(running.repository)]
    subprocess.run(command, check=True, env={**running.environment})


def summarise(trial: Trial) -> record.Row:
    """Return the row of a rollout; times are those of the journal."""
    state, lines = trial.state, trial.lines
    decided = next((each for each in reversed(lines) if each.event in ("pass", "fail", "end")), lines[-1])
    fail = next((each for each in lines if each.event == "fail"), None)
    ours = theirs = 0
    for step in range(len(state.plan.steps)):
        looks = [each.look for each in lines if each.event == "look" and each.step == step and each.look]
        if looks:
            pairs = looks[-1].events.values()
            ours += max(pair[0].requests for pair in pairs)
            theirs += max(pair[1].requests for pair in pairs)
    failures = [each.failure for each in trial.requests if each.failure]
    by_candidate = [each for each in failures if PLANTED in each]
    return {
        "candidate": trial.name,
        "result": state.result,
        "step": state.step_name,
        "decided_s": round(((fail or decided).time - state.began).total_seconds(), 1),
        "requests": len(trial.requests),
        "candidate_requests": ours,
        "rollback_s": round((lines[-1].time - fail.time).total_seconds(), 2) if fail else None,
        "failed_by_candidate": len(by_candidate),
        "failed_otherwise": len(failures) - len(by_candidate),
        "reasons": list(state.reasons),
        "failures": sorted({each[:200] for each in failures})[:5],
    }


def timeline(trial: Trial) -> list[record.Row]:
    """Return the looks of a rollout: seconds since its start, share, and rates of both."""
    began = trial.state.began
    return [
        {
            "s": round((each.time - began).total_seconds(), 1),
            "percent": trial.state.at(each.step).share * 100,
            "events": {name: [pair[0].rate, pair[1].rate] for name, pair in each.look.events.items()},
        }
        for each in trial.lines
        if each.look
    ]


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/rollouts.md."""
    return record.markdown(
        HEADINGS,
        (
            (
                row["candidate"],
                row["result"],
                row["step"],
                f"{row['decided_s']:.0f} s",
                f"{row['requests']:,}",
                f"{row['candidate_requests']:,}",
                f"{row['rollback_s']:.1f} s" if row["rollback_s"] is not None else "",
                f"{row['failed_by_candidate'] + row['failed_otherwise']:,}",
                "; ".join(row["reasons"]),
            )
            for row in rows
        ),
    )


def main() -> int:
    """Roll out, print and record; exit status 1 if a candidate had another result than expected."""
    args = record.parsed(record.parser(__doc__))
    white = io.BytesIO()
    PIL.Image.new("RGB", (400, 300), "white").save(white, "JPEG")
    photos = [COFFEE.read_bytes()] * (WHITE_EVERY - 1) + [white.getvalue()]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        repository = shutil.copytree(assets.REPOSITORY, folder / "models")
        path = repository / f"{ROUTE}.route.json"
        _prepare(path)
        (folder / "run").mkdir()
        with servers.supervised(repository, folder / "run", os.environ) as running:
            known = References(repository, photos)
            with BackgroundLoad(
                running.record, ROUTE, CALLERS, PAUSE_S, check=known.check, photos=photos
            ) as load:
                trials = [roll_out(name, running, folder, load, known) for name in CANDIDATES]
    rows = [summarise(each) for each in trials]
    print(markdown(rows))
    missed = [
        f"{row['candidate']}: expected {EXPECTED[row['candidate']]}, got {row['result']}"
        for row in rows
        if row["result"] != EXPECTED[row["candidate"]]
    ]
    missed += [
        f"{row['candidate']}: traffic back after {row['rollback_s']} s"
        for row in rows
        if (row["rollback_s"] or 0) > MAX_ROLLBACK_S
    ]
    missed += [
        f"{row['candidate']}: {row['failed_otherwise']} other failures"
        for row in rows
        if row["failed_otherwise"]
    ]
    result = {
        "callers": CALLERS,
        "plan": list(PLAN),
        "rows": rows,
        "timelines": {each.name: timeline(each) for each in trials},
    }
    return record.finish(args.record, result, missed)


def _prepare(path: Path) -> None:
    """Give all traffic to one variant, and let shadows run under load."""
    route = json.loads(path.read_text())
    for number, each in enumerate(route["variants"]):
        each["weight"] = 0 if number else 100
    route["shadow_max_in_flight"] = SHADOWS_IN_FLIGHT
    path.write_text(json.dumps(route))


if __name__ == "__main__":
    record.end(main)
