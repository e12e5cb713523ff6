"""`nereid doctor` checks of the GPUs, their driver and packages, and of programs that use them."""

import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nereid.base.errors import ServerError
from nereid.base.processes import run_within
from nereid.base.units import format_bytes
from nereid.server import gpu_profile, nvidia_smi
from nereid.server.gpu_profile import GpuPackages
from nereid.server.nvidia_smi import Device, Gpu, GpuProcess

Status = Literal["ok", "note", "fail"]
# The first use of a GPU after a boot takes seconds, and ONNX Runtime loads 1 GB of libraries.
PROBE_TIMEOUT_S = 60.0
MODULE = "nereid.insight.observe.gpu_probe"
MISSING_LIBRARY = re.compile(r"\b(lib[\w+-]+\.so[.\d]*): cannot open shared object file")
# Last lines of a program that do not give the reason.
NOISE = re.compile(r"^\s|^\d{4}-\d\d-\d\d .*\[W:|^Traceback|^$")
COLORS = re.compile(r"\x1b\[[\d;]*m")
# The programs of `gpu_probe`, and the names of their checks.
PROBES = {"provider": "CUDA provider", "cupy": "CuPy", "codec": "nvImageCodec"}
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
# Estimated, not measured: contexts of Triton and two stubs at 0.5 GiB each, and the pool of an ensemble.
MIN_FREE_MIB = 2048
MIB = 2**20
EXCLUSIVE_MODES = ("Exclusive_Process", "Exclusive_Thread", "Prohibited")
LOG_FIX = "dmesg (lines with NVRM or Xid); restart the machine"
RESTART_FIX = "restart the machine; if errors return, replace the GPU"
CLOCKS_FIX = "check the cooling and the power supply; nvidia-smi -q -d PERFORMANCE,POWER"
MPS = "nvidia-cuda-mps-server"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: `ok`, `note` (the server works anyway) or `fail`, the state found, and the fix."""

    check: str
    status: Status
    detail: str
    fix: str = ""


def examine_programs(environment: Mapping[str, str], cuda: int) -> Iterator[Finding]:
    """Run all programs in a server's environment; yield their findings."""
    for probe in PROBES:
        yield (outcome := run(probe, environment, cuda))
        if probe == "cupy" and outcome.status != "ok":  # the program for nvImageCodec also needs CuPy
            return


def run(probe: str, environment: Mapping[str, str], cuda: int, limit_s: float = PROBE_TIMEOUT_S) -> Finding:
    """Run a program in a process of its own, for at most `limit_s` seconds."""
    command = [sys.executable, "-P", "-m", MODULE, probe]
    # Otherwise CuPy may find the kernel on disk instead of compiling it.
    variables = {**environment, "CUPY_CACHE_IN_MEMORY": "1"}
    status, output = run_within(command, limit_s, variables)
    return finding(PROBES[probe], status, output, limit_s, cuda)


def finding(check: str, status: int | None, output: str, limit_s: float, cuda: int) -> Finding:
    """Return the finding about a program.

    Args:
        status: its exit status: negative after a signal, None if it had to be killed.
        cuda: major release of CUDA of the installed packages.
    """
    output = COLORS.sub("", output)
    lines = [line for line in output.splitlines() if not NOISE.search(line)]
    last_line = lines[-1].strip() if lines else "no output"
    if status == 0:
        return Finding(check, "ok", last_line)
    text, fix = last_line, fix_of(output, cuda)
    if status is None:
        text = f"timed out after {limit_s:g} s; its output ends: {last_line}"
        fix = fix or "dmesg (lines with Xid); restart the machine"
    elif status < 0:
        name = signal.Signals(-status).name
        text = f"the process crashed ({name}) in a library; its output ends: {last_line}"
        fix = fix or gpu_profile.install_command(cuda)
    elif missing := MISSING_LIBRARY.search(output):
        text = f"{missing[1]} is missing; {last_line}"
    return Finding(check, "fail", text, fix)


def fix_of(text: str, cuda: int) -> str:
    """Return the fix for a known message of CUDA's libraries, CuPy or ONNX Runtime, else nothing."""
    if missing := MISSING_LIBRARY.search(text):
        if missing[1].startswith("libcuda.so"):
            return "install NVIDIA's driver; in a container, NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        if cuda == 13:
            more = "nvidia-cudnn-cu13 nvidia-cublas nvidia-cufft nvidia-curand"
            return f"{gpu_profile.install_command(cuda)} {more}"
        return gpu_profile.install_command(cuda)
    return next((fix for phrase, fix in FIXES.items() if phrase in text), "")


def diagnose_gpus(
    environment: Mapping[str, str],
    servers: Collection[int],
    devices: Path = nvidia_smi.DEVICES,
    find_packages: Callable[[], GpuPackages] = GpuPackages.detect,
) -> Iterator[Finding]:
    """Run all checks of a machine with a GPU; one finding on a machine without.

    Args:
        servers: process groups of this user's running servers.
    """
    path = environment.get("PATH", "")
    if reason := nvidia_smi.why_absent(path, devices):
        yield Finding("GPU", "note", f"{reason}: models are served on the CPU")
        return
    installed = find_packages()
    try:
        gpus = nvidia_smi.read_gpus(path)
        if not gpus:
            raise ServerError("nvidia-smi lists no GPU", LOG_FIX)
        listed, processes = nvidia_smi.read_devices(path), nvidia_smi.read_processes(path)
        cuda, slowdowns = nvidia_smi.read_cuda_version(path), nvidia_smi.read_slowdowns(path)
    except ServerError as error:
        # Without packages for it, a server does not use the GPU.
        yield Finding("GPU", "fail" if installed.cupy else "note", error.reason, error.fix)
        return
    yield from (_gpu(gpu, installed.cuda) for gpu in gpus)
    driver = _driver(gpus[0].driver, cuda, installed.cuda)
    yield driver
    yield from _packages(installed)
    yield from (_memory(gpu, processes, servers) for gpu in gpus)
    problems = [*_modes(gpus, listed, processes), *_health(gpus, slowdowns)]
    full_speed = Finding("GPU state", "ok", "shared between processes, no memory errors, full clocks")
    yield from problems or [full_speed]
    # With an old driver, the programs would only fail again, with messages that are harder to read.
    if installed.cupy and installed.provider and driver.status == "ok":
        yield from examine_programs(environment, installed.cuda)


