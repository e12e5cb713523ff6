"""The installed packages of the GPU path, and the drivers that they need; nothing is imported."""

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# CuPy's packages, and the major release of CUDA that each one is built for.
CUPY_PACKAGES = {"cupy-cuda13x": 13, "cupy-cuda12x": 12, "cupy-cuda11x": 11, "cupy": 0}
RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
CUDA_PROVIDER = "capi/libonnxruntime_providers_cuda.so"
# The extra for each major release of CUDA.
EXTRAS = {12: "gpu", 13: "gpu13"}
# The oldest driver of each major release of CUDA, and the oldest GPU that it supports. Source: NVIDIA, "CUDA
# Compatibility", minor version compatibility; release notes of CUDA 13.0. Triton 24.10 needs 6.0.
OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}
OLDEST_CAPABILITY = {13: "7.5"}
OLDEST_OF_TRITON = "6.0"


class Package(NamedTuple):
    """An installed package, its version, and the major release of CUDA that it is built for; 0: unknown."""

    name: str
    version: str
    cuda: int


class Problem(NamedTuple):
    """A reason not to use a GPU, and its fix."""

    found: str
    fix: str


def install(major: int) -> str:
    """Return the command that installs the GPU path for a major release of CUDA."""
    return f"pip install 'nereid-serving[embedded,{EXTRAS.get(major, EXTRAS[12])}]'"


def version_of(name: str) -> str:
    """Return the version of a package, or nothing if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class Installed:
    """The packages of the GPU path.

    Attributes:
        cupy: CuPy's packages; more than one do not work together.
        runtimes: packages of ONNX Runtime; two of them overwrite each other's files.
        provider: the library of ONNX Runtime's CUDA provider.
        has_codec: whether nvImageCodec is there, which decodes the images.
    """

    cupy: tuple[Package, ...]
    runtimes: tuple[str, ...]
    provider: Path | None
    has_codec: bool

    @classmethod
    def present(cls) -> "Installed":
        """Return those of this interpreter."""
        versions = {name: version_of(name) for name in CUPY_PACKAGES}
        cupy = [Package(name, each, CUPY_PACKAGES[name]) for name, each in versions.items() if each]
        runtimes = tuple(name for name in RUNTIMES if version_of(name))
        return cls(tuple(cupy), runtimes, _provider(), _has_codec())

    @property
    def cuda(self) -> int:
        """The major release of CUDA that CuPy is built for; 0 if unknown."""
        return self.cupy[0].cuda if self.cupy else 0

    def problems(self) -> Iterator[Problem]:
        """Yield what the GPU path lacks, the first reason first."""
        fix = install(self.cuda)
        if len(self.runtimes) > 1:
            yield conflict(self.runtimes, fix)
        elif self.provider is None:
            remove = "pip uninstall -y onnxruntime && " if self.runtimes else ""
            yield Problem("ONNX Runtime has no CUDA provider", remove + fix)
        if not self.cupy:
            yield Problem("CuPy is missing", fix)
        if len(self.cupy) > 1:
            yield conflict([each.name for each in self.cupy], fix)
        if not self.has_codec:
            yield Problem("nvImageCodec is missing", fix)


def conflict(names: Sequence[str], fix: str) -> Problem:
    """Return the problem of packages that contain the same files; `fix` installs the right one."""
    found = f"{' and '.join(names)} overwrite each other's files"
    return Problem(found, f"pip uninstall -y {' '.join(names)} && {fix}")


def _has_codec() -> bool:
    try:
        return importlib.util.find_spec("nvidia.nvimgcodec") is not None
    except ModuleNotFoundError:  # no package of NVIDIA is installed
        return False


def _provider() -> Path | None:
    spec = importlib.util.find_spec("onnxruntime")
    for place in (spec and spec.submodule_search_locations) or ():
        if (path := Path(place) / CUDA_PROVIDER).exists():
            return path
    return None


def driver_problem(cuda_of_driver: str, driver: str, major: int) -> Problem | None:
    """Return why a driver cannot run packages for a major release of CUDA, or None.

    A driver supports its own major release and all earlier ones.

    Args:
        cuda_of_driver: the newest CUDA release that the driver supports, such as "12.4"; empty if unknown.
        driver: version of the driver.
        major: of the packages; 0 if unknown.
    """
    supported = int(cuda_of_driver.partition(".")[0] or 0)
    if not supported or supported >= major:
        return None
    found = f"driver {driver} supports CUDA {cuda_of_driver}, and CuPy is built for CUDA {major}"
    fix = f"install driver {OLDEST_DRIVER.get(major, 'for CUDA ' + str(major))} or later"
    return Problem(found, f"{fix}, or: {install(supported)}" if supported in EXTRAS else fix)


def capability_problem(name: str, capability: str | None, major: int) -> Problem | None:
    """Return why a GPU is too old for Triton or for packages of a major release of CUDA, or None."""
    oldest = OLDEST_CAPABILITY.get(major, OLDEST_OF_TRITON)
    if capability is None or _numbers(capability) >= _numbers(oldest):
        return None
    fix = install(12) if _numbers(capability) >= _numbers(OLDEST_OF_TRITON) else "nereid serve --profile cpu"
    return Problem(f"{name} has compute capability {capability}; expected at least {oldest}", fix)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
