"""Saturating load over HTTP by `wrk`, which leaves more of the cores to the server than a Python client."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MISSING = "wrk not found; mend: apt-get install wrk"
# An answer that takes longer counts as failed. wrk's own 2 s would end a run on a machine that is only slow.
TIMEOUT_S = 30
MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of load saw: images per second, and latencies in milliseconds."""

    rate: float
    p50_ms: float
    p90_ms: float
    p99_ms: float


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
    """Post `photo` to `path` as the raw request body, over and over; one that fails ends the measurement."""
    lines = ['wrk.method = "POST"', f'wrk.body = io.open("{photo}", "rb"):read("*a")']
    for name, value in {"Inference-Header-Content-Length": "0", **(headers or {})}.items():
        lines.append(f'wrk.headers["{name}"] = "{value}"')
    script = photo.with_suffix(".lua")
    script.write_text("\n".join(lines) + "\n")
    url = f"http://127.0.0.1:{port}{path}"
    # wrk counts whole seconds.
    load = ["-t1", f"-c{concurrency}", f"-d{max(1, round(seconds))}", f"--timeout={TIMEOUT_S}s", "--latency"]
    args = ["wrk", *load, "-s", str(script), url]
    return parse(subprocess.run(args, capture_output=True, text=True, check=True).stdout)


def parse(text: str) -> Load:
    """Read what wrk printed; it ends the measurement if a request has failed."""
    if "Non-2xx" in text or "Socket errors" in text:
        raise SystemExit(f"requests failed, so the rate means nothing:\n{text}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    percentiles = {
        part: float(value) * MS[unit]
        for part, value, unit in re.findall(r"(50|90|99)%\s+([\d.]+)(us|ms|s)", text)
    }
    if not rate or set(percentiles) != {"50", "90", "99"}:
        raise SystemExit(f"wrk printed no rate:\n{text}")
    if not float(rate[1]):
        raise SystemExit(f"nothing was answered in time to be counted; take longer:\n{text}")
    return Load(float(rate[1]), percentiles["50"], percentiles["90"], percentiles["99"])
