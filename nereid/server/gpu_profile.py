"""The installed packages of the GPU path, and the profile that `nereid serve --profile auto` selects."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nereid.base.errors import ServerError
from nereid.server import nvidia_smi
from nereid.server.command_line import DEFAULT_PROFILE, GPU_PROFILE, TUNED_PROFILE
from nereid.server.nvidia_smi import Gpu

# CuPy's packages, and the major CUDA release that each is built for; 0 if unknown.
CUPY_PACKAGES = {"cupy-cuda13x": 13, "cupy-cuda12x": 12, "cupy-cuda11x": 11, "cupy": 0}
RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
CUDA_PROVIDER = "capi/libonnxruntime_providers_cuda.so"
# The extra for each major CUDA release.
EXTRAS = {12: "gpu", 13: "gpu13"}
# The oldest driver and the oldest GPU that each major CUDA release supports. Source: NVIDIA, "CUDA
# Compatibility", minor version compatibility; release notes of CUDA 13.0. Triton 24.10 needs 6.0.
OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}
OLDEST_CAPABILITY = {13: "7.5"}
OLDEST_OF_TRITON = "6.0"


class Problem(NamedTuple):
    """A reason not to use a GPU, and its fix."""

    found: str
    fix: str


def install_command(major: int) -> str:
    """Return the command that installs the GPU path for a major CUDA release."""
    return f"pip install 'nereid-serving[embedded,{EXTRAS.get(major, EXTRAS[12])}]'"


def version_of(name: str) -> str:
    """Return the version of a package, or an empty string if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class GpuPackages:
    """The packages of the GPU path.

    Attributes:
        cupy: versions of CuPy's packages by their names; only one may be installed.
        runtimes: packages of ONNX Runtime; two of them overwrite each other's files.
        has_codec: whether nvImageCodec, which decodes the images, is installed.
    """

    cupy: Mapping[str, str]
    runtimes: tuple[str, ...]
    provider: Path | None
    has_codec: bool

    @classmethod
    def detect(cls) -> "GpuPackages":
        """Return the packages of this interpreter."""
        cupy = {name: version for name in CUPY_PACKAGES if (version := version_of(name))}
        runtimes = tuple(name for name in RUNTIMES if version_of(name))
        return cls(cupy, runtimes, _provider(), _has_codec())

    @property
    def cuda(self) -> int:
        """The major CUDA release that CuPy is built for; 0 if unknown."""
        return next((CUPY_PACKAGES[name] for name in self.cupy), 0)

    def problems(self) -> Iterator[Problem]:
        """Yield what the GPU path lacks, the main reason first."""
        fix = install_command(self.cuda)
        if len(self.runtimes) > 1:
            yield conflict(self.runtimes, fix)
        elif self.provider is None:
            remove = "pip uninstall -y onnxruntime && " if self.runtimes else ""
            yield Problem("ONNX Runtime has no CUDA provider", remove + fix)
        if not self.cupy:
            yield Problem("CuPy is missing", fix)
        if len(self.cupy) > 1:
            yield conflict([*self.cupy], fix)
        if not self.has_codec:
            yield Problem("nvImageCodec is missing", fix)


def conflict(names: Sequence[str], fix: str) -> Problem:
    """Return the problem that packages contain the same files; `fix` installs the right one."""
    reason = f"{' and '.join(names)} overwrite each other's files"
    return Problem(reason, f"pip uninstall -y {' '.join(names)} && {fix}")


def _has_codec() -> bool:
    try:
        return importlib.util.find_spec("nvidia.nvimgcodec") is not None
    except ModuleNotFoundError:  # no NVIDIA package is installed
        return False


def _provider() -> Path | None:
    spec = importlib.util.find_spec("onnxruntime")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / CUDA_PROVIDER).exists():
            return path
    return None


def driver_problem(cuda_of_driver: str, driver: str, major: int) -> Problem | None:
    """Return why a driver cannot run packages for a major CUDA release, or None.

    A driver supports its own major release and all earlier ones.

    Args:
        cuda_of_driver: the newest CUDA release that the driver supports, such as "12.4"; empty if unknown.
        major: CUDA release of the packages; 0 if unknown.
    """
    supported = int(cuda_of_driver.partition(".")[0] or 0)
    if not supported or supported >= major:
        return None
    reason = f"driver {driver} supports CUDA {cuda_of_driver}, and CuPy is built for CUDA {major}"
    fix = f"install driver {OLDEST_DRIVER.get(major, 'for CUDA ' + str(major))} or later"
    return Problem(reason, f"{fix}, or: {install_command(supported)}" if supported in EXTRAS else fix)


