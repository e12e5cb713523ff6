"""Runs with inputs and outputs on the GPU: ONNX Runtime's IoBinding over CuPy arrays.

CuPy is imported where it is used, because an instance on a CPU has no CuPy.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

# ONNX's element types are NumPy's names, but for these.
FLOATS = {"float": "float32", "double": "float64"}


def run(
    session: onnxruntime.InferenceSession,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    options: onnxruntime.RunOptions,
    device_id: int,
) -> list[Any]:
    """Run the network on the device of its data.

    Args:
        inputs: CuPy arrays on `device_id`, bound without a copy, or NumPy arrays, which ONNX Runtime copies.

    Returns:
        One CuPy array on `device_id` per name of `outputs`.
    """
    import cupy

    # The copies that joined the inputs may still run on CuPy's stream, which ONNX Runtime ignores.
    cupy.cuda.get_current_stream().synchronize()
    binding = session.io_binding()
    for name, array in inputs.items():
        if isinstance(array, np.ndarray):
            binding.bind_cpu_input(name, array)
        else:
            binding.bind_input(name, "cuda", device_id, array.dtype.type, array.shape, array.data.ptr)
    for name in outputs:
        binding.bind_output(name, "cuda", device_id)
    binding.synchronize_inputs()
    session.run_with_iobinding(binding, options)
    binding.synchronize_outputs()
    return [_array(value, device_id) for value in binding.get_outputs()]


def use(device_id: int) -> None:
    """Make CuPy allocate on this device, in the calling thread."""
    import cupy

    cupy.cuda.Device(device_id).use()


def release_memory() -> None:
    """Return the memory that CuPy keeps for later arrays to the device."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def compute_capability(device_id: int) -> str:
    """Return the device's compute capability as `cc_model_filenames` writes it, `9.0` for an H200."""
    import cupy

    digits = cupy.cuda.Device(device_id).compute_capability
    return f"{digits[:-1]}.{digits[-1]}"


def _array(value: onnxruntime.OrtValue, device_id: int) -> Any:
    """View ONNX Runtime's output as a CuPy array, which keeps it alive."""
    import cupy

    element = value.data_type().removeprefix("tensor(").removesuffix(")")
    dtype = np.dtype(FLOATS.get(element, element))
    size = value.tensor_size_in_bytes()
    memory = cupy.cuda.UnownedMemory(value.data_ptr(), size, owner=value, device_id=device_id)
    return cupy.ndarray(value.shape(), dtype, cupy.cuda.MemoryPointer(memory, 0))
