"""Runs with inputs and outputs on the GPU: ONNX Runtime's IoBinding over CuPy arrays.

CuPy is imported where it is used, because an instance on a CPU has no CuPy. Arrays of a `RecordedRuns` are
NumPy's where ONNX Runtime runs on the CPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


# Each recorded graph holds its buffers and the memory of its run.
MAX_RECORDED = 64
GRAPH_ID, NOT_RECORDED = "gpu_graph_id", "-1"


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The buffers of one set of shapes, bound once, and the options that name its graph."""

    inputs: Mapping[str, Any]
    outputs: Sequence[Any]
    binding: Any
    options: onnxruntime.RunOptions


class RecordedRuns:
    """Runs of a session that repeats CUDA graphs: a graph reads and writes the addresses of its recording.

    Each set of shapes has buffers of its own, allocated once. Inputs are copied into them, and outputs out of
    them, on the device: an output may be handed on by DLPack and read after the next run has begun.

    Args:
        xp: `cupy`, or `numpy` for a session on the CPU.
        device: of the buffers, as IoBinding calls it: `cuda` or `cpu`.
        device_id: number of the device.
        max_recorded: number of sets of shapes with buffers; others run without a recording.
    """

    def __init__(self, xp: Any, device: str, device_id: int, max_recorded: int = MAX_RECORDED) -> None:
        self._max_recorded = max_recorded
        self._xp, self._device, self._device_id = xp, device, device_id
        self._recorded: dict[Any, _Recorded] = {}

    def __call__(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        options: onnxruntime.RunOptions,
    ) -> list[Any]:
        """Return one new array on the device per name of `outputs`."""
        key = (tuple(outputs), tuple((name, array.shape) for name, array in sorted(inputs.items())))
        if key not in self._recorded:
            results = self._first(session, inputs, outputs)
            if len(self._recorded) >= self._max_recorded:
                return results
            self._recorded[key] = self._bind(session, inputs, dict(zip(outputs, results, strict=True)))
        recorded = self._recorded[key]
        for name, array in inputs.items():
            recorded.inputs[name][...] = self._xp.asarray(array)
        self._synchronize()
        session.run_with_iobinding(recorded.binding, recorded.options)
        recorded.binding.synchronize_outputs()
        results = [buffer.copy() for buffer in recorded.outputs]
        self._synchronize()
        return results

    def _first(
        self, session: onnxruntime.InferenceSession, inputs: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[Any]:
        """Run without a recording, which shows the shapes of the outputs."""
        arrays = {name: self._xp.ascontiguousarray(self._xp.asarray(each)) for name, each in inputs.items()}
        self._synchronize()
        binding = session.io_binding()
        for name, array in arrays.items():
            self._bind_array(binding.bind_input, name, array)
        for name in outputs:
            binding.bind_output(name, self._device, self._device_id)
        session.run_with_iobinding(binding, _named_graph(NOT_RECORDED))
        binding.synchronize_outputs()
        values = binding.get_outputs()
        if self._device == "cpu":
            return [value.numpy() for value in values]
        return [_array(value, self._device_id) for value in values]

    def _bind(
        self, session: onnxruntime.InferenceSession, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> _Recorded:
        taken = {name: self._xp.empty(array.shape, array.dtype) for name, array in inputs.items()}
        returned = {name: self._xp.empty(array.shape, array.dtype) for name, array in outputs.items()}
        binding = session.io_binding()
        for name, buffer in taken.items():
            self._bind_array(binding.bind_input, name, buffer)
        for name, buffer in returned.items():
            self._bind_array(binding.bind_output, name, buffer)
        options = _named_graph(str(len(self._recorded) + 1))
        return _Recorded(taken, [*returned.values()], binding, options)

    def _bind_array(self, bind: Any, name: str, array: Any) -> None:
        address = array.ctypes.data if self._device == "cpu" else array.data.ptr
        bind(name, self._device, self._device_id, array.dtype.type, array.shape, address)

    def _synchronize(self) -> None:
        """Wait for CuPy's copies, whose stream ONNX Runtime ignores."""
        if self._device != "cpu":
            self._xp.cuda.get_current_stream().synchronize()


def recorded_runs(device_id: int) -> RecordedRuns:
    """Return the runs of a session on a GPU that repeats CUDA graphs."""
    import cupy

    return RecordedRuns(cupy, "cuda", device_id)


def _named_graph(number: str) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(GRAPH_ID, number)
    return options


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
