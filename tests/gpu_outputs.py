"""Recorded outputs of nvidia-smi, ONNX Runtime and CuPy, and a program that replays those of nvidia-smi."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from nereid.server.gpu_profile import GpuPackages

RECORDED = Path(__file__).with_name("recorded")
# `nvidia-smi --list-gpus`. Sources: influxdata/telegraf#5812, DataDog/datadog-agent#33120 (MIG).
A100 = "GPU-513536b6-7d19-9063-b049-1e69664bb298"
SECOND = "GPU-d8594bd4-0fc3-8595-e355-7c98138f3b95"
LIST = f"""GPU 0: NVIDIA A100-SXM4-80GB (UUID: {A100})
GPU 1: NVIDIA A100-SXM4-80GB (UUID: {SECOND})
"""
DIVIDED = "GPU-7fdaf0a5-179b-f636-d15d-daf243e3ff16"
PART = "MIG-feb88891-0321-5fef-9c87-d4af3b54259e"
MIG_LIST = f"""GPU 0: NVIDIA A100-SXM4-80GB (UUID: {DIVIDED})
  MIG 1g.10gb     Device  0: (UUID: {PART})
  MIG 1g.10gb     Device  1: (UUID: MIG-a25704ba-3a06-5299-a795-fd7cf4d13973)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: {SECOND})
"""
# Head of `nvidia-smi`. Sources: DataDog/datadog-agent#33120 (535), ollama/ollama#4814 (510).
HEAD = "| NVIDIA-SMI 535.216.01             Driver Version: 535.216.01   CUDA Version: 12.2     |\n"
OLD_HEAD = "| NVIDIA-SMI 510.108.03   Driver Version: 510.108.03   CUDA Version: 11.6     |\n"
NEW_HEAD = "| NVIDIA-SMI 590.48.01   KMD Version: 590.48.01   CUDA UMD Version: 13.1 |\n"
# `nvidia-smi --query-gpu` for our columns: values of these machines in the format that NVIDIA documents.
ROW = ", NVIDIA A100-SXM4-80GB, {}, 535.216.01, 8.0, 81920, {}, 400.00, 1410, {}, {}, {}, {}\n"
GPU = "0" + ROW.format(A100, 4, "Disabled", "Default", "Enabled", 0)
GPUS = GPU + "1" + ROW.format(SECOND, 4, "Disabled", "Default", "Enabled", 0)
FULL_GPU = "0" + ROW.format(A100, 80704, "Disabled", "Default", "Enabled", 0)
DIVIDED_GPU = "0" + ROW.format(DIVIDED, 87, "Enabled", "Default", "Enabled", 0)
EXCLUSIVE_GPU = "0" + ROW.format(A100, 4, "Disabled", "Exclusive_Process", "Disabled", 3)
DESKTOP_GPU = (
    "0, NVIDIA GeForce GTX 1080, GPU-11ff, 535.216.01, 6.1, 8192, 12, 180.00, 1936, [N/A], Default, Disabled,"
    " [N/A]\n"
)
# `nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory`: the format of a log of Spark
# (GPU-…, 34883, python3, 14427 MiB) without units.
PROCESSES = f"{A100}, 4194301, /usr/local/bin/python3.10, 79872\n{A100}, 4194302, a, b, [N/A]\n"
# `nvidia-smi -q -d PERFORMANCE`. Source: kubeflow/kubeflow#68; the second with another reason.
CLOCKS = (RECORDED / "nvidia_smi_clocks.txt").read_text()
HOT = CLOCKS.replace("HW Thermal Slowdown     : Not Active", "HW Thermal Slowdown     : Active")
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
    "NVIDIA driver is installed and running.\n"
)
# onnxruntime-gpu 1.26.0 on a machine without CUDA's libraries and without a driver (2026-11-26, by hand).
ONNXRUNTIME = (RECORDED / "onnxruntime_cuda.txt").read_text()
# CuPy 13.6.0 on the same machine.
CUPY_OLD_DRIVER = (RECORDED / "cupy_old_driver.txt").read_text()
# What `nvidia-smi` prints, by the first word of its arguments; "" for none.
Outputs = Mapping[str, str]
QUERY, APPS, PERFORMANCE, LISTED = "--query-gpu", "--query-compute-apps", "-q", "--list-gpus"
GOOD: Outputs = {"": HEAD, QUERY: GPUS, APPS: "", PERFORMANCE: CLOCKS, LISTED: LIST}
CUDA_12 = GpuPackages({"cupy-cuda12x": "13.6.0"}, ("onnxruntime-gpu",), Path("/provider.so"), True)
NOTHING = GpuPackages({}, ("onnxruntime",), None, False)


def install_smi(folder: Path, outputs: Outputs, status: int = 0) -> dict[str, str]:
    """Write a program `nvidia-smi` that replays outputs; return the environment of a machine that has it."""
    (folder / "dev").mkdir(parents=True)
    (folder / "dev" / "nvidia0").touch()
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    cases = "\n".join(
        f"{shlex.quote(word)}) printf %s {shlex.quote(text)} ;;" for word, text in outputs.items()
    )
    program.write_text(f'#!/bin/sh\ncase "${{1%%=*}}" in\n{cases}\nesac\nexit {status}\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.defpath}"}
