"""Fixtures of the tests on a GPU: the GPU, or the reason to skip."""

import pytest


@pytest.fixture(scope="session")
def cupy():
    cupy = pytest.importorskip("cupy", reason="needs CuPy, of the extra gpu or gpu13", exc_type=ImportError)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")
    if count == 0:
        pytest.skip("needs an NVIDIA GPU: CUDA sees none")
    return cupy