def capability_problem(name: str, capability: str | None, major: int) -> Problem | None:
    """Return why a GPU is too old for Triton or for the packages of a major CUDA release, or None."""
    oldest = OLDEST_CAPABILITY.get(major, OLDEST_OF_TRITON)
    if capability is None or _numbers(capability) >= _numbers(oldest):
        return None
    fix = (
        install_command(12)
        if _numbers(capability) >= _numbers(OLDEST_OF_TRITON)
        else "nereid serve --profile cpu"
    )
    return Problem(f"{name} has compute capability {capability}; expected at least {oldest}", fix)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@dataclass(frozen=True, slots=True)
class Choice:
    """A profile with the reason for it, how to enable the GPU, and a hint about another profile."""

    profile: str
    reason: str
    fix: str = ""
    hint: str = ""

    def __str__(self) -> str:
        text = f"profile {self.profile}: {self.reason}"
        return "; ".join(filter(None, (text, self.fix and f"fix: {self.fix}", self.hint)))


def choose(
    repository: Path,
    environment: Mapping[str, str],
    devices: Path = nvidia_smi.DEVICES,
    find_packages: Callable[[], GpuPackages] = GpuPackages.detect,
) -> Choice:
    """Select `gpu` if a GPU, its packages and its configs are present, else `cpu`.

    On a machine without a GPU, nothing is started. No CUDA library is loaded on any machine. The profile
    `tuned` is never selected, because it suits only the machine it was tuned on; the choice mentions it.
    """
    hint = ""
    if any(repository.glob(f"*/configs/{TUNED_PROFILE}.pbtxt")):
        hint = f"a different profile already exists: --profile {TUNED_PROFILE}"
    path = environment.get("PATH", "")
    if reason := nvidia_smi.why_absent(path, devices):
        return Choice(DEFAULT_PROFILE, reason, hint=hint)
    if not any(repository.glob(f"*/configs/{GPU_PROFILE}.pbtxt")):
        return Choice(DEFAULT_PROFILE, f"no model has configs/{GPU_PROFILE}.pbtxt", hint=hint)
    installed = find_packages()
    if problem := next(installed.problems(), None):
        return _without(problem, hint)
    try:
        gpus = nvidia_smi.read_gpus(path)
        visible_devices = nvidia_smi.visible(nvidia_smi.read_devices(path), environment)
        cuda = nvidia_smi.read_cuda_version(path)
    except ServerError as error:
        return _without(Problem(error.reason, error.fix), hint)
    used = [gpu for gpu in gpus if any(device.uuid == gpu.uuid for device in visible_devices)]
    if problem := unusable(used or gpus, len(visible_devices), cuda, installed.cuda):
        return _without(problem, hint)
    names = ", ".join(dict.fromkeys(device.name for device in used or visible_devices))
    version = next(iter(installed.cupy.values()))
    return Choice(GPU_PROFILE, f"{names}, CUDA provider, CuPy {version}", hint=hint)


def check_named_gpus(gpu_ids: str, choice: Choice) -> None:
    """Check that a server with named GPUs uses a GPU.

    Raises:
        ValueError: the selected profile uses none; the message says why.
    """
    if gpu_ids and choice.profile != GPU_PROFILE:
        raise ValueError(f"--gpu-id {gpu_ids}: expected a profile that uses a GPU, got {choice}")


def unusable(gpus: list[Gpu], visible: int, cuda: str, major: int) -> Problem | None:
    """Return why no GPU can be used, or None.

    Args:
        visible: number of GPUs visible to CUDA.
        cuda: the newest CUDA release that the driver supports.
        major: major CUDA release that CuPy is built for.
    """
    if not visible:
        return Problem("CUDA_VISIBLE_DEVICES names no GPU of this machine", "change or unset it")
    if problem := driver_problem(cuda, gpus[0].driver if gpus else "", major):
        return problem
    problems = [capability_problem(gpu.name, gpu.compute_capability, major) for gpu in gpus]
    return problems[0] if problems and all(problems) else None


def _without(problem: Problem, hint: str) -> Choice:
    return Choice(DEFAULT_PROFILE, f"a GPU, but {problem.found}", problem.fix, hint)
