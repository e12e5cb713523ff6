"""Network runs with inputs and outputs on the GPU, through ONNX Runtime's IoBinding over CuPy arrays.

CuPy is imported where it is used, because an instance on a CPU does not have it. `CudaGraphRuns` also works
with NumPy arrays, for ONNX Runtime on the CPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from nereid.base.errors import InferenceFailed
from nereid.vision.inference.run_failures import run_failure

# ONNX's element types have NumPy's names, except for these.
FLOATS = {"float": "float32", "double": "float64"}


def run(
    session: onnxruntime.InferenceSession,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    options: onnxruntime.RunOptions,
    device_id: int,
) -> list[Any]:
    """Run the network on the device that holds its data.

    Args:
        inputs: CuPy arrays on `device_id`, bound without a copy, or NumPy arrays, which ONNX Runtime copies.

    Returns:
        One CuPy array on `device_id` per name in `outputs`.
    """
    import cupy

    # Copies that joined the inputs may still be running on CuPy's stream, which ONNX Runtime ignores.
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


# Each recorded graph holds its buffers and its run's memory.
MAX_CUDA_GRAPHS = 64
GRAPH_ID, NO_GRAPH = "gpu_graph_id", "-1"
# ONNX Runtime records the first or second run; the third is the first sure to replay the graph.
RUNS_TO_CAPTURE = 3
NO_SYNCHRONIZE = "disable_synchronize_execution_providers"


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    inputs: Mapping[str, Any]
    outputs: Sequence[Any]
    binding: Any
    options: onnxruntime.RunOptions


class CudaGraphRuns:
    """Runs of a session that replays CUDA graphs, whose buffer addresses are fixed when they are recorded.

    Each set of shapes has its own buffers, allocated once. Inputs are copied into them, and outputs into new
    arrays, because an output may be passed on through DLPack and read after the next run has begun.

    Args:
        xp: `cupy`, or `numpy` for a session on the CPU.
        device: device of the buffers, as IoBinding names it: `cuda` or `cpu`.
        device_id: number of the device.
        sizes: row counts; a run is padded to the next one. Empty if the first dimension is not the batch:
            then every set of shapes is recorded as it is.
        max_graphs: maximum number of sets of shapes that are recorded; others run without a graph.
    """

    def __init__(
        self,
        xp: Any,
        device: str,
        device_id: int,
        sizes: Sequence[int] = (),
        max_graphs: int = MAX_CUDA_GRAPHS,
    ) -> None:
        self._sizes, self._max_graphs = sorted(sizes), max_graphs
        self._xp, self._device, self._device_id = xp, device, device_id
        self._recorded: dict[Any, _CapturedGraph] = {}

    def __call__(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        options: onnxruntime.RunOptions,
    ) -> list[Any]:
        """Return one new array on the device per name in `outputs`."""
        arrays = {name: self._xp.asarray(array) for name, array in inputs.items()}
        shapes = {name: self._filled_shape(array.shape) for name, array in sorted(arrays.items())}
        key = tuple(outputs), tuple(shapes.items())
        if key not in self._recorded:
            if len(self._recorded) >= self._max_graphs:
                return self._run_once(session, arrays, outputs)
            self._recorded[key] = self._record(session, arrays, shapes, outputs)
        recorded = self._recorded[key]
        # `...` also indexes arrays without dimensions.
        rows = slice(len(next(iter(arrays.values())))) if self._sizes else ...
        for name, array in arrays.items():
            recorded.inputs[name][rows] = array
        self._synchronize()
        session.run_with_iobinding(recorded.binding, recorded.options)
        recorded.binding.synchronize_outputs()
        results = [buffer[rows].copy() for buffer in recorded.outputs]
        self._synchronize()
        return results

    def _filled_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        matches = [size for size in self._sizes if size >= shape[0]] if shape else []
        return (matches[0], *shape[1:]) if matches else tuple(shape)

    def _run_once(
        self, session: onnxruntime.InferenceSession, inputs: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[Any]:
        arrays = {name: self._xp.ascontiguousarray(array) for name, array in inputs.items()}
        self._synchronize()
        binding = session.io_binding()
        for name, array in arrays.items():
            self._bind_array(binding.bind_input, name, array)
        for name in outputs:
            binding.bind_output(name, self._device, self._device_id)
        session.run_with_iobinding(binding, _named_graph(NO_GRAPH))
        binding.synchronize_outputs()
        values = binding.get_outputs()
        if self._device == "cpu":
            return [value.numpy() for value in values]
        return [_array(value, self._device_id) for value in values]

    def _record(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        outputs: Sequence[str],
    ) -> _CapturedGraph:
        buffers = {name: self._xp.zeros(shapes[name], array.dtype) for name, array in inputs.items()}
        returned = [self._xp.empty_like(array) for array in self._run_once(session, buffers, outputs)]
        if self._sizes:
            _check_rows(len(next(iter(buffers.values()))), dict(zip(outputs, returned, strict=True)))
        binding = session.io_binding()
        for name, buffer in buffers.items():
            self._bind_array(binding.bind_input, name, buffer)
        for name, buffer in zip(outputs, returned, strict=True):
            self._bind_array(binding.bind_output, name, buffer)
        return _CapturedGraph(buffers, returned, binding, _named_graph(str(len(self._recorded) + 1)))

    def _bind_array(self, bind: Any, name: str, array: Any) -> None:
        address = array.ctypes.data if self._device == "cpu" else array.data.ptr
        bind(name, self._device, self._device_id, array.dtype.type, array.shape, address)

    def _synchronize(self) -> None:
        """Wait for copies on CuPy's stream, which ONNX Runtime ignores."""
        if self._device != "cpu":
            self._xp.cuda.get_current_stream().synchronize()


