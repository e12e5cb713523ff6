"""Readings of nvidia-smi from recorded outputs, and the profile that `nereid serve` selects."""

import os
import time
from dataclasses import replace

import pytest

from nereid.base.assets import REPOSITORY
from nereid.base.errors import ServerError
from nereid.server import nvidia_smi
from nereid.server.command_line import ServerOptions, command, environment
from nereid.server.gpu_profile import check_named_gpus, choose, driver_problem
from nereid.server.installation import find_installation
from tests import gpu_outputs as recorded
from tests.tables import cases, rows

DEVICES = nvidia_smi.parse_devices(recorded.LIST)
DIVIDED = nvidia_smi.parse_devices(recorded.MIG_LIST)


@rows((recorded.HEAD, "12.2"), (recorded.NEW_HEAD, "13.1"), ("", ""))
def test_releases_and_clocks_of_any_driver_are_read(head, release, tmp_path):
    outputs = {"": head, recorded.PERFORMANCE: recorded.HOT.replace("Throttle", "Event")}
    path = recorded.install_smi(tmp_path, outputs)["PATH"]

    assert nvidia_smi.read_cuda_version(path) == release
    assert nvidia_smi.read_slowdowns(path) == ["HW Thermal Slowdown"]


@cases(
    no_GPU=([], "no NVIDIA GPU"),
    GPU=(["nvidia0"], ""),
    WSL=(["dxg"], ""),
    container_without_its_GPU=(["nvidiactl", "version"], "this process sees no device"),
)
def test_absence_needs_no_program(files, reason, tmp_path):
    """Device files decide: a driver's own files are visible in each container of the machine."""
    for name in files:
        (tmp_path / name).touch()

    problem = nvidia_smi.why_absent("/nowhere", tmp_path, tmp_path / "version")

    assert reason in problem
    assert bool(problem) == bool(reason)


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


@rows(
    (None, [recorded.A100, recorded.SECOND]),
    ("1,0", [recorded.SECOND, recorded.A100]),
    ("GPU-d859", [recorded.SECOND]),
    ("", []),
    ("0,7,1", [recorded.A100]),
    ("NoDevFiles", []),
)
def test_visible_gpus_are_those_of_cuda(value, uuids):
    """Entries after an invalid one are ignored, as CUDA does."""
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}

    assert [device.uuid for device in nvidia_smi.visible(DEVICES, environment)] == uuids


@cases(
    order=("1, 0", DEVICES, [recorded.SECOND, recorded.A100]),
    UUID=(recorded.A100, DEVICES, [recorded.A100]),
    part=(recorded.PART, DIVIDED, [recorded.PART]),
    beside_a_divided_one=("1", DIVIDED, [recorded.SECOND]),
)
def test_gpus_are_selected(words, devices, uuids):
    assert [device.uuid for device in nvidia_smi.parse(words, devices)] == uuids


@cases(
    unknown=("2", DEVICES, "no GPU is called '2'; this machine has: 0, NVIDIA A100-SXM4-80GB, GPU-513536b6"),
    prefix=("GPU-", DEVICES, "no GPU is called 'GPU-'"),
    twice=("0,0", DEVICES, "expected each GPU once"),
    divided=(
        "0",
        DIVIDED,
        f"MIG divides GPU 0; expected the UUID of a part: MIG 1g.10gb Device 0, {recorded.PART}; "
        "MIG 1g.10gb Device 1, MIG-a25704ba-3a06-5299-a795-fd7cf4d13973",
    ),
    part_and_GPU=(f"{recorded.PART},1", DIVIDED, "expected one part of a GPU alone"),
    no_GPU=("0", [], "this machine has: none"),
)
def test_unknown_gpu_is_an_error_with_the_known_ones(words, devices, message):
    """CUDA would ignore the entry, and the server would use no GPU."""
    with pytest.raises(ValueError, match="--gpu-id") as raised:
        nvidia_smi.parse(words, devices)

    assert message in str(raised.value)


def test_selected_gpus_reach_the_server_by_their_uuids(tmp_path):
    """CUDA and nvidia-smi number GPUs differently; the stubs are the server's children."""
    inherited = recorded.install_smi(tmp_path, recorded.GOOD) | {"CUDA_VISIBLE_DEVICES": "0"}

    variables = nvidia_smi.select("1", inherited, tmp_path / "dev")

    assert variables == {"CUDA_VISIBLE_DEVICES": recorded.SECOND}
    assert environment(find_installation({}), variables)["CUDA_VISIBLE_DEVICES"] == recorded.SECOND


NO_PROVIDER = "ONNX Runtime has no CUDA provider"
CUDA_13 = replace(recorded.CUDA_12, cupy={"cupy-cuda13x": "13.6.0"})


def chosen(folder, outputs=recorded.GOOD, installed=recorded.CUDA_12, repository=REPOSITORY, **more):
    """Return the choice on a machine with a GPU and recorded outputs."""
    variables = recorded.install_smi(folder, outputs, more.pop("status", 0)) | more
    return choose(repository, variables, folder / "dev", lambda: installed)


NEW_AND_OLD = {
    "": recorded.NEW_HEAD,
    recorded.QUERY: recorded.DESKTOP_GPU + recorded.GPU.replace("0", "1", 1),
    recorded.LISTED: "GPU 0: NVIDIA GeForce GTX 1080 (UUID: GPU-11ff)\n"
    + recorded.LIST.splitlines()[0].replace("GPU 0", "GPU 1"),
}
PARTS = {recorded.LISTED: recorded.MIG_LIST, recorded.QUERY: recorded.DIVIDED_GPU}


