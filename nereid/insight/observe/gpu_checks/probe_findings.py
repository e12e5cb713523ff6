"""Findings from programs that use the GPU: how they ended, and the fix."""

import re
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nereid.base.processes import run_within
from nereid.insight.observe.finding import Finding
from nereid.server.gpu import cuda_packages

# The first use of a GPU after a start of the machine takes seconds, and ONNX Runtime loads 1 GB of libraries.
PROBE_S = 60.0
MODULE = "nereid.insight.observe.gpu_checks.gpu_probe"
MISSING_LIBRARY = re.compile(r"\b(lib[\w+-]+\.so[.\d]*): cannot open shared object file")
# Last lines of a program that are not its reason.
NOISE = re.compile(r"^\s|^\d{4}-\d\d-\d\d .*\[W:|^Traceback|^$")
COLORS = re.compile(r"\x1b\[[\d;]*m")


class Probe(NamedTuple):
    """A program of `gpu_probe`: its name there, and the name of its finding."""

    name: str
    what: str


PROVIDER, CUPY, CODEC = (
    Probe("provider", "CUDA provider"),
    Probe("cupy", "CuPy"),
    Probe("codec", "nvImageCodec"),
)


def examine(environment: Mapping[str, str], cuda: int) -> Iterator[Finding]:
    """Run all programs, with the environment of a server; yield their findings.

    Args:
        environment: variables of a server, with the paths of CUDA's libraries.
        cuda: major release of CUDA of the installed packages.
    """
    yield run(PROVIDER, environment, cuda)
    found = run(CUPY, environment, cuda)
    yield found
    if found.verdict == "ok":  # the program for nvImageCodec needs CuPy, too
        yield run(CODEC, environment, cuda)


def run(probe: Probe, environment: Mapping[str, str], cuda: int, limit_s: float = PROBE_S) -> Finding:
    """Run a program in a process of its own, for at most `limit_s` seconds."""
    words = [sys.executable, "-P", "-m", MODULE, probe.name]
    # Otherwise CuPy may find the kernel on the disk, and not compile it.
    variables = {**environment, "CUPY_CACHE_IN_MEMORY": "1"}
    status, output = run_within(words, limit_s, variables)
    return finding(probe.what, status, output, limit_s, cuda)


def finding(what: str, status: int | None, output: str, limit_s: float, cuda: int) -> Finding:
    """Return the finding about a program.

    Args:
        what: name of the finding.
        status: its exit status: negative after a signal, None if it had to be killed.
        output: all that it printed.
        limit_s: its time limit, in seconds.
        cuda: major release of CUDA of the installed packages.
    """
    output = COLORS.sub("", output)
    lines = [line for line in output.splitlines() if not NOISE.search(line)]
    last = lines[-1].strip() if lines else "no output"
    if status == 0:
        return Finding(what, "ok", last)
    fix = fix_of(output, cuda)
    if status is None:
        text = f"not done after {limit_s:g} s; its output ends: {last}"
        return Finding(what, "fail", text, fix or "dmesg (lines with Xid); restart the machine")
    if status < 0:
        text = f"a library ended the process with {signal.Signals(-status).name}; its output ends: {last}"
        return Finding(what, "fail", text, fix or cuda_packages.install(cuda))
    if missing := MISSING_LIBRARY.search(output):
        return Finding(what, "fail", f"{missing[1]} is missing; {last}", fix)
    return Finding(what, "fail", last, fix)


def fix_of(text: str, cuda: int) -> str:
    """Return the fix for a known message of CUDA's libraries, CuPy or ONNX Runtime, else nothing."""
    if missing := MISSING_LIBRARY.search(text):
        if missing[1].startswith("libcuda.so"):
            return "install NVIDIA's driver; in a container, NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        if cuda == 13:
            return f"{cuda_packages.install(13)} nvidia-cudnn-cu13 nvidia-cublas nvidia-cufft nvidia-curand"
        return cuda_packages.install(cuda)
    return next((fix for words, fix in FIXES.items() if words in text), "")


# Texts of cudaGetErrorString and cudaGetErrorName, and of our probes. Source: CUDA Runtime API, cudaError_t.
FIXES = {
    "driver version is insufficient": "install a newer driver (see the line `driver`)",
    "system not yet initialized": "systemctl start nvidia-fabricmanager",
    "no CUDA-capable device": "unset CUDA_VISIBLE_DEVICES, or correct it",
    "devices are busy or unavailable": "end the other process, or nvidia-smi --compute-mode=DEFAULT",
    "no kernel image is available": "install the extra that supports this GPU (see the line `GPU`)",
    "out of memory": "end other processes on the GPU (see the line `GPU memory`)",
    "OutOfMemory": "end other processes on the GPU (see the line `GPU memory`)",
    "has no CUDAExecutionProvider": "pip uninstall -y onnxruntime, then install the extra again",
}
