"""Saturating HTTP load by `wrk`, which leaves more of the cores to the server than a Python client."""

import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from nereid.insight.tune.load_generator import LoadFailed, LoadResult

MISSING = "wrk not found; fix: apt-get install wrk"
# Slower responses count as failed. The default of 2 s would fail on a slow machine.
TIMEOUT_S = 30
MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def is_installed() -> bool:
    """Check whether `wrk` is installed."""
    return shutil.which("wrk") is not None


def version() -> str:
    """Return the version that `wrk` reports."""
    done = subprocess.run(["wrk", "-v"], capture_output=True, text=True)
    return (done.stdout or done.stderr).split("[")[0].removeprefix("wrk").strip()


def post(
    port: int,
    path: str,
    photo: Path,
    concurrency: int,
    seconds: float,
    headers: Mapping[str, str] | None = None,
) -> LoadResult:
    """Post `photo` to `path` as the raw request body, repeatedly.

    Raises:
        LoadFailed: a request failed, or none was answered.
    """
    lines = ['wrk.method = "POST"', f'wrk.body = io.open("{photo}", "rb"):read("*a")']
    for name, value in {"Inference-Header-Content-Length": "0", **(headers or {})}.items():
        lines.append(f'wrk.headers["{name}"] = "{value}"')
    script = photo.with_suffix(".lua")
    script.write_text("\n".join(lines) + "\n")
    # wrk takes whole seconds only.
    load = ["-t1", f"-c{concurrency}", f"-d{math.ceil(seconds)}", f"--timeout={TIMEOUT_S}s", "--latency"]
    words = ["wrk", *load, "-s", str(script), f"http://127.0.0.1:{port}{path}"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in text or "Socket errors" in text:
        raise LoadFailed(f"requests failed, so the rate is invalid:\n{text}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    answered = re.search(r"(\d+) requests in", text)
    percentiles = {
        part: float(value) * MS[unit]
        for part, value, unit in re.findall(r"(50|90|99)%\s+([\d.]+)(us|ms|s)", text)
    }
    if not rate or not answered or set(percentiles) != {"50", "90", "99"}:
        raise LoadFailed(f"wrk printed no rate:\n{text}")
    if not float(rate[1]):
        raise LoadFailed(f"no request was answered in time; fix: a longer measurement\n{text}")
    p50, p90, p99 = (percentiles[percent] for percent in ("50", "90", "99"))
    return LoadResult(float(rate[1]), p50, p90, p99, int(answered[1]))
