"""Load over HTTP and gRPC by NVIDIA's `perf_analyzer`, the only generator here for both protocols.

The last binary outside NVIDIA's containers is in a wheel, which is downloaded when it is first needed.
"""

import base64
import csv
import io
import json
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid.tune.load_generator import Load, LoadFailed

VERSION = "2.50.0"
# Only the wheel for manylinux1 contains the binary.
WHEELS = {
    f"tritonclient=={VERSION}": ("perf_analyzer", ["--platform", "manylinux1_x86_64"]),
    "nvidia-cuda-runtime-cu12==12.9.79": ("libcudart.so.12", []),
}
MACHINE = "x86_64"
LOADER_ERROR = "error while loading shared libraries: "
PACKAGES = {"libb64.so.0d": "apt-get install libb64-0d", "libssl.so.3": "apt-get install libssl3"}
# It reports three windows in a row, here with any stability, and repeats a window without a response.
WINDOWS, MIN_WINDOW_S, TRIALS = 3, 1.0, 10
TOO_SHORT, LONGER = "use a larger time window", 4
TIMEOUT_S = 60.0


class Unavailable(Exception):
    """perf_analyzer is not available; the message has the reason and the fix."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address and the model; `input_file` is from `write_input`."""

    protocol: str
    port: int
    model: str
    input_file: Path


@dataclass(frozen=True, slots=True)
class Analyzer:
    """The binary, in a folder with a library that it needs."""

    folder: Path

    def load(self, target: Target, concurrency: int, seconds: float) -> Load:
        """Keep `concurrency` requests in flight.

        The load lasts a few seconds longer than `seconds`, and longer still after windows without a response.

        Raises:
            LoadFailed: a request failed, or none was answered.
        """
        window_s = max(seconds / WINDOWS, MIN_WINDOW_S)
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "report.csv"
            done = self._start(target, concurrency, window_s, report)
            if TOO_SHORT in done.stdout:
                done = self._start(target, concurrency, window_s * LONGER, report)
            if done.returncode or not report.exists():
                raise LoadFailed(f"perf_analyzer failed, exit status {done.returncode}:\n{done.stdout}")
            return parse(report.read_text())

    def _start(
        self, target: Target, concurrency: int, window_s: float, report: Path
    ) -> subprocess.CompletedProcess[str]:
        return self._run(
            *("-m", target.model, "-i", target.protocol, "-u", f"127.0.0.1:{target.port}"),
            *("--input-data", str(target.input_file), "--shape", "image:1"),
            *("--concurrency-range", str(concurrency), "--async", "-f", str(report)),
            *("--measurement-interval", str(round(window_s * 1000))),
            *("--stability-percentage", "999", "--max-trials", str(TRIALS)),
            timeout_s=2 * TRIALS * window_s + TIMEOUT_S,
        )

    def why_unusable(self) -> str:
        """Return why the binary does not run on this machine, with the fix; empty if it runs."""
        try:
            done = self._run("--version", timeout_s=TIMEOUT_S)
        except OSError as error:
            return f"perf_analyzer cannot be started: {error}"
        if LOADER_ERROR not in done.stdout:
            return f"perf_analyzer does not run here: {done.stdout.strip()}" if done.returncode else ""
        library = done.stdout.partition(LOADER_ERROR)[2].partition(":")[0]
        fix = PACKAGES.get(library, f"install the package that has {library}")
        return f"perf_analyzer needs {library}; fix: {fix}"

    def _run(self, *words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [self.folder / "perf_analyzer", *words],
                env={"LD_LIBRARY_PATH": str(self.folder)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise LoadFailed(f"perf_analyzer did not end within {timeout_s:.0f} s") from None


def parse(report: str) -> Load:
    """Parse the report of one concurrency: images per second, and latencies in microseconds."""
    try:
        (row,) = csv.DictReader(io.StringIO(report))
        p50, p90, p99 = (float(row[f"p{percent} latency"]) / 1e3 for percent in (50, 90, 99))
        return Load(float(row["Inferences/Second"]), p50, p90, p99)
    except (ValueError, KeyError) as error:
        raise LoadFailed(f"perf_analyzer's report is invalid ({error!r}):\n{report}") from None


def write_input(path: Path, image: bytes) -> None:
    """Write the input file with one image, as an element of a BYTES tensor with its length."""
    element = base64.b64encode(struct.pack("<I", len(image)) + image).decode()
    path.write_text(json.dumps({"data": [{"image": {"b64": element}}]}))


def find(environment: Mapping[str, str]) -> Analyzer:
    """Return the binary from the user's cache, after a download if necessary.

    Raises:
        Unavailable: the binary cannot be downloaded, or does not run here.
    """
    if platform.machine() != MACHINE:
        raise Unavailable(f"perf_analyzer is built for {MACHINE}, this machine is {platform.machine()}")
    cache = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "/")) / ".cache")
    folder = Path(cache) / "nereid" / f"perf_analyzer-{VERSION}"
    if not folder.is_dir():
        _fetch(folder)
    analyzer = Analyzer(folder)
    if reason := analyzer.why_unusable():
        raise Unavailable(reason)
    return analyzer


def _fetch(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        for requirement, (member, options) in WHEELS.items():
            _extract(_download(requirement, options, Path(scratch)), member, unpacked)
        (unpacked / "perf_analyzer").chmod(0o755)
        try:
            unpacked.replace(folder)  # atomic
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise


def _download(requirement: str, options: list[str], folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--only-binary=:all:", *options, "--dest", str(folder), requirement]
    done = subprocess.run([*pip, *options], capture_output=True, text=True)
    name = requirement.partition("==")[0].replace("-", "_")
    wheels = list(folder.glob(f"{name}-*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["no wheel was found"]
        raise Unavailable(
            f"perf_analyzer is not installed, and {requirement} could not be downloaded: {reason[0]}; "
            "fix: connect this machine to a package index"
        )
    return wheels[0]


def _extract(wheel: Path, name: str, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        member = next((each for each in archive.namelist() if each.endswith(f"/{name}")), None)
        if member is None:
            raise Unavailable(f"{wheel.name} has no {name}; fix: another VERSION in {__name__}")
        with archive.open(member) as source, (folder / name).open("wb") as target:
            shutil.copyfileobj(source, target)
