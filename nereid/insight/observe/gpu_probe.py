"""Programs that use the GPU as a server does, each run in a process of its own: `python -m … NAME`.

A CUDA library may end its process or never return. The last line of the output is the result.
"""

import sys
from collections.abc import Callable

from nereid.base.assets import COFFEE, REPOSITORY

NETWORK = "efficientnet_lite0/1/model.onnx"
KERNEL = """extern "C" __global__ void twice(float* values) { values[threadIdx.x] *= 2; }"""


def use_provider(name: str = "CUDAExecutionProvider") -> str:
    """Run a network with convolutions on an ONNX Runtime provider; CUDA's needs cuDNN and cuBLAS."""
    import numpy as np
    import onnxruntime

    if name not in onnxruntime.get_available_providers():
        raise RuntimeError(f"onnxruntime {onnxruntime.__version__} has no {name}")
    session = onnxruntime.InferenceSession(REPOSITORY / NETWORK, providers=[name])
    # ONNX Runtime reports a provider that it cannot load on stderr, and uses the CPU instead.
    if name not in session.get_providers():
        raise RuntimeError(f"onnxruntime {onnxruntime.__version__} cannot use {name}")
    (scores,) = session.run(None, {"input": np.zeros((1, 3, 224, 224), np.float32)})
    if not np.isfinite(scores).all():
        raise RuntimeError(f"{name} computes invalid scores")
    return f"onnxruntime {onnxruntime.__version__} runs a network"


def use_cupy() -> str:
    """Compile a kernel with NVRTC, and run it on GPU memory."""
    import cupy

    values = cupy.arange(4, dtype=cupy.float32)
    cupy.RawKernel(KERNEL, "twice")((1,), (4,), (values,))
    if values.tolist() != [0, 2, 4, 6]:
        raise RuntimeError(f"the kernel computes {values.tolist()}, expected [0, 2, 4, 6]")
    return f"CuPy {cupy.__version__} compiles and runs a kernel"


def use_codec() -> str:
    """Decode a photo as the server does; its preprocessor also checks the decoder."""
    from nereid.vision.imaging.decode import ImageLimits
    from nereid.vision.imaging.gpu_preprocessor import GpuPreprocessor
    from nereid.vision.imaging.transform import Transform

    preprocessor = GpuPreprocessor(Transform(224, 224, resize_shorter_px=256), ImageLimits(), 1, 0)
    (error,) = preprocessor.prepare([COFFEE.read_bytes()])
    if error or preprocessor.fallbacks:
        raise RuntimeError(f"the GPU does not decode a photo: {error or 'the host decodes it'}")
    return "nvImageCodec decodes a photo"


PROBES: dict[str, Callable[[], str]] = {"provider": use_provider, "cupy": use_cupy, "codec": use_codec}

if __name__ == "__main__":
    print(PROBES[sys.argv[1]]())
