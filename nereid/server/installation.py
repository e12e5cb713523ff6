"""The parts of a Triton installation, from the `nvidia-pytriton` wheel or an image such as NVIDIA's."""

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid.base.assets import ADAPTERS
from nereid.base.errors import ServerError
from nereid.server import preflight

INSTALL = "pip install 'nereid-serving[embedded,cpu]'"
# Environment variable with the folder of an installed Triton, `/opt/tritonserver` in NVIDIA's image.
FOLDER = "NEREID_TRITON"
STUB, LIBRARY = "triton_python_backend_stub", "libtriton_python.so"


@dataclass(frozen=True, slots=True)
class Installation:
    """Paths of Triton's parts: the executable, its backends, the stub, and its libraries, if any."""

    server: Path
    backends: Path
    stub: Path
    libraries: Path | None = None

    @property
    def adapters(self) -> list[Path]:
        """Our adapters for the backends it lacks, each a `model.py` in the folder of its backend."""
        paths = sorted(ADAPTERS.glob("*/model.py"))
        return [path for path in paths if not (self.backends / path.parent.name).is_dir()]


def find_installation(environment: Mapping[str, str]) -> Installation:
    """Locate the Triton that the environment names, else the one in this interpreter's packages.

    Raises:
        ServerError: it is not installed, or has no stub for this Python.
    """
    if not (folder := environment.get(FOLDER, "")):
        return _in_wheel()
    root, backends = Path(folder), Path(folder) / "backends"
    triton = Installation(root / "bin" / "tritonserver", backends, backends / "python" / STUB)
    for path in (triton.server, triton.stub, backends / "python" / LIBRARY):
        if not path.is_file():
            raise ServerError(f"{FOLDER} is '{root}', which has no {path.relative_to(root)}")
    return triton


def _in_wheel() -> Installation:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.origin:
        raise ServerError("nvidia-pytriton is not installed", INSTALL)
    package = Path(spec.origin).parent
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / preflight.PYTHON / STUB
    if not stub.exists():
        have = ", ".join(sorted(path.name for path in stub.parent.parent.iterdir()))
        raise ServerError(f"nvidia-pytriton has no stub for Python {preflight.PYTHON}, it has: {have}")
    libraries = package.parent / "nvidia_pytriton.libs"
    return Installation(root / "bin" / "tritonserver", root / "backends", stub, libraries)


def assemble_backends(installation: Installation, target: Path) -> Path:
    """Build Triton's backend directory in `target`: its own backends, and our adapters for what it lacks.

    The Python backend is copied, not linked: Triton expects the stub in the folder of `libtriton_python.so`.
    Each adapter has its own copy of that library. Otherwise it would inherit settings of `python`, such as
    the number of threads.
    """
    shutil.rmtree(target, ignore_errors=True)
    python = target / "python"
    shutil.copytree(installation.backends / "python", python, ignore=shutil.ignore_patterns("__pycache__"))
    if not (python / STUB).exists():
        shutil.copy2(installation.stub, python)
    for backend in installation.backends.iterdir():
        if backend.name != python.name and backend.is_dir():
            (target / backend.name).symlink_to(backend.resolve())
    for adapter in installation.adapters:
        folder = target / adapter.parent.name
        folder.mkdir()
        shutil.copy2(adapter, folder)
        shutil.copy2(python / LIBRARY, folder / LIBRARY.replace(python.name, folder.name))
    return target


def cuda_folders() -> list[Path]:
    """Return the folders of CUDA libraries installed by pip, which CuPy and ONNX Runtime do not search."""
    spec = importlib.util.find_spec("nvidia")
    locations = (spec and spec.submodule_search_locations) or ()
    return sorted(folder for location in locations for folder in Path(location).glob("*/lib"))
