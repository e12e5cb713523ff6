"""Readings of nvidia-smi, from recorded outputs."""

import os
import time

import pytest

from nereid.base.errors import ServerError
from nereid.server import nvidia_smi
from nereid.server.nvidia_smi import Device, GpuProcess
from tests import gpu_outputs as recorded

DEVICES = nvidia_smi.parse_devices(recorded.LIST)
DIVIDED = nvidia_smi.parse_devices(recorded.MIG_LIST)


def test_gpus_are_read():
    table = recorded.GPU + recorded.DESKTOP_GPU + "WARNING: infoROM is corrupted at gpu 0000:AF:00.0\n"

    first, second = nvidia_smi.parse_gpus(table)

    assert (first.index, first.uuid, first.compute_capability) == ("0", recorded.A100, "8.0")
    assert (first.memory_total_mib, first.mig, first.ecc_errors) == (81920.0, "Disabled", 0.0)
    assert (second.name, second.mig, second.ecc_errors) == ("NVIDIA GeForce GTX 1080", None, None)


def test_devices_are_read_with_the_parts_of_a_divided_gpu():
    assert DEVICES[1] == Device("1", "NVIDIA A100-SXM4-80GB", recorded.SECOND)
    assert DIVIDED[1] == Device("", "MIG 1g.10gb Device 0", recorded.PART)
    assert [each.uuid for each in nvidia_smi.parts_of(recorded.DIVIDED, DIVIDED)] == [
        recorded.PART,
        "MIG-a25704ba-3a06-5299-a795-fd7cf4d13973",
    ]
    assert nvidia_smi.parts_of(recorded.SECOND, DIVIDED) == []


def test_processes_releases_and_clocks_are_read():
    assert nvidia_smi.parse_processes(recorded.PROCESSES) == [
        GpuProcess(recorded.A100, 4194301, "/usr/local/bin/python3.10", 79872),
        GpuProcess(recorded.A100, 4194302, "a, b", None),
    ]
    assert nvidia_smi.parse_processes("") == []
    releases = [nvidia_smi.parse_cuda_version(each) for each in (recorded.HEAD, recorded.NEW_HEAD, "")]
    assert releases == ["12.2", "13.1", ""]
    assert nvidia_smi.parse_slowdowns(recorded.CLOCKS) == []
    assert nvidia_smi.parse_slowdowns(recorded.HOT.replace("Throttle", "Event")) == ["HW Thermal Slowdown"]


@pytest.mark.parametrize(
    ("devices", "driver", "path", "reason"),
    [
        ([], False, "/nowhere", "no NVIDIA GPU"),
        (["nvidia0"], False, "/nowhere", ""),
        (["dxg"], False, "/nowhere", ""),
        (["nvidiactl"], True, "/nowhere", "this process sees no device"),
    ],
    ids=["no GPU", "GPU", "WSL", "container without its GPU"],
)
def test_absence_needs_no_program(tmp_path, devices, driver, path, reason):
    """Device files decide: a driver's own files are visible in each container of the machine."""
    for name in devices:
        (tmp_path / name).touch()
    version = tmp_path / "version"
    if driver:
        version.touch()

    found = nvidia_smi.why_absent(path, tmp_path, version)

    assert reason in found
    assert bool(found) == bool(reason)


def test_failure_of_nvidia_smi_has_its_text(tmp_path):
    """nvidia-smi prints its errors on stdout."""
    environment = recorded.install_smi(tmp_path, {recorded.QUERY: recorded.NO_DRIVER}, status=9)

    with pytest.raises(ServerError, match="couldn't communicate with the NVIDIA driver") as raised:
        nvidia_smi.read_gpus(environment["PATH"])

    assert raised.value.fix == "reload the driver, or restart the machine"


def test_nvidia_smi_that_hangs_is_ended(tmp_path):
    """A driver that does not respond must not block a start of the server."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nsleep 300\n")
    program.chmod(0o755)
    began_s = time.monotonic()

    with pytest.raises(ServerError, match=r"has not ended after 0\.1 s"):
        nvidia_smi.run(f"{tmp_path}:{os.defpath}", timeout_s=0.1)

    assert time.monotonic() - began_s < 100


def test_missing_nvidia_smi_has_a_fix():
    """A container without the capability `utility` has none."""
    with pytest.raises(ServerError, match="NVIDIA_DRIVER_CAPABILITIES=compute,utility"):
        nvidia_smi.run("/nowhere")


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, [recorded.A100, recorded.SECOND]),
        ("1,0", [recorded.SECOND, recorded.A100]),
        ("GPU-d859", [recorded.SECOND]),
        ("", []),
        ("0,7,1", [recorded.A100]),
        ("NoDevFiles", []),
    ],
)
def test_visible_gpus_are_those_of_cuda(value, uuids):
    """Entries after an invalid one are ignored, as CUDA does."""
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}

    assert [each.uuid for each in nvidia_smi.visible(DEVICES, environment)] == uuids


@pytest.mark.parametrize(
    ("words", "devices", "uuids"),
    [
        ("1, 0", DEVICES, [recorded.SECOND, recorded.A100]),
        (recorded.A100, DEVICES, [recorded.A100]),
        (recorded.PART, DIVIDED, [recorded.PART]),
        ("1", DIVIDED, [recorded.SECOND]),
    ],
    ids=["order", "UUID", "part", "beside a divided one"],
)
def test_gpus_are_selected(words, devices, uuids):
    assert [each.uuid for each in nvidia_smi.parse(words, devices)] == uuids


@pytest.mark.parametrize(
    ("words", "devices", "message"),
    [
        ("2", DEVICES, "no GPU is called '2'; this machine has: 0, NVIDIA A100-SXM4-80GB, GPU-513536b6"),
        ("GPU-", DEVICES, "no GPU is called 'GPU-'"),
        ("0,0", DEVICES, "expected each GPU once"),
        ("0", DIVIDED, "MIG divides GPU 0; expected the UUID of a part: MIG 1g.10gb Device 0, MIG-feb88891"),
        (f"{recorded.PART},1", DIVIDED, "expected one part of a GPU alone"),
        ("0", [], "this machine has: none"),
    ],
    ids=["unknown", "prefix", "twice", "divided", "part and GPU", "no GPU"],
)
def test_unknown_gpu_is_an_error_with_the_known_ones(words, devices, message):
    """CUDA would ignore the entry, and the server would use no GPU."""
    with pytest.raises(ValueError, match="--gpu-id") as raised:
        nvidia_smi.parse(words, devices)

    assert message in str(raised.value)


def test_selected_gpus_reach_the_server_by_their_uuids(tmp_path):
    """CUDA and nvidia-smi number GPUs differently."""
    environment = recorded.install_smi(tmp_path, recorded.GOOD)

    found = nvidia_smi.select("1", {**environment, "CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "dev")

    assert found == {"CUDA_VISIBLE_DEVICES": recorded.SECOND}
