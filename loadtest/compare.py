"""A comparison of two checkouts in alternating rounds; the other one is measured twice, as A/A.

python -m loadtest.compare OTHER_CHECKOUT [--rounds 5] [--seconds 3] [--record compare]

Each checkout needs a virtual environment with `nereid` in `.venv`, as `make setup` makes it.
"""

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from loadtest import record, resource_usage, wrk
from nereid.assets import COFFEE
from nereid.contract import VARIANT_HEADER

HERE = Path(__file__).resolve().parent.parent
# The same checkout under two names shows the noise of the comparison itself.
BEFORE, AGAIN, AFTER = "before", "before, again", "after"
PREDICT, ROUTE, PINNED = "/predict", "/v2/models/classify/infer", "/v2/models/classify_v1/infer"
SATURATED, ALONE = 32, 1
ANY_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


@contextlib.contextmanager
def started(checkout: Path, run_dir: Path, *words: str) -> Iterator[tuple[int, dict[str, int]]]:
    """Run a `nereid` command of a checkout until it is ready; gives its pid and its ports."""
    process = subprocess.Popen(
        [str(checkout / ".venv" / "bin" / "nereid"), *words],
        cwd=checkout,
        env=os.environ | {"XDG_RUNTIME_DIR": str(run_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise SystemExit(f"{checkout}: nereid {words[0]} did not start; fix: run it by hand")
        yield process.pid, json.loads(line)
    finally:
        process.terminate()
        process.wait(timeout=90)


def measure(port: int, path: str, photo: Path, seconds: float, route: bool) -> dict[str, float]:
    """Measure one path: throughput and p99 at saturation, p50 of a single caller."""
    headers = {VARIANT_HEADER: "v1"} if route else {}
    wrk.post(port, path, photo, SATURATED, 1, headers)
    loaded = wrk.post(port, path, photo, SATURATED, seconds, headers)
    alone = wrk.post(port, path, photo, ALONE, seconds, headers)
    return {
        f"throughput_{SATURATED}": loaded.rate,
        f"p99_{SATURATED}_ms": loaded.p99_ms,
        "p50_1_ms": alone.p50_ms,
    }


def measure_checkout(checkout: Path, seconds: float) -> dict[str, dict[str, float]]:
    """Measure each path of one checkout, and the memory (PSS) of its processes after the load."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        photo = Path(folder) / "photo.jpg"
        photo.write_bytes(COFFEE.read_bytes())
        for profile in ("cpu", "ensemble"):
            with started(checkout, Path(folder), "serve", "--profile", profile, *ANY_PORTS) as (pid, ports):
                found[profile] = measure(ports["http"], PINNED, photo, seconds, route=False)
                if profile == "cpu":
                    found["route"] = measure(ports["http"], ROUTE, photo, seconds, route=True)
                    with started(checkout, Path(folder), "gateway", "--port=0") as (front, listens):
                        found["gateway"] = measure(listens["http"], PREDICT, photo, seconds, route=True)
                        found["gateway"]["memory_mb"] = resource_usage.memory_bytes(front) / resource_usage.MB
                found[profile]["memory_mb"] = resource_usage.memory_bytes(pid) / resource_usage.MB
    return found


def rows(rounds: list[record.Row]) -> list[record.Row]:
    """Return a row per path and measure: medians, and ratios to `before`.

    The ratio is the median of the rounds' own ratios, so that slow drifts of the machine cancel.
    The A/A columns compare `before` with itself.
    """
    made: list[record.Row] = []
    for path, measures in rounds[0][BEFORE].items():
        for name in measures:
            values = {side: [each[side][path][name] for each in rounds] for side in (BEFORE, AFTER)}
            ratios = {
                side: [each[side][path][name] / each[BEFORE][path][name] for each in rounds]
                for side in (AGAIN, AFTER)
            }
            made.append(
                {
                    "path": path,
                    "measure": name,
                    **{side: round(statistics.median(found), 2) for side, found in values.items()},
                    "after / before": round(statistics.median(ratios[AFTER]), 3),
                    "A/A": round(statistics.median(ratios[AGAIN]), 3),
                    "A/A min": round(min(ratios[AGAIN]), 3),
                    "A/A max": round(max(ratios[AGAIN]), 3),
                }
            )
    return made


def markdown(made: list[record.Row]) -> str:
    """Render a record's rows as the table of docs/benchmarks.md; a test compares the two."""
    return record.markdown([*made[0]], ([*row.values()] for row in made))


def main() -> int:
    """Measure both checkouts in turn; print and record the result."""
    parser = record.parser(__doc__, rounds=5, seconds=3.0)
    parser.add_argument("other", type=Path, help="the checkout that is compared with this one")
    args = record.parsed(parser, wrk.missing())
    sides = {BEFORE: args.other.resolve(), AFTER: HERE, AGAIN: args.other.resolve()}
    rounds = []
    for number in range(args.rounds):
        turns = record.turns(sides.items(), number)
        rounds.append({side: measure_checkout(checkout, args.seconds) for side, checkout in turns})
        print(f"round {number + 1} of {args.rounds} done at {time.strftime('%H:%M:%S')}", flush=True)
    made = rows(rounds)
    print(markdown(made))
    commit = subprocess.run(
        ["git", "-C", str(sides[BEFORE]), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return record.finish(args.record, {"before_commit": commit, "rounds": args.rounds, "rows": made})


if __name__ == "__main__":
    record.end(main)
