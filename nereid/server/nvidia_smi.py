"""GPUs as nvidia-smi reports them: parts of GPUs (MIG), processes, slow clocks, and those a server may use.

No CUDA library is loaded, so a broken driver can neither crash nor block this process.
"""

import csv
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid.base.errors import ServerError
from nereid.base.processes import run_within
from nereid.repository.instance_sizing import DRIVER

PROGRAM = "nvidia-smi"
DEVICES = Path("/dev")
# Device files of GPUs; WSL has one for all of them.
DEVICE_FILES = ("nvidia[0-9]*", "dxg")
TIMEOUT_S = 10.0
PROGRAM_FIX = (
    "install NVIDIA's driver with its tools; in a container, NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)
# What nvidia-smi prints for a value that a GPU does not report.
UNKNOWN = ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[Insufficient Permissions]", "")
CSV = "--format=csv,noheader,nounits"
# Columns of `nvidia-smi --query-gpu` in the order of the fields of `Gpu`, and those with numbers.
QUERY = (
    "index,name,uuid,driver_version,compute_cap,memory.total,memory.used,power.limit,clocks.max.sm,"
    "mig.mode.current,compute_mode,persistence_mode,ecc.errors.uncorrected.volatile.total"
)
COLUMNS = QUERY.split(",")
NUMBERS = ("memory.total", "memory.used", "power.limit", "clocks.max.sm", COLUMNS[-1])
# Lines of `nvidia-smi -q -d PERFORMANCE` that mean a GPU is slower than it could be. Drivers before 535 call
# the section "Clocks Throttle Reasons", later ones "Clocks Event Reasons".
SLOWDOWNS = (
    "SW Power Cap",
    "HW Slowdown",
    "HW Thermal Slowdown",
    "HW Power Brake Slowdown",
    "SW Thermal Slowdown",
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a GPU; a value that the GPU does not report is None."""

    index: str
    name: str
    uuid: str
    driver: str
    compute_capability: str | None
    memory_total_mib: float | None
    memory_used_mib: float | None
    power_limit_w: float | None
    clock_max_mhz: float | None
    mig: str | None
    compute_mode: str | None
    persistence: str | None
    ecc_errors: float | None


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a part of a GPU (MIG), as a server may name it; a part has no index."""

    index: str
    name: str
    uuid: str

    @property
    def is_part(self) -> bool:
        """Whether this is a part of a GPU."""
        return not self.index

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.index, self.name, self.uuid)))


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU; containers and WSL may hide its memory."""

    uuid: str
    pid: int
    name: str
    memory_mib: int | None


def why_absent(path: str, devices: Path = DEVICES, driver: Path = DRIVER) -> str:
    """Return why this machine has no GPU, or "" if it may have one, without loading or starting anything.

    Args:
        path: the variable PATH.
        driver: file of a loaded driver, which also exists in containers without a GPU.
    """
    if any(any(devices.glob(pattern)) for pattern in DEVICE_FILES):
        return ""
    if not driver.exists():
        return "no NVIDIA GPU"
    if shutil.which(PROGRAM, path=path) is None:
        return "no NVIDIA GPU here: the machine has a driver, but this process sees no device"
    return ""  # nvidia-smi creates the device files after a boot


def run(path: str | None, *args: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return the output of `nvidia-smi`, found through `path` or this process's PATH.

    Raises:
        ServerError: it is missing, fails or times out, for example because the driver does not respond.
    """
    program = shutil.which(PROGRAM, path=path)
    if program is None:
        raise ServerError(f"{PROGRAM} is missing", PROGRAM_FIX)
    status, output = run_within([program, *args], timeout_s)
    if status is None:
        raise ServerError(
            f"{PROGRAM} has not ended after {timeout_s:g} s: the driver does not respond",
            "restart the machine; the reason is in the kernel's log (dmesg, lines with Xid)",
        )
    if status:
        text = " ".join(output.split()) or f"exit code {status}"
        raise ServerError(f"{PROGRAM} failed: {text}", "reload the driver, or restart the machine")
    return output.strip()


def read_gpus(path: str | None = None) -> list[Gpu]:
    """Return the GPUs of this machine; errors as for `run`."""
    table = run(path, f"--query-gpu={QUERY}", CSV)
    rows = csv.reader(table.splitlines(), skipinitialspace=True)
    # A damaged GPU adds a line of text.
    return [Gpu(*map(_value, COLUMNS, row)) for row in rows if len(row) == len(COLUMNS)]


def read_devices(path: str | None = None) -> list[Device]:
    """Return the GPUs and the parts of GPUs; errors as for `run`."""
    return parse_devices(run(path, "--list-gpus"))


def parse_devices(text: str) -> list[Device]:
    """Parse `nvidia-smi --list-gpus`."""
    rows = re.findall(r"^(?:GPU (\d+): (.+?)|\s+(MIG .+?):?) \(UUID: (\S+)\)$", text, re.MULTILINE)
    return [Device(index, " ".join((gpu or part).split()), uuid) for index, gpu, part, uuid in rows]


