"""`nereid doctor`: is everything here that the embedded server needs, and if not, which command mends it."""

import importlib.metadata
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ops import preflight
from ops.embedded import ServerError, environment, find_wheel

# nvidia-pytriton does not say which Triton it carries; an end-to-end test asks the server itself.
TRITON_OF_PYTRITON = {"0.7.0": "2.51.0 (24.10)"}
# One stub process takes 1 MB at least, and grows with the tensors in flight.
MIN_SHM_BYTES = 256 * 2**20
INSTALL = "pip install -e '.[embedded,cpu]'"
DEFAULT_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: `ok`, `note` (works without) or `fail`, what was found, and what mends it."""

    what: str
    verdict: Literal["ok", "note", "fail"]
    found: str
    mend: str = ""


def examine(inherited: Mapping[str, str]) -> Iterator[Finding]:
    """Look at everything in turn."""
    for check in CHECKS:
        yield check()
    yield _stub_links(inherited)
    for name, port in DEFAULT_PORTS.items():
        yield _port(name, port)


def _python() -> Finding:
    missing = preflight.missing()
    if missing:
        found, _, mend = missing[0].partition("; mend: ")
        return Finding("Python", "fail", f"missing: {found}", mend)
    return Finding("Python", "ok", f"{preflight.PYTHON}, libpython in {preflight.find_libpython()}")


def _wheel() -> Finding:
    version = _installed("nvidia-pytriton")
    if not version:
        return Finding("Triton", "fail", "nvidia-pytriton is not installed", INSTALL)
    triton = TRITON_OF_PYTRITON.get(version, "unknown")
    return Finding("Triton", "ok", f"{triton} in nvidia-pytriton {version}")


def _onnxruntime() -> Finding:
    try:
        import onnxruntime
    except ImportError:
        return Finding("ONNX Runtime", "fail", "not installed", INSTALL)
    both = [name for name in ("onnxruntime", "onnxruntime-gpu") if _installed(name)]
    if len(both) > 1:
        mend = f"pip uninstall -y {' '.join(both)} && {INSTALL}"
        return Finding("ONNX Runtime", "fail", f"{' and '.join(both)} overwrite each other's files", mend)
    providers = ", ".join(onnxruntime.get_available_providers())
    return Finding("ONNX Runtime", "ok", f"{onnxruntime.__version__} with {providers}")


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("/dev/shm", "fail", "missing", "mount -t tmpfs tmpfs /dev/shm")
    usage = shutil.disk_usage("/dev/shm")
    found = f"{usage.free / 2**20:.0f} MB free of {usage.total / 2**20:.0f} MB"
    if usage.free < MIN_SHM_BYTES:
        mend = "mount -o remount,size=1g /dev/shm (in a container: --shm-size=1g)"
        return Finding("/dev/shm", "fail", f"{found}, expected {MIN_SHM_BYTES / 2**20:.0f} MB", mend)
    return Finding("/dev/shm", "ok", found)


def _gpu() -> Finding:
    version = Path("/proc/driver/nvidia/version")
    if not version.exists():
        return Finding("GPU", "note", "no NVIDIA driver: models are served on the CPU")
    return Finding("GPU", "ok", version.read_text().splitlines()[0])


def _stub_links(inherited: Mapping[str, str]) -> Finding:
    try:
        wheel = find_wheel()
        linked = subprocess.run(
            ["ldd", wheel.stub], env=environment(wheel, inherited), capture_output=True, text=True, check=True
        ).stdout
    except (ServerError, OSError, subprocess.CalledProcessError) as error:
        return Finding("stub's libraries", "fail", str(error), "the lines above first")
    missing = [line.split()[0] for line in linked.splitlines() if "not found" in line]
    if missing:
        return Finding(
            "stub's libraries", "fail", f"not found: {', '.join(missing)}", "apt-get install libexpat1"
        )
    return Finding("stub's libraries", "ok", "all found")


def _port(name: str, port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            mend = f"nereid serve --{name}-port 0"
            return Finding(f"{name} port", "note", f"{port} cannot be used: {error.strerror}", mend)
    return Finding(f"{name} port", "ok", f"{port} is free")


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


CHECKS: tuple[Callable[[], Finding], ...] = (_python, _wheel, _onnxruntime, _shared_memory, _gpu)