@cases(
    whole=({}, recorded.CUDA_12, {}, "NVIDIA A100-SXM4-80GB, CUDA provider, CuPy 13.6.0"),
    beside_an_old_one=(NEW_AND_OLD, CUDA_13, {}, ""),
    part=(PARTS, recorded.CUDA_12, {"CUDA_VISIBLE_DEVICES": recorded.PART}, "MIG 1g.10gb Device 0, "),
)
def test_gpu_with_its_packages_is_selected(outputs, installed, variables, reason, tmp_path):
    choice = chosen(tmp_path, recorded.GOOD | outputs, installed, **variables)

    assert choice.profile == "gpu"
    assert str(choice).startswith(f"profile gpu: {reason}")


@cases(
    CuPy=(replace(recorded.CUDA_12, cupy={}), {}, "CuPy is missing", "[embedded,gpu]"),
    codec=(replace(recorded.CUDA_12, has_codec=False), {}, "nvImageCodec is missing", "[embedded,gpu]"),
    CPU_package=(recorded.NOTHING, {}, NO_PROVIDER, "pip uninstall -y onnxruntime && "),
    nothing=(replace(recorded.NOTHING, runtimes=()), {}, NO_PROVIDER, "pip install"),
    both=(
        replace(recorded.CUDA_12, runtimes=("onnxruntime", "onnxruntime-gpu")),
        {},
        "onnxruntime and onnxruntime-gpu overwrite each other's files",
        "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'nereid-serving[embedded,gpu]'",
    ),
    two_CuPys=(
        replace(recorded.CUDA_12, cupy=CUDA_13.cupy | recorded.CUDA_12.cupy),
        {},
        "cupy-cuda13x and cupy-cuda12x overwrite each other's files",
        "pip uninstall -y cupy-cuda13x cupy-cuda12x && pip install 'nereid-serving[embedded,gpu13]'",
    ),
    CUDA_13=(
        CUDA_13,
        {},
        "driver 535.216.01 supports CUDA 12.2, and CuPy is built for CUDA 13",
        "install driver 580 or later, or: pip install 'nereid-serving[embedded,gpu]'",
    ),
    old_GPU=(
        CUDA_13,
        {"": recorded.NEW_HEAD, recorded.QUERY: recorded.DESKTOP_GPU},
        "NVIDIA GeForce GTX 1080 has compute capability 6.1; expected at least 7.5",
        "[embedded,gpu]",
    ),
)
def test_unusable_gpu_has_a_reason_and_a_fix(installed, outputs, reason, fix, tmp_path):
    choice = chosen(tmp_path, {**recorded.GOOD, **outputs}, installed)

    assert choice.profile == "cpu"
    assert choice.reason.startswith("a GPU, but ")
    assert reason in choice.reason
    assert fix in choice.fix


def test_gpu_that_cannot_be_used_is_not_selected(tmp_path):
    hidden = chosen(tmp_path / "hidden", CUDA_VISIBLE_DEVICES="")
    silent = chosen(tmp_path / "silent", {recorded.QUERY: recorded.NO_DRIVER}, status=9)
    unknown = chosen(tmp_path / "unknown", repository=tmp_path / "models")

    assert {choice.profile for choice in (hidden, silent, unknown)} == {"cpu"}
    assert hidden.reason == "a GPU, but CUDA_VISIBLE_DEVICES names no GPU of this machine"
    assert "couldn't communicate with the NVIDIA driver" in silent.reason
    assert unknown.reason == "no model has configs/gpu.pbtxt"


def test_tuned_profile_is_mentioned_and_not_selected(tmp_path):
    """It fits the machine of its search, which may be another one."""
    configs = tmp_path / "models" / "a" / "configs"
    configs.mkdir(parents=True)
    (configs / "tuned.pbtxt").touch()

    choice = choose(tmp_path / "models", {"PATH": "/nowhere"}, tmp_path)

    assert str(choice).endswith("; a different profile already exists: --profile tuned")
    assert choice.profile == "cpu"


@pytest.mark.parametrize(("profile", "pools"), [("gpu_ensemble", 16), ("gpu", 0), ("cpu", 0)])
def test_only_an_ensemble_gets_memory_for_its_tensors_on_each_gpu(profile, pools, tmp_path):
    """Triton ignores pools of GPUs that CUDA does not show."""
    words = command(ServerOptions(profile=profile), find_installation({}), tmp_path, "id")

    options = [word for word in words if "cuda" in word]
    assert options == [f"--cuda-memory-pool-byte-size={gpu}:536870912" for gpu in range(pools)]


def test_named_gpus_need_a_profile_that_uses_them(tmp_path):
    choice = chosen(tmp_path, installed=recorded.NOTHING)

    with pytest.raises(ValueError, match="expected a profile that uses a GPU, got profile cpu: a GPU, but"):
        check_named_gpus("1", choice)

    check_named_gpus("", choice)


@rows(("12.2", 12, True), ("13.1", 12, True), ("12.8", 13, False), ("", 13, True), ("11.8", 0, True))
def test_driver_supports_its_own_and_earlier_releases(cuda, major, is_usable):
    """Minor releases are compatible; an unknown release is no reason."""
    assert (driver_problem(cuda, "1.2", major) is None) == is_usable