def parts_of(uuid: str, devices: Sequence[Device]) -> list[Device]:
    """Return the parts of a GPU, which follow it in the list."""
    parts: list[Device] = []
    is_below = False
    for device in devices:
        is_below = device.uuid == uuid if not device.is_part else is_below
        parts += [device] if is_below and device.is_part else []
    return parts


def read_processes(path: str | None = None) -> list[GpuProcess]:
    """Return the processes that compute on GPUs; errors as for `run`."""
    table = run(path, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", CSV)
    # A name may contain commas.
    rows = re.findall(r"^(\S+), (\d+), (.*), (\S+|\[.*\])$", table, re.MULTILINE)
    return [
        GpuProcess(uuid, int(pid), name, int(memory) if memory.isdecimal() else None)
        for uuid, pid, name, memory in rows
    ]


def read_cuda_version(path: str | None = None) -> str:
    """Return the newest CUDA release that the driver supports; errors as for `run`."""
    match = re.search(r"CUDA(?: UMD)? Version\s*:\s*([\d.]+)", run(path))
    return match[1] if match else ""


def read_slowdowns(path: str | None = None) -> list[str]:
    """Return the reasons why any GPU is slow now; errors as for `run`."""
    text = run(path, "-q", "-d", "PERFORMANCE")
    lines = re.findall(r"^\s*(\w[\w ]*?)\s*: (?:Active)$", text, re.MULTILINE)
    return [*dict.fromkeys(reason for reason in lines if reason in SLOWDOWNS)]


def visible(devices: Sequence[Device], environment: Mapping[str, str]) -> list[Device]:
    """Return the devices that CUDA shows to a process with this environment.

    Source: CUDA's documentation of `CUDA_VISIBLE_DEVICES`: the entries after an invalid one are ignored.
    """
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return [device for device in devices if not device.is_part]
    selection: list[Device] = []
    for gpu_id in environment["CUDA_VISIBLE_DEVICES"].split(","):
        matching = [device for device in devices if matches(device, gpu_id.strip())]
        if len(matching) != 1:
            break
        selection += matching
    return selection


def matches(device: Device, gpu_id: str) -> bool:
    """Return whether an id names a device: by its index, its UUID, or a prefix of its UUID."""
    return (
        gpu_id == device.index if gpu_id.isdecimal() else len(gpu_id) > 4 and device.uuid.startswith(gpu_id)
    )


def _value(column: str, text: str) -> Any:
    text = text.strip()
    if text in UNKNOWN:
        return None
    return float(text) if column in NUMBERS else text


def select(gpu_ids: str, environment: Mapping[str, str], devices: Path = DEVICES) -> dict[str, str]:
    """Return the environment variables with which a server and its stubs see only the named GPUs.

    Raises:
        ValueError: the machine has no GPU, or not this one; the message lists those it has.
    """
    path = environment.get("PATH", "")
    if reason := why_absent(path, devices):
        raise ValueError(f"--gpu-id {gpu_ids}: {reason}")
    try:
        machine_devices = read_devices(path)
    except ServerError as error:
        raise ValueError(f"--gpu-id {gpu_ids}: {error}") from None
    # UUIDs, because CUDA sorts GPUs by speed, and nvidia-smi by slot.
    return {"CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in parse(gpu_ids, machine_devices))}


def parse(gpu_ids: str, devices: Sequence[Device]) -> list[Device]:
    """Parse indexes of nvidia-smi and UUIDs, separated by commas.

    Raises:
        ValueError: an id names no device, several devices, or one that CUDA cannot use with the others.
    """
    selection: list[Device] = []
    for gpu_id in [part.strip() for part in gpu_ids.split(",")]:
        matching = [device for device in devices if matches(device, gpu_id)]
        if len(matching) != 1:
            available = "; ".join(map(str, devices)) or "none"
            problem = "several GPUs match" if matching else "no GPU is called"
            raise ValueError(f"--gpu-id {gpu_ids}: {problem} '{gpu_id}'; this machine has: {available}")
        selection += matching
    if len(set(selection)) < len(selection):
        raise ValueError(f"--gpu-id {gpu_ids}: expected each GPU once")
    if divided := [device for device in selection if parts_of(device.uuid, devices)]:
        parts = "; ".join(map(str, parts_of(divided[0].uuid, devices)))
        raise ValueError(
            f"--gpu-id {gpu_ids}: MIG divides GPU {divided[0].index}; expected the UUID of a part: {parts}"
        )
    if len(selection) > 1 and any(device.is_part for device in selection):
        raise ValueError(f"--gpu-id {gpu_ids}: expected one part of a GPU alone, because CUDA uses only one")
    return selection
