"""Findings of `nereid doctor`; those about GPUs are from recorded outputs."""

import os
import re
import resource
import signal
from dataclasses import replace
from importlib.util import find_spec

import pytest

from nereid.base.assets import REPOSITORY
from nereid.insight.observe import doctor, gpu_findings, gpu_probe
from nereid.insight.observe.doctor import diagnose
from nereid.insight.observe.gpu_findings import Finding
from nereid.server import run_dir
from nereid.server.installation import INSTALL
from nereid.server.ports import Ports, free_ports
from nereid.server.run_dir import ServerInfo
from tests import gpu_outputs as recorded
from tests.tables import cases

# Without a provider, no program that uses the GPU is run.
NO_PROGRAMS = replace(recorded.CUDA_12, provider=None)


def examined(folder, outputs, installed=NO_PROGRAMS, servers=(), status=0):
    environment = recorded.install_smi(folder, {**recorded.GOOD, **outputs}, status)
    return [*gpu_findings.diagnose_gpus(environment, servers, folder / "dev", lambda: installed)]


def one(findings, check):
    (result,) = [finding for finding in findings if finding.check == check]
    return result


def test_machine_without_a_gpu_has_one_line(tmp_path):
    findings = [*gpu_findings.diagnose_gpus({"PATH": "/nowhere"}, (), tmp_path)]

    assert findings == [Finding("GPU", "note", "no NVIDIA GPU: models are served on the CPU")]


def test_good_machine_has_a_line_for_each_check(tmp_path):
    table = recorded.GPU + "WARNING: infoROM is corrupted at gpu 0000:AF:00.0\n"

    findings = examined(tmp_path, {recorded.QUERY: table})

    assert [finding for finding in findings if finding.check != "GPU packages"] == [
        Finding("GPU", "ok", "0: NVIDIA A100-SXM4-80GB, 81920 MiB, compute capability 8.0"),
        Finding("driver", "ok", "535.216.01 supports CUDA 12.2; the packages need CUDA 12"),
        Finding("GPU memory", "ok", "0: 81916 MiB free"),
        Finding("GPU state", "ok", "shared between processes, no memory errors, full clocks"),
    ]


@pytest.mark.parametrize(("installed", "verdict"), [(recorded.CUDA_12, "fail"), (recorded.NOTHING, "note")])
def test_driver_that_is_not_loaded_fails_where_packages_need_it(tmp_path, installed, verdict):
    findings = examined(tmp_path, {recorded.QUERY: recorded.NO_DRIVER}, installed, status=9)

    text = f"nvidia-smi failed: {recorded.NO_DRIVER.strip()}"
    assert findings == [Finding("GPU", verdict, text, "reload the driver, or restart the machine")]


@cases(
    # `tritonserver` leads the process group of its stubs.
    memory_of_the_own_server=(recorded.GPU, f"{os.getpid()}, tritonserver, 900", "tritonserver"),
    # With MPS, one process of NVIDIA uses the GPU for all others.
    MPS=(recorded.EXCLUSIVE_GPU, "4194303, nvidia-cuda-mps-server, 30", "compute mode"),
)
def test_intended_use_is_not_mentioned(gpu, app, absent, tmp_path):
    outputs = {recorded.QUERY: gpu, recorded.APPS: f"{recorded.A100}, {app}\n"}

    findings = examined(tmp_path, outputs, servers=[os.getpgrp()])

    assert one(findings, "GPU memory")
    assert absent not in str(findings)


BOTH = replace(NO_PROGRAMS, runtimes=("onnxruntime", "onnxruntime-gpu"))
FULL, DIVIDED = {recorded.QUERY: recorded.FULL_GPU}, {recorded.QUERY: recorded.DIVIDED_GPU}
WHOLE_ONLY = recorded.MIG_LIST.splitlines()[0] + "\n"
OLD = r"fail: .*supports CUDA 11.6, and CuPy is built for CUDA 12.*; fix: install driver 525 or later$"


@cases(
    old_driver=({"": recorded.OLD_HEAD}, recorded.CUDA_12, "driver", OLD),
    both=({}, BOTH, "GPU packages", r"fail: .*overwrite each other.*; fix: pip uninstall -y .* && pip"),
    no_packages=({}, recorded.NOTHING, "GPU packages", "note: none for the GPU: models are served"),
    memory_of_others=(
        FULL | {recorded.APPS: recorded.PROCESSES},
        NO_PROGRAMS,
        "GPU memory",
        r"note: 0: 1216 MiB free; used by python3.10 \(pid 4194301\) 79872 MiB, a, b \(pid 4194302\); "
        "fix: .*--gpu-id",
    ),
    memory_of_containers=(FULL, NO_PROGRAMS, "GPU memory", "note: .*containers or users may hold the"),
    divided=(
        DIVIDED | {recorded.LISTED: recorded.MIG_LIST},
        NO_PROGRAMS,
        "MIG",
        f"note: .*MIG 1g.10gb Device 0, {recorded.PART}.*; fix: nereid serve --gpu-id UUID",
    ),
    without_parts=(DIVIDED | {recorded.LISTED: WHOLE_ONLY}, NO_PROGRAMS, "MIG", "fail: "),
)
def test_state_of_a_gpu_is_a_finding_with_a_fix(outputs, installed, check, expected, tmp_path):
    """The programs do not run, as the driver or the packages are too old or missing."""
    findings = examined(tmp_path, outputs, installed)

    result = one(findings, check)
    assert re.match(expected, f"{result.status}: {result.detail}; fix: {result.fix}")
    assert not {"CUDA provider", "CuPy", "nvImageCodec"} & {finding.check for finding in findings}


