"""The plan of a run: its sections, their time limits, and the parts that each one needs."""

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

Findings = dict[str, Any]


class Part(NamedTuple):
    """A Python module or a program, and how to install it."""

    name: str
    fix: str
    is_program: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether the part is found; nothing is imported."""
        if self.is_program:
            return shutil.which(self.name) is not None
        try:
            return importlib.util.find_spec(self.name) is not None
        except ModuleNotFoundError:  # its parent is missing, too
            return False

    def __str__(self) -> str:
        return f"{self.name}; fix: {self.fix}"


EXTRAS = "pip install -e '.[embedded,gpu,dev]', with gpu13 instead of gpu for CUDA 13"
CUPY, CODEC = Part("cupy", EXTRAS), Part("nvidia.nvimgcodec", EXTRAS)
RUNTIME, TRITON, TESTS = Part("onnxruntime", EXTRAS), Part("pytriton", EXTRAS), Part("pytest", EXTRAS)
XDIST = Part("xdist", EXTRAS)
ONNX = Part("onnx", "pip install -e '.[publish]'")
UVICORN = Part("uvicorn", "pip install -e '.[gateway]'")
UVLOOP = Part("uvloop", "pip install -e '.[load]'")
SMI = Part("nvidia-smi", "install NVIDIA's driver, or give the container the capability utility", True)
NSYS = Part("nsys", "install NVIDIA Nsight Systems", True)
CUPTI = Part("cupti", "pip install cupti-python, of the driver's CUDA release")
TORCH = Part("torch", "pip install torch, built for the driver's CUDA release")
TENSORRT = Part("tensorrt", "pip install tensorrt-cu12, in the release that ONNX Runtime names")
WRK = Part("wrk", "apt-get install wrk", True)


class Context(NamedTuple):
    """The surroundings of a section: the environment, and the seconds that are left."""

    environment: Mapping[str, str]
    left_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run in a process of its own; `name` is also its module in this package.

    `needed` parts must be installed; without `useful` parts, the section leaves out a step.
    """

    name: str
    title: str
    limit_s: float
    steps: tuple[str, ...]
    needed: tuple[Part, ...] = ()
    useful: tuple[Part, ...] = ()

    @property
    def number(self) -> int:
        """The number of the section, from 1."""
        return [*BY_NAME].index(self.name) + 1

    def measure(self, context: Context) -> Iterator[Findings]:
        """Run the section; each result is yielded when it is there."""
        found: Iterator[Findings] = self._module().measure(context)
        return found

    def rehearse(self, context: Context) -> Iterator[Findings]:
        """Run the steps that need no GPU."""
        found: Iterator[Findings] = self._module().rehearse(context)
        return found

    def _module(self) -> Any:
        return import_module(f"{__package__}.{self.name}")


# The most valuable first: a run may be cut short.
SECTIONS = (
    Section(
        "machine",
        "GPU, driver, CUDA, memory, packages",
        15,
        ("query nvidia-smi", "query CUDA", "list packages and missing parts"),
        useful=(SMI, CUPY),
    ),
    Section(
        "speed",
        "from a JPEG of 1080p to scores",
        115,
        (
            "time decoder, kernel, network and the whole at batch sizes 1, 4, 8 and 32",
            "load the server with 1, 8, 32, 64 and 128 requests in flight",
            "load the service by hand with 1, 8 and 64",
        ),
        needed=(CUPY, CODEC, RUNTIME, TRITON, UVICORN, UVLOOP),
        useful=(TORCH,),
    ),
    Section(
        "pipeline",
        "batches that overlap, from JPEG to scores",
        40,
        (
            "time batches alone, and rates of overlapping ones",
            "compare mixed batches with each image alone",
            "trace overlapping batches",
        ),
        needed=(CUPY, CODEC, RUNTIME),
        useful=(CUPTI, TORCH),
    ),
    Section(
        "server",
        "the embedded server with instances on the GPU",
        100,
        (
            "start the profile gpu_ensemble",
            "classify, and count tensors that came through the host",
            "run tests/gpu/test_onnxruntime.py, test_server_on_gpu.py and test_cuda_shared_memory.py",
        ),
        needed=(CUPY, CODEC, RUNTIME, TRITON),
        useful=(TESTS,),
    ),
    Section(
        "zero_copy",
        "DLPack: one address, no copy to the host",
        30,
        ("compare addresses from preprocessing to network", "trace batches from JPEG to scores"),
        needed=(CUPY, CODEC, RUNTIME),
        useful=(NSYS, CUPTI, TORCH),
    ),
    Section(
        "kernel",
        "the kernel against NumPy and Pillow",
        60,
        ("compare rows of the kernel with the CPU path and Pillow", "run tests/gpu/test_gpu_preprocessor.py"),
        needed=(CUPY,),
        useful=(CODEC, TESTS),
    ),
    Section(
        "decoder",
        "nvImageCodec: JPEGs, damaged files, fallbacks",
        25,
        ("decode twelve kinds of files", "compare errors with the CPU path", "time decoder and kernel"),
        needed=(CUPY, CODEC),
    ),
    Section(
        "memory",
        "memory per instance, after an unload, after the memory was full",
        95,
        (
            "start the server, and read the GPU's memory for each process",
            "unload a model, and load it again",
            "fill the GPU, send requests, free the GPU, and send requests again",
            "limit the network's memory until a batch is run in halves",
        ),
        needed=(CUPY, CODEC, RUNTIME, TRITON, SMI),
    ),
    Section(
        "processor",
        "the same load on this machine's CPU",
        45,
        ("load the profile cpu as the section speed loads gpu", "run a short benchmark of loadtest.bench"),
        needed=(RUNTIME, TRITON, UVLOOP),
        useful=(WRK,),
    ),
    Section(
        "precisions",
        "FP32, FP16, INT8, TensorRT, CUDA graphs",
        65,
        (
            "time each form of the network at batch sizes 1, 8 and 32",
            "compare scores with FP32 on the CPU",
            "run CUDA graphs of several batch sizes as the backend does",
            "load the network with TensorRT twice",
        ),
        needed=(RUNTIME,),
        useful=(ONNX, TENSORRT),
    ),
)
BY_NAME = {section.name: section for section in SECTIONS}


def select(words: str) -> Sequence[Section]:
    """Parse numbers or names of sections, separated by commas; nothing selects all.

    Raises:
        ValueError: a word is neither.
    """
    known = {**BY_NAME, **{str(section.number): section for section in SECTIONS}}
    names = [word.strip() for word in words.split(",") if word.strip()]
    if unknown := [name for name in names if name not in known]:
        expected = ", ".join(f"{section.number} ({section.name})" for section in SECTIONS)
        raise ValueError(f"--sections: expected some of {expected}, got {unknown[0]!r}")
    chosen = {known[name].name for name in names} or BY_NAME.keys()
    return [section for section in SECTIONS if section.name in chosen]


def missing(parts: Sequence[Part]) -> list[str]:
    """Return the parts that are not installed, with their fixes."""
    return [str(part) for part in parts if not part.is_installed]
