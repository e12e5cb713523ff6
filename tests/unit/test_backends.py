"""The backend directory that a server gets."""

import pytest

from nereid.base.errors import ServerError
from nereid.server.command_line import environment
from nereid.server.installation import (
    FOLDER,
    LIBRARY,
    STUB,
    assemble_backends,
    cuda_folders,
    find_installation,
)


def test_backends_of_an_installed_triton_come_first(tmp_path):
    root = tmp_path / "tritonserver"
    for name in (
        "bin/tritonserver",
        f"backends/python/{STUB}",
        f"backends/python/{LIBRARY}",
        "backends/onnxruntime/libtriton_onnxruntime.so",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)

    backends = assemble_backends(find_installation({FOLDER: str(root)}), tmp_path / "backends")

    assert (backends / "python" / STUB).read_text() == f"backends/python/{STUB}"
    assert [path.name for path in (backends / "onnxruntime").iterdir()] == ["libtriton_onnxruntime.so"]
    ours = {path.parent.name for path in backends.glob("*/model.py")}
    assert ours == {"preprocess", "text_reader", "fused", "ab_router", "boxes"}


def test_missing_part_of_an_installed_triton_is_named(tmp_path):
    with pytest.raises(ServerError, match=f"^{FOLDER} is '{tmp_path}', which has no bin/tritonserver$"):
        find_installation({FOLDER: str(tmp_path)})


def test_cuda_libraries_of_pip_are_searched_last(tmp_path, monkeypatch):
    """CuPy and ONNX Runtime do not find them alone; a CUDA of the machine comes first."""
    folder = tmp_path / "nvidia" / "cuda_nvrtc" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)

    words = environment(find_installation({}), {"LD_LIBRARY_PATH": "/opt/cuda"})["LD_LIBRARY_PATH"].split(":")

    assert folder in cuda_folders()
    assert words.index("/opt/cuda") < words.index(str(folder))