class BoundRuns:
    """Runs over fixed memory on the caller's stream, without copying inputs and without waiting.

    Each pair of slot and size has its own CUDA graph, recorded at construction. A run with fewer rows uses
    the next larger size, and its remaining rows hold an earlier batch. All calls must come from the thread
    that constructed this object, because ONNX Runtime 1.31 keeps separate graphs for each thread.

    Args:
        session: session with CUDA graphs and the provider option `user_compute_stream`.
        name: name of the only input.
        tensors: one CuPy array [rows, ...] per slot, read by the runs.
        outputs: names of the outputs, which have one row per row of input.
        sizes: row counts; the largest must be the tensors'.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        name: str,
        tensors: Sequence[Any],
        outputs: Sequence[str],
        sizes: Sequence[int],
        device_id: int,
    ) -> None:
        """Allocate the outputs and record all graphs.

        Raises:
            InferenceFailed: an output does not have one row per row of input.
        """
        self._session, self._sizes, self._name = session, sorted(sizes), name
        self._device_id = device_id
        self._outputs = [self._allocate(tensor, outputs) for tensor in tensors]
        self._hosts = [_pinned(arrays) for arrays in self._outputs]
        self._runs: dict[tuple[int, int], tuple[Any, onnxruntime.RunOptions]] = {}
        # Record all slots of one size in succession: ONNX Runtime plans again whenever the size changes.
        for rows in self._sizes:
            for slot, tensor in enumerate(tensors):
                self._runs[slot, rows] = self._bind(slot, tensor, rows)
                for _ in range(RUNS_TO_CAPTURE):
                    self.enqueue(slot, rows)

    def enqueue(self, slot: int, rows: int) -> None:
        """Enqueue a run over the first rows of a slot."""
        size = next(size for size in self._sizes if size >= rows)
        try:
            self._session.run_with_iobinding(*self._runs[slot, size])
        except Exception as error:  # ONNX Runtime's own exceptions share no base class
            raise run_failure(error) from None

    def fetch(self, slot: int, rows: int, stream: Any) -> dict[str, np.ndarray]:
        """Enqueue copies of the outputs to pinned host memory, and return the arrays that will hold them."""
        hosts = {name: host[:rows] for name, host in self._hosts[slot].items()}
        for name, host in hosts.items():
            self._outputs[slot][name][:rows].get(stream=stream, out=host, blocking=False)
        return hosts

    def _allocate(self, tensor: Any, outputs: Sequence[str]) -> dict[str, Any]:
        import cupy

        binding = self._session.io_binding()
        binding.bind_input(
            self._name, "cuda", self._device_id, tensor.dtype.type, tensor.shape, tensor.data.ptr
        )
        for output in outputs:
            binding.bind_output(output, "cuda", self._device_id)
        self._session.run_with_iobinding(binding, _named_graph(NO_GRAPH))
        binding.synchronize_outputs()
        returned = [_array(value, self._device_id) for value in binding.get_outputs()]
        arrays = {name: cupy.empty_like(array) for name, array in zip(outputs, returned, strict=True)}
        _check_rows(len(tensor), arrays)
        return arrays

    def _bind(self, slot: int, tensor: Any, rows: int) -> tuple[Any, onnxruntime.RunOptions]:
        binding = self._session.io_binding()
        for bind, name, array in (
            (binding.bind_input, self._name, tensor[:rows]),
            *((binding.bind_output, name, output[:rows]) for name, output in self._outputs[slot].items()),
        ):
            bind(name, "cuda", self._device_id, array.dtype.type, array.shape, array.data.ptr)
        options = _named_graph(str(len(self._runs) + 1))
        options.add_run_config_entry(NO_SYNCHRONIZE, "1")
        return binding, options


def _pinned(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    import cupyx

    return {name: cupyx.empty_pinned(array.shape, array.dtype) for name, array in arrays.items()}


def cuda_graph_runs(device_id: int, sizes: Sequence[int]) -> CudaGraphRuns:
    """Return the `CudaGraphRuns` of a session on a GPU."""
    import cupy

    return CudaGraphRuns(cupy, "cuda", device_id, sizes)


def _check_rows(rows: int, outputs: Mapping[str, Any]) -> None:
    """Fail unless every output has one row per input row, so that padding rows can be cut off."""
    for name, array in outputs.items():
        if array.shape[:1] != (rows,):
            raise InferenceFailed(
                f"output '{name}' with CUDA graphs: expected {rows} rows for {rows} rows of input, "
                f"got shape {list(array.shape)}"
            )


def _named_graph(number: str) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(GRAPH_ID, number)
    return options


def use(device_id: int) -> None:
    """Make this CuPy's current device in the calling thread."""
    import cupy

    cupy.cuda.Device(device_id).use()


def release_memory() -> None:
    """Return CuPy's cached memory to the device."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def compute_capability(device_id: int) -> str:
    """Return the device's compute capability as written in `cc_model_filenames`: `9.0` for an H200."""
    import cupy

    digits = cupy.cuda.Device(device_id).compute_capability
    return f"{digits[:-1]}.{digits[-1]}"


def _array(value: onnxruntime.OrtValue, device_id: int) -> Any:
    """View an output of ONNX Runtime as a CuPy array, which keeps the output alive."""
    import cupy

    element = value.data_type().removeprefix("tensor(").removesuffix(")")
    dtype = np.dtype(FLOATS.get(element, element))
    size = value.tensor_size_in_bytes()
    memory = cupy.cuda.UnownedMemory(value.data_ptr(), size, owner=value, device_id=device_id)
    return cupy.ndarray(value.shape(), dtype, cupy.cuda.MemoryPointer(memory, 0))
