"""Findings of `nereid doctor` about GPUs, from recorded outputs."""

import os
import signal
from dataclasses import replace
from importlib.util import find_spec

import pytest

from nereid.observe.finding import Finding
from nereid.observe.gpu_checks import gpu_findings, gpu_probe, probe_findings
from nereid.server.gpu.cuda_packages import Package
from tests import gpu_outputs as recorded

# Without a provider, no program that uses the GPU is run.
NO_PROGRAMS = replace(recorded.CUDA_12, provider=None)


def examined(folder, outputs, installed=NO_PROGRAMS, servers=(), status=0):
    """Return the findings about a machine with a GPU and recorded outputs."""
    environment = recorded.install_smi(folder, {**recorded.GOOD, **outputs}, status)
    return [*gpu_findings.examine(environment, servers, folder / "dev", lambda: installed)]


def one(findings, what):
    """Return the only finding with a name."""
    (found,) = [each for each in findings if each.what == what]
    return found


def test_machine_without_a_gpu_has_one_line(tmp_path):
    """Nothing else is checked, and nothing fails."""
    found = [*gpu_findings.examine({"PATH": "/nowhere"}, (), tmp_path)]

    assert found == [Finding("GPU", "note", "no NVIDIA GPU: models are served on the CPU")]


def test_good_machine_has_a_line_for_each_check(tmp_path):
    """All values that a person compares are there."""
    outputs = {recorded.QUERY: recorded.GPU}

    found = examined(tmp_path, outputs, replace(NO_PROGRAMS, provider=None))

    assert [each for each in found if each.what != "GPU packages"] == [
        Finding("GPU", "ok", "0: NVIDIA A100-SXM4-80GB, 81920 MiB, compute capability 8.0"),
        Finding("driver", "ok", "535.216.01 supports CUDA 12.2; the packages need CUDA 12"),
        Finding("GPU memory", "ok", "0: 81916 MiB free"),
        Finding("GPU state", "ok", "shared between processes, no memory errors, full clocks"),
    ]


@pytest.mark.parametrize(("installed", "verdict"), [(recorded.CUDA_12, "fail"), (recorded.NOTHING, "note")])
def test_driver_that_is_not_loaded_fails_where_packages_need_it(tmp_path, installed, verdict):
    """The server of a machine without packages for the GPU runs on the CPU anyway."""
    found = examined(tmp_path, {recorded.QUERY: recorded.NO_DRIVER}, installed, status=9)

    text = f"nvidia-smi failed: {recorded.NO_DRIVER.strip()}"
    assert found == [Finding("GPU", verdict, text, "reload the driver, or restart the machine")]


def test_old_driver_fails_before_the_programs_run(tmp_path):
    """The rule has a better message than the error of each library."""
    found = examined(tmp_path, {"": recorded.OLD_HEAD}, recorded.CUDA_12)

    driver = one(found, "driver")
    assert (driver.verdict, driver.fix) == ("fail", "install driver 525 or later")
    assert "supports CUDA 11.6, and CuPy is built for CUDA 12" in driver.found
    assert not {"CUDA provider", "CuPy", "nvImageCodec"} & {each.what for each in found}


def test_cupy_for_another_release_fails_with_the_right_extra(tmp_path):
    """CUDA 13 needs a newer driver, or the packages for CUDA 12."""
    cupy = (Package("cupy-cuda13x", "13.6.0", 13),)

    driver = one(examined(tmp_path, {}, replace(recorded.CUDA_12, cupy=cupy)), "driver")

    assert driver.found == "driver 535.216.01 supports CUDA 12.2, and CuPy is built for CUDA 13"
    assert driver.fix == "install driver 580 or later, or: pip install 'nereid-serving[embedded,gpu]'"


def test_both_packages_of_onnxruntime_fail(tmp_path):
    """They contain the same files."""
    both = replace(NO_PROGRAMS, runtimes=("onnxruntime", "onnxruntime-gpu"))

    packages = one(examined(tmp_path, {}, both), "GPU packages")

    assert packages.verdict == "fail"
    assert packages.found == "onnxruntime and onnxruntime-gpu overwrite each other's files"
    assert packages.fix.startswith("pip uninstall -y onnxruntime onnxruntime-gpu && pip install ")


def test_machine_without_packages_for_the_gpu_is_a_note(tmp_path):
    """Nobody has to use a GPU."""
    packages = one(examined(tmp_path, {}, recorded.NOTHING), "GPU packages")

    assert packages.verdict == "note"
    assert packages.found == "none for the GPU: models are served on the CPU"


def test_memory_of_other_processes_is_named(tmp_path):
    """Free memory, and the processes that a person may end."""
    outputs = {recorded.QUERY: recorded.FULL_GPU, recorded.APPS: recorded.PROCESSES}

    memory = one(examined(tmp_path, outputs), "GPU memory")

    used = "python3.10 (pid 4194301) 79872 MiB, a, b (pid 4194302)"
    assert (memory.verdict, memory.found) == ("note", f"0: 1216 MiB free; used by {used}")
    assert "--gpu-id" in memory.fix


def test_memory_of_the_own_server_is_not_of_others(tmp_path):
    """`tritonserver` leads the process group of its stubs."""
    apps = f"{recorded.A100}, {os.getpid()}, tritonserver, 900\n"
    outputs = {recorded.QUERY: recorded.GPU, recorded.APPS: apps}

    assert "tritonserver" not in one(examined(tmp_path, outputs, servers=[os.getpgrp()]), "GPU memory").found