def test_states_that_slow_or_stop_a_server_are_named(tmp_path):
    outputs = {recorded.QUERY: recorded.EXCLUSIVE_GPU, recorded.PERFORMANCE: recorded.HOT}

    findings = {finding.check: finding for finding in examined(tmp_path, outputs)}

    assert findings["compute mode"].status == "fail"
    assert findings["compute mode"].fix == "nvidia-smi --id=0 --compute-mode=DEFAULT"
    assert findings["persistence mode"].status == "note"
    assert findings["memory errors"].detail == "0: 3 uncorrected memory errors since the driver was loaded"
    assert findings["clocks"].detail == "a GPU is slowed down now: HW Thermal Slowdown"
    assert "GPU state" not in findings


@cases(
    cuDNN=(
        recorded.ONNXRUNTIME.replace("{library}", "libcudnn.so.9"),
        "libcudnn.so.9 is missing; RuntimeError: onnxruntime 1.26.0 cannot use CUDAExecutionProvider",
        "pip install 'nereid-serving[embedded,gpu]'",
    ),
    old_driver=(
        recorded.CUPY_OLD_DRIVER,
        "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
        "install a newer driver (see the line `driver`)",
    ),
    drivers_library=(
        "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
        "libcuda.so.1 is missing",
        "install NVIDIA's driver; in a container, NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    unknown=("ValueError: unheard of", "ValueError: unheard of", ""),
    silent=("", "no output", ""),
)
def test_message_of_a_library_has_its_fix(output, found, fix):
    finding = gpu_findings.finding("CuPy", 1, output, 60, 12)

    assert finding.status == "fail"
    assert found in finding.detail
    assert finding.fix == fix


def test_crash_and_hang_of_a_library_are_findings():
    crashed = gpu_findings.finding("CuPy", -signal.SIGSEGV, "loading\n", 60, 12)
    hung = gpu_findings.finding("CuPy", None, "", 60, 12)

    assert crashed.detail == "the process crashed (SIGSEGV) in a library; its output ends: loading"
    assert crashed.fix == "pip install 'nereid-serving[embedded,gpu]'"
    assert hung.detail == "timed out after 60 s; its output ends: no output"
    assert "Xid" in hung.fix


@pytest.mark.skipif(find_spec("cupy") is not None, reason="needs a machine without CuPy")
def test_programs_run_in_processes_of_their_own():
    findings = [*gpu_findings.examine_programs({"PATH": os.defpath}, 12)]

    assert [finding.check for finding in findings] == ["CUDA provider", "CuPy"]
    assert {finding.status for finding in findings} == {"fail"}
    assert "has no CUDAExecutionProvider" in findings[0].detail
    assert findings[1].detail == "ModuleNotFoundError: No module named 'cupy'"


def test_program_that_does_not_end_is_killed():
    finding = gpu_findings.run("provider", {"PATH": os.defpath}, 12, limit_s=0.01)

    assert finding.detail.startswith("timed out after 0.01 s")


def test_program_for_the_provider_runs_a_network():
    assert gpu_probe.use_provider("CPUExecutionProvider").endswith("runs a network")


@pytest.mark.parametrize("is_ours", [True, False], ids=["this repository", "another"])
def test_port_of_the_repositorys_own_server_is_not_a_problem(tmp_path, is_ours):
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    grpc = free_ports(1)[0]  # nothing listens there
    server_info = ServerInfo(7, "127.0.0.1", Ports(8000, grpc, 8002), str(REPOSITORY), "cpu", "")

    with run_dir.occupy(run_dir.root(environment), REPOSITORY) as folder:
        run_dir.write(folder, server_info)
        lines = {line.check: line for line in diagnose(environment, REPOSITORY if is_ours else tmp_path)}

    if is_ours:
        serves = "process 7 serves this repository on 127.0.0.1:8000"
        assert lines["server"] == Finding("server", "ok", serves)
        assert lines["http port"] == Finding("http port", "ok", "8000 is in use by this repository's server")
        assert "in use" not in lines["grpc port"].detail
    else:
        assert "server" not in lines
        assert "this repository" not in lines["http port"].detail


def test_missing_part_is_a_failure_with_its_fix(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "pytriton" else find_spec(name)
    )

    findings = {finding.check: finding for finding in diagnose({"XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path)}

    assert findings["Triton"] == Finding("Triton", "fail", "nvidia-pytriton is not installed", INSTALL)


@cases(
    enough=(8192, 1024, ""),
    unlimited=(-1, 4096, ""),
    few_files=(1024, 4096, "ulimit -n 8192, or LimitNOFILE of the service"),
    short_queue=(20_000, 128, "sysctl net.core.somaxconn=1024"),
)
def test_limits_of_connections_are_checked(files, waiting, fix, tmp_path, monkeypatch):
    """Thousands of connections need open files, and a queue for those that are not accepted yet."""
    (tmp_path / "somaxconn").write_text(f"{waiting}\n")
    monkeypatch.setattr(doctor, "SOMAXCONN", tmp_path / "somaxconn")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    connections = one(diagnose({"XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path), "connections")

    assert (connections.status, connections.fix) == ("note" if fix else "ok", fix)
