"""Saturating load over HTTP by `wrk`, which leaves more of the cores to the server than a Python client."""

import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from nereid.tune.closed_loop import Load, LoadFailed

MISSING = "wrk not found; fix: apt-get install wrk"
# An answer that takes longer counts as failed. wrk's own 2 s would end a run on a machine that is only slow.
TIMEOUT_S = 30
MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def is_installed() -> bool:
    """Tell whether `wrk` is there."""
    return shutil.which("wrk") is not None


def version() -> str:
    """Return what it says of itself."""
    said = subprocess.run(["wrk", "-v"], capture_output=True, text=True)
    return (said.stdout or said.stderr).split("[")[0].removeprefix("wrk").strip()


def post(
    port: int,
    path: str,
    photo: Path,
    concurrency: int,
    seconds: float,
    headers: Mapping[str, str] | None = None,
) -> Load:
    """Post `photo` to `path` as the raw request body, over and over.

    Raises:
        LoadFailed: a request failed, or none was answered.
    """
    lines = ['wrk.method = "POST"', f'wrk.body = io.open("{photo}", "rb"):read("*a")']
    for name, value in {"Inference-Header-Content-Length": "0", **(headers or {})}.items():
        lines.append(f'wrk.headers["{name}"] = "{value}"')
    script = photo.with_suffix(".lua")
    script.write_text("\n".join(lines) + "\n")
    url = f"http://127.0.0.1:{port}{path}"
    # wrk counts whole seconds.
    load = ["-t1", f"-c{concurrency}", f"-d{math.ceil(seconds)}", f"--timeout={TIMEOUT_S}s", "--latency"]
    args = ["wrk", *load, "-s", str(script), url]
    return parse(subprocess.run(args, capture_output=True, text=True, check=True).stdout)


def parse(text: str) -> Load:
    """Read what wrk printed.

    Raises:
        LoadFailed: a request failed, or none was answered.
    """
    if "Non-2xx" in text or "Socket errors" in text:
        raise LoadFailed(f"requests failed, so the rate means nothing:\n{text}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    answered = re.search(r"(\d+) requests in", text)
    percentiles = {
        part: float(value) * MS[unit]
        for part, value, unit in re.findall(r"(50|90|99)%\s+([\d.]+)(us|ms|s)", text)
    }
    if not rate or not answered or set(percentiles) != {"50", "90", "99"}:
        raise LoadFailed(f"wrk printed no rate:\n{text}")
    if not float(rate[1]):
        raise LoadFailed(f"nothing was answered in time to be counted; take longer:\n{text}")
    p50, p90, p99 = (percentiles[percent] for percent in ("50", "90", "99"))
    return Load(float(rate[1]), p50, p90, p99, int(answered[1]))
