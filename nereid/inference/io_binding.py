"""Runs whose inputs and outputs stay on the GPU: ONNX Runtime's IoBinding over CuPy arrays.

CuPy is imported where it is used, because an instance on a CPU has none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime


def run(
    session: onnxruntime.InferenceSession,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    options: onnxruntime.RunOptions,
    device_id: int,
) -> list[Any]:
    """Run the network where the data lie.

    Args:
        inputs: CuPy arrays on `device_id`, bound where they are, or NumPy arrays, which ONNX Runtime copies.

    Returns:
        One CuPy array on `device_id` per name of `outputs`.
    """
    import cupy

    # What joined the inputs may still be under way on CuPy's stream, which ONNX Runtime does not know.
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
    """Make CuPy allocate on this device from now on, in the calling thread."""
    import cupy

    cupy.cuda.Device(device_id).use()


def compute_capability(device_id: int) -> str:
    """Return the device's compute capability as `cc_model_filenames` writes it, `9.0` for an H200."""
    import cupy

    digits = cupy.cuda.Device(device_id).compute_capability
    return f"{digits[:-1]}.{digits[-1]}"


def _array(value: onnxruntime.OrtValue, device_id: int) -> Any:
    """View ONNX Runtime's output as a CuPy array, which keeps it alive."""
    import cupy

    dtype = np.dtype(ELEMENTS[value.data_type()])
    size = value.tensor_size_in_bytes()
    memory = cupy.cuda.UnownedMemory(value.data_ptr(), size, owner=value, device_id=device_id)
    return cupy.ndarray(value.shape(), dtype, cupy.cuda.MemoryPointer(memory, 0))


ELEMENTS = {
    "tensor(bool)": np.bool_,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(float16)": np.float16,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
}
