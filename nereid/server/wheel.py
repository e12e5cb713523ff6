"""The parts of the embedded server: Triton's files in the `nvidia-pytriton` wheel, and our adapters."""

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from nereid.assets import ADAPTERS
from nereid.errors import ServerError
from nereid.server import preflight

INSTALL = "pip install 'nereid-serving[embedded,cpu]'"


@dataclass(frozen=True, slots=True)
class Wheel:
    """Paths of the embedded server's parts: the executable, its Python backend, the stub, the libraries."""

    server: Path
    python_backend: Path
    stub: Path
    libraries: Path


def find_wheel() -> Wheel:
    """Locate the embedded server in this interpreter's packages.

    Raises:
        ServerError: the wheel is not installed, or has no stub for this Python.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.origin:
        raise ServerError("nvidia-pytriton is not installed", INSTALL)
    package = Path(spec.origin).parent
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / preflight.PYTHON / "triton_python_backend_stub"
    if not stub.exists():
        have = ", ".join(sorted(path.name for path in stub.parent.parent.iterdir()))
        raise ServerError(f"nvidia-pytriton has no stub for Python {preflight.PYTHON}, it has: {have}")
    libraries = package.parent / "nvidia_pytriton.libs"
    return Wheel(root / "bin" / "tritonserver", root / "backends" / "python", stub, libraries)


def assemble_backends(wheel: Wheel, target: Path) -> Path:
    """Build Triton's backend directory in `target`: the wheel's `python` and our adapters.

    The stub is copied, not linked: Triton expects it in the folder of `libtriton_python.so`.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(wheel.python_backend, target / "python", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(wheel.stub, target / "python")
    for adapter in ADAPTERS.glob("*/model.py"):
        (target / adapter.parent.name).mkdir()
        shutil.copy2(adapter, target / adapter.parent.name)
    return target