def test_memory_that_nobody_seems_to_use_belongs_to_others(tmp_path):
    """A container does not see the processes of other containers."""
    memory = one(examined(tmp_path, {recorded.QUERY: recorded.FULL_GPU}), "GPU memory")

    assert memory.found.endswith("processes of other containers or users may hold the rest")


def test_divided_gpu_is_named_with_its_parts(tmp_path):
    """A server uses one part, and which one is a choice."""
    outputs = {recorded.QUERY: recorded.DIVIDED_GPU, recorded.LISTED: recorded.MIG_LIST}

    mig = one(examined(tmp_path, outputs), "MIG")

    assert (mig.verdict, mig.fix) == ("note", "nereid serve --gpu-id UUID")
    assert f"MIG 1g.10gb Device 0, {recorded.PART}" in mig.found


def test_divided_gpu_without_parts_fails(tmp_path):
    """CUDA finds no device then."""
    listed = recorded.MIG_LIST.splitlines()[0] + "\n"
    outputs = {recorded.QUERY: recorded.DIVIDED_GPU, recorded.LISTED: listed}

    assert one(examined(tmp_path, outputs), "MIG").verdict == "fail"


def test_states_that_slow_or_stop_a_server_are_named(tmp_path):
    """Exclusive mode stops the second process, and the rest are reasons for a slow or wrong GPU."""
    outputs = {recorded.QUERY: recorded.EXCLUSIVE_GPU, recorded.PERFORMANCE: recorded.HOT}

    found = {each.what: each for each in examined(tmp_path, outputs)}

    assert found["compute mode"].verdict == "fail"
    assert found["compute mode"].fix == "nvidia-smi --id=0 --compute-mode=DEFAULT"
    assert found["persistence mode"].verdict == "note"
    assert found["memory errors"].found == "0: 3 uncorrected memory errors since the driver was loaded"
    assert found["clocks"].found == "a GPU is slowed down now: HW Thermal Slowdown"
    assert "GPU state" not in found


def test_exclusive_mode_with_mps_is_intended(tmp_path):
    """With MPS, one process of NVIDIA uses the GPU for all others."""
    apps = f"{recorded.A100}, 4194303, nvidia-cuda-mps-server, 30\n"
    outputs = {recorded.QUERY: recorded.EXCLUSIVE_GPU, recorded.APPS: apps}

    assert "compute mode" not in {each.what for each in examined(tmp_path, outputs)}


@pytest.mark.parametrize(
    ("output", "found", "fix"),
    [
        (
            recorded.ONNXRUNTIME.replace("{library}", "libcudnn.so.9"),
            "libcudnn.so.9 is missing; RuntimeError: onnxruntime 1.26.0 cannot use CUDAExecutionProvider",
            "pip install 'nereid-serving[embedded,gpu]'",
        ),
        (
            recorded.CUPY_OLD_DRIVER,
            "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
            "install a newer driver (see the line `driver`)",
        ),
        (
            recorded.CUPY_NO_NVRTC,
            "libnvrtc.so.13 is missing; RuntimeError: CuPy failed to load libnvrtc.so.13",
            "pip install 'nereid-serving[embedded,gpu]'",
        ),
        (
            "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
            "libcuda.so.1 is missing",
            "install NVIDIA's driver; in a container, NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ),
        ("ValueError: unheard of", "ValueError: unheard of", ""),
        ("", "no output", ""),
    ],
    ids=["cuDNN", "old driver", "NVRTC", "driver's library", "unknown", "silent"],
)
def test_message_of_a_library_has_its_fix(output, found, fix):
    """The last line is the reason, and a missing library is named first."""
    finding = probe_findings.finding("CuPy", 1, output, 60, 12)

    assert finding.verdict == "fail"
    assert found in finding.found
    assert finding.fix == fix


def test_crash_and_hang_of_a_library_are_findings():
    """They end the program, not `nereid doctor`."""
    crashed = probe_findings.finding("CuPy", -signal.SIGSEGV, "loading\n", 60, 12)
    hung = probe_findings.finding("CuPy", None, "", 60, 12)

    assert crashed.found == "a library ended the process with SIGSEGV; its output ends: loading"
    assert crashed.fix == "pip install 'nereid-serving[embedded,gpu]'"
    assert hung.found == "not done after 60 s; its output ends: no output"
    assert "Xid" in hung.fix


@pytest.mark.skipif(find_spec("cupy") is not None, reason="needs a machine without CuPy")
def test_programs_run_in_processes_of_their_own():
    """On this machine, ONNX Runtime has no provider for CUDA, and CuPy is missing."""
    findings = [*probe_findings.examine({"PATH": os.defpath}, 12)]

    assert [each.what for each in findings] == ["CUDA provider", "CuPy"]
    assert {each.verdict for each in findings} == {"fail"}
    assert "has no CUDAExecutionProvider" in findings[0].found
    assert findings[1].found == "ModuleNotFoundError: No module named 'cupy'"


def test_program_that_does_not_end_is_killed():
    """Its finding has the limit."""
    found = probe_findings.run(probe_findings.PROVIDER, {"PATH": os.defpath}, 12, limit_s=0.01)

    assert found.found.startswith("not done after 0.01 s")


def test_program_for_the_provider_runs_a_network():
    """The same program, on the CPU: the network, its input and the check of its scores."""
    assert gpu_probe.use_provider("CPUExecutionProvider").endswith("runs a network")