def _gpu(gpu: Gpu, cuda: int) -> Finding:
    if problem := gpu_profile.capability_problem(gpu.name, gpu.compute_capability, cuda):
        return Finding("GPU", "fail", *problem)
    memory = format_bytes(int(gpu.memory_total_mib * MIB)) if gpu.memory_total_mib else "unknown memory"
    capability = gpu.compute_capability or "unknown"
    return Finding("GPU", "ok", f"{gpu.index}: {gpu.name}, {memory}, compute capability {capability}")


def _driver(driver: str, cuda: str, needed: int) -> Finding:
    if problem := gpu_profile.driver_problem(cuda, driver, needed):
        return Finding("driver", "fail", *problem)
    packages = f"; the packages need CUDA {needed}" if needed else ""
    return Finding("driver", "ok", f"{driver} supports CUDA {cuda or 'of an unknown release'}{packages}")


def _packages(installed: GpuPackages) -> Iterator[Finding]:
    wants_gpu = bool(installed.cupy or installed.provider)
    verdict: Status = "fail" if wants_gpu else "note"
    problems = [*installed.problems()]
    if not wants_gpu:
        detail = "none for the GPU: models are served on the CPU"
        yield Finding("GPU packages", verdict, detail, problems[0].fix)
        return
    for problem in problems:
        yield Finding("GPU packages", verdict, *problem)
    if not problems:
        versions = ", ".join(f"{name} {version}" for name, version in installed.cupy.items())
        yield Finding("GPU packages", "ok", f"{versions}, CUDA provider of ONNX Runtime, nvImageCodec")


def _memory(gpu: Gpu, processes: Sequence[GpuProcess], servers: Collection[int]) -> Finding:
    if gpu.memory_total_mib is None or gpu.memory_used_mib is None:
        return Finding("GPU memory", "ok", f"{gpu.index}: not reported")
    free_mib = gpu.memory_total_mib - gpu.memory_used_mib
    others = [
        process for process in processes if process.uuid == gpu.uuid and not _is_ours(process.pid, servers)
    ]
    text = f"{gpu.index}: {format_bytes(int(free_mib * MIB))} free"
    if others:
        text += f"; used by {', '.join(map(_describe, others))}"
    if free_mib >= MIN_FREE_MIB:
        return Finding("GPU memory", "ok", text)
    if not others:
        text += "; processes of other containers or users may hold the rest"
    fix = f"end other processes, or nereid serve --gpu-id with a GPU that has {MIN_FREE_MIB} MiB free"
    return Finding("GPU memory", "note", text, fix)


def _describe(process: GpuProcess) -> str:
    memory = "" if process.memory_mib is None else f" {process.memory_mib} MiB"
    return f"{Path(process.name).name} (pid {process.pid}){memory}"


def _is_ours(pid: int, servers: Collection[int]) -> bool:
    try:
        return os.getpgid(pid) in servers
    except ProcessLookupError:  # of another container
        return False


def _modes(
    gpus: Sequence[Gpu], devices: Sequence[Device], processes: Sequence[GpuProcess]
) -> Iterator[Finding]:
    has_mps = any(Path(process.name).name == MPS for process in processes)
    for gpu in gpus:
        if gpu.compute_mode in EXCLUSIVE_MODES and not (has_mps and gpu.compute_mode == EXCLUSIVE_MODES[0]):
            text = f"{gpu.index}: mode {gpu.compute_mode}, and a server has several processes on a GPU"
            yield Finding("compute mode", "fail", text, f"nvidia-smi --id={gpu.index} --compute-mode=DEFAULT")
        if gpu.mig == "Enabled":
            yield _mig(gpu, devices)
        if gpu.persistence == "Disabled":
            text = f"{gpu.index}: off, so the first use of the GPU takes seconds longer"
            yield Finding("persistence mode", "note", text, "systemctl start nvidia-persistenced")


def _mig(gpu: Gpu, devices: Sequence[Device]) -> Finding:
    parts = nvidia_smi.parts_of(gpu.uuid, devices)
    if not parts:
        text = f"{gpu.index}: MIG is on, and the GPU has no part to compute on"
        fix = f"nvidia-smi mig --id {gpu.index} --create-gpu-instance PROFILE --default-compute-instance"
        return Finding("MIG", "fail", text, fix)
    listed = "; ".join(map(str, parts))
    text = f"{gpu.index}: MIG is on, and a server uses one part: {listed}"
    return Finding("MIG", "note", text, "nereid serve --gpu-id UUID")


def _health(gpus: Sequence[Gpu], slowdowns: Sequence[str]) -> Iterator[Finding]:
    for gpu in gpus:
        if gpu.ecc_errors:
            text = f"{gpu.index}: {gpu.ecc_errors:.0f} uncorrected memory errors since the driver was loaded"
            yield Finding("memory errors", "fail", text, RESTART_FIX)
    if slowdowns:
        text = f"a GPU is slowed down now: {', '.join(slowdowns)}"
        yield Finding("clocks", "note", text, CLOCKS_FIX)
