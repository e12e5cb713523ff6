"""The backend directory that a server gets."""

from nereid.server.wheel import assemble_backends, find_wheel


def test_backends_are_the_wheels_and_ours(tmp_path):
    """It has our adapters, and the wheel's own backend with the stub of this Python."""
    backends = assemble_backends(find_wheel(), tmp_path / "backends")

    found = {str(path.relative_to(backends)) for path in backends.rglob("*") if path.is_file()}
    assert found == {
        "python/libtriton_python.so",
        "python/triton_python_backend_stub",
        "python/triton_python_backend_utils.py",
        "onnxruntime/model.py",
        "preprocess/model.py",
        "fused/model.py",
        "ab_router/model.py",
    }
