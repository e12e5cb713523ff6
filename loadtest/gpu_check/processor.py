"""The load of the section `speed` on the CPU of the same machine, and a short benchmark."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest import wrk
from loadtest.gpu_check import served
from loadtest.gpu_check.sections import Context, Findings
from loadtest.gpu_check.speed import PHOTO_WH
from nereid.tune import photos

ROOT = Path(__file__).resolve().parents[2]
PROFILE = "cpu"
LOAD_S = 1.0
# The part of the section that is left to the benchmark.
BENCH_S = 14.0
BENCH = ["--rounds", "1", "--seconds", "1", "--paths", "cpu", "--photos", "1080p", "--precisions", "fp32"]
BENCH += ["--concurrency", "8", "--protocols", "http", "--no-pieces", "--json"]


def measure(context: Context) -> Iterator[Findings]:
    """Yield rates and latencies of the profile `cpu`, and the rows of the benchmark."""
    photo = photos.jpeg(PHOTO_WH)
    with served.running(context, PROFILE) as server:
        loads: list[dict[str, Any]] = []
        for row in served.loads(server, photo, LOAD_S, lambda: context.left_s() - BENCH_S):
            loads.append(row)
            yield {"served": loads, "best_per_s": served.best(loads)}
    if wrk.is_installed():
        yield {"bench": bench(context.left_s())}


def rehearse(context: Context) -> Iterator[Findings]:
    """Yield the command of the benchmark, and a load of this CPU as short as possible."""
    yield {"bench_command": " ".join(["python -m loadtest.bench", *BENCH])}
    photo = photos.jpeg(photos.SIZES_WH["640x427"])
    with served.running(context, PROFILE) as server:
        yield {"rehearsed_load": next(served.loads(server, photo, 1.0, context.left_s), None)}


def bench(limit_s: float) -> dict[str, Any]:
    """Run the benchmark; returns its rows, or the reason why there are none."""
    words = [sys.executable, "-m", "loadtest.bench", *BENCH]
    try:
        done = subprocess.run(
            words, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=max(1.0, limit_s - 3)
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"not done after {limit_s:.0f} s"}
    # The exit status is 1 if a target of the benchmark is missed, which is a result.
    return {"rows": json.loads(done.stdout)["rows"]} if done.stdout else {"reason": "no output"}
