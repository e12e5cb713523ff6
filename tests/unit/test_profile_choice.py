"""The profile that `nereid serve` selects."""

from dataclasses import replace

import pytest

from nereid.base.assets import REPOSITORY
from nereid.server.command_line import ServerOptions, command, environment
from nereid.server.gpu_profile import Choice, Package, check_named_gpus, choose, driver_problem
from nereid.server.installation import find_installation
from tests import gpu_outputs as recorded
from tests.tables import cases

NO_PROVIDER = "ONNX Runtime has no CUDA provider"
CUDA_13 = replace(recorded.CUDA_12, cupy=(Package("cupy-cuda13x", "13.6.0", 13),))


def chosen(
    folder, outputs=recorded.GOOD, installed=recorded.CUDA_12, repository=REPOSITORY, status=0, **more
):
    """Return the choice on a machine with a GPU and recorded outputs."""
    variables = recorded.install_smi(folder, outputs, status) | more
    return choose(repository, variables, folder / "dev", lambda: installed)


def test_gpu_with_its_packages_is_selected(tmp_path):
    expected = Choice("gpu", "NVIDIA A100-SXM4-80GB, CUDA provider, CuPy 13.6.0")

    assert chosen(tmp_path) == expected
    assert str(expected) == "profile gpu: NVIDIA A100-SXM4-80GB, CUDA provider, CuPy 13.6.0"


def test_old_gpu_next_to_a_good_one_does_no_harm(tmp_path):
    gpus = recorded.DESKTOP_GPU + recorded.GPU.replace("0", "1", 1)
    listed = "GPU 0: NVIDIA GeForce GTX 1080 (UUID: GPU-11ff)\n" + recorded.LIST.splitlines()[0].replace(
        "GPU 0", "GPU 1"
    )
    outputs = {"": recorded.NEW_HEAD, recorded.QUERY: gpus, recorded.LISTED: listed}

    assert chosen(tmp_path, recorded.GOOD | outputs, CUDA_13).profile == "gpu"


def test_part_of_a_divided_gpu_is_selected(tmp_path):
    outputs = {**recorded.GOOD, recorded.LISTED: recorded.MIG_LIST, recorded.QUERY: recorded.DIVIDED_GPU}

    choice = chosen(tmp_path, outputs, CUDA_VISIBLE_DEVICES=recorded.PART)

    assert (choice.profile, choice.reason.partition(",")[0]) == ("gpu", "MIG 1g.10gb Device 0")


@cases(
    ("installed", "outputs", "reason", "fix"),
    {
        "CuPy": (replace(recorded.CUDA_12, cupy=()), {}, "CuPy is missing", "[embedded,gpu]"),
        "codec": (
            replace(recorded.CUDA_12, has_codec=False),
            {},
            "nvImageCodec is missing",
            "[embedded,gpu]",
        ),
        "CPU package": (recorded.NOTHING, {}, NO_PROVIDER, "pip uninstall -y onnxruntime && "),
        "nothing": (replace(recorded.NOTHING, runtimes=()), {}, NO_PROVIDER, "pip install"),
        "both": (
            replace(recorded.CUDA_12, runtimes=("onnxruntime", "onnxruntime-gpu")),
            {},
            "onnxruntime and onnxruntime-gpu overwrite each other's files",
            "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'nereid-serving[embedded,gpu]'",
        ),
        "two CuPys": (
            replace(recorded.CUDA_12, cupy=(*CUDA_13.cupy, *recorded.CUDA_12.cupy)),
            {},
            "cupy-cuda13x and cupy-cuda12x overwrite each other's files",
            "pip uninstall -y cupy-cuda13x cupy-cuda12x && pip install 'nereid-serving[embedded,gpu13]'",
        ),
        "CUDA 13": (
            CUDA_13,
            {},
            "driver 535.216.01 supports CUDA 12.2, and CuPy is built for CUDA 13",
            "install driver 580 or later, or: pip install 'nereid-serving[embedded,gpu]'",
        ),
        "old GPU": (
            CUDA_13,
            {"": recorded.NEW_HEAD, recorded.QUERY: recorded.DESKTOP_GPU},
            "NVIDIA GeForce GTX 1080 has compute capability 6.1; expected at least 7.5",
            "[embedded,gpu]",
        ),
    },
)
def test_unusable_gpu_has_a_reason_and_a_fix(tmp_path, installed, outputs, reason, fix):
    choice = chosen(tmp_path, {**recorded.GOOD, **outputs}, installed)

    assert choice.profile == "cpu"
    assert choice.reason.startswith("a GPU, but ")
    assert reason in choice.reason
    assert fix in choice.fix


def test_gpu_that_cannot_be_used_is_not_selected(tmp_path):
    for name in ("hidden", "silent", "unknown", "models"):
        (tmp_path / name).mkdir()
    hidden = chosen(tmp_path / "hidden", CUDA_VISIBLE_DEVICES="")
    silent = chosen(tmp_path / "silent", {recorded.QUERY: recorded.NO_DRIVER}, status=9)
    unknown = chosen(tmp_path / "unknown", repository=tmp_path / "models")

    assert {each.profile for each in (hidden, silent, unknown)} == {"cpu"}
    assert hidden.reason == "a GPU, but CUDA_VISIBLE_DEVICES names no GPU of this machine"
    assert "couldn't communicate with the NVIDIA driver" in silent.reason
    assert unknown.reason == "no model has configs/gpu.pbtxt"


def test_tuned_profile_is_mentioned_and_not_selected(tmp_path):
    """It fits the machine of its search, which may be another one."""
    configs = tmp_path / "models" / "a" / "configs"
    configs.mkdir(parents=True)
    (configs / "tuned.pbtxt").touch()
    (tmp_path / "dev").mkdir()

    choice = choose(tmp_path / "models", {"PATH": "/nowhere"}, tmp_path / "dev")

    assert str(choice).endswith("; another profile is there: --profile tuned")
    assert choice.profile == "cpu"


def test_server_gets_the_named_gpus_and_their_pools(tmp_path):
    """The stubs are its children; Triton ignores pools of GPUs that CUDA does not show."""
    triton = find_installation({})
    words = command(ServerOptions(profile="gpu"), triton, tmp_path, "id")

    variables = environment(triton, {"CUDA_VISIBLE_DEVICES": recorded.SECOND})

    assert variables["CUDA_VISIBLE_DEVICES"] == recorded.SECOND
    assert "--cuda-memory-pool-byte-size=0:536870912" in words
    assert "--cuda-memory-pool-byte-size=1:536870912" in words
    assert not [each for each in command(ServerOptions(), triton, tmp_path, "id") if "cuda" in each]


def test_named_gpus_need_a_profile_that_uses_them(tmp_path):
    variables = recorded.install_smi(tmp_path, recorded.GOOD)
    choice = choose(REPOSITORY, variables, tmp_path / "dev", lambda: recorded.NOTHING)

    with pytest.raises(ValueError, match="expected a profile that uses a GPU, got profile cpu: a GPU, but"):
        check_named_gpus("1", choice)

    check_named_gpus("", choice)


@pytest.mark.parametrize(
    ("cuda", "major", "is_usable"),
    [("12.2", 12, True), ("13.1", 12, True), ("12.8", 13, False), ("", 13, True), ("11.8", 0, True)],
)
def test_driver_supports_its_own_and_earlier_releases(cuda, major, is_usable):
    """Minor releases are compatible; an unknown release is no reason."""
    assert (driver_problem(cuda, "1.2", major) is None) == is_usable
