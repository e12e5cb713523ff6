"""Between Triton's Python objects and arrays: the only library module that imports `pb_utils`."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.errors import InvalidRequest, ServingError

if TYPE_CHECKING:  # OpenCV and its kin cost time and memory, and only some backends need them
    from python_backend.pipeline import Batch


def read_images(request: Any) -> list[bytes]:
    """Return the encoded images of one request: its tensor `image`, BYTES [N, 1]."""
    return list(pb_utils.get_input_tensor_by_name(request, "image").as_numpy().ravel())


def read_tensors(request: Any, is_on_gpu: bool = False) -> dict[str, Any]:
    """Return the request's input tensors by name; they live as long as the request.

    Args:
        is_on_gpu: leave those that lie on a GPU there, as CuPy arrays; else all are NumPy's.
    """
    return {tensor.name(): _array(tensor, is_on_gpu) for tensor in request.inputs()}


def read_parameters(request: Any) -> dict[str, str]:
    """Return the request's parameters; forwarded headers are among them.

    Raises:
        InvalidRequest: a header is not UTF-8, which is what Triton hands on.
    """
    try:
        return dict(json.loads(request.parameters() or "{}"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"headers must be UTF-8: {error}") from None


def answer(**tensors: Any) -> Any:
    """Build a response from arrays, or from tensors that another model made."""
    return pb_utils.InferenceResponse([_tensor(name, value) for name, value in tensors.items()])


def fail(error: ServingError) -> Any:
    """Build the response that refuses one request; raising instead would fail the whole batch."""
    code = getattr(pb_utils.TritonError, error.code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))


def answer_batch(batch: "Batch", **tensors: np.ndarray) -> list[Any]:
    """Hand each request of `batch` its rows of `tensors`, or its error."""
    return [
        fail(rows) if isinstance(rows, ServingError) else answer(**{n: t[rows] for n, t in tensors.items()})
        for rows in batch.outcomes
    ]


def log_info(message: str) -> None:
    """Write to Triton's log."""
    pb_utils.Logger.log_info(message)  # the stub adds it only after this module is imported


def log_warn(message: str) -> None:
    """Write a warning to Triton's log."""
    pb_utils.Logger.log_warn(message)


class SessionMetrics:
    """What a session does, on Triton's metrics page; all instances of a version share its series.

    Every change is a round trip to the server, which has to wake up for it on a request's path, but hardly
    for many in a row: so changes are kept, and handed on every `FLUSH_S` seconds.
    """

    def __init__(self, model: str, version: int) -> None:
        self._labels = {"model": model, "version": str(version)}
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, ...], Any] = {}
        self._waiting: SimpleQueue[tuple[str, float, dict[str, str]]] = SimpleQueue()
        self._is_closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush, daemon=True)
        self._flusher.start()

    def opened(self, provider: str, seconds: float) -> None:
        """Count an instance, and how long its session took to open."""
        self._change("session_start_seconds_total", seconds)
        self._change("sessions_total", 1)
        self._change("instances", 1, provider=provider)

    def closed(self, provider: str) -> None:
        """Count an instance that ends; nothing is handed on after."""
        self._change("instances", -1, provider=provider)
        self._is_closing.set()
        self._flusher.join()

    def ran(self, seconds: float, rows: int) -> None:
        """Observe one run."""
        self._change("run_seconds", seconds)
        self._change("batch_size", rows)

    def rejected(self, error: ServingError) -> None:
        """Count a request that got an error."""
        self._change("rejected_total", 1, reason=error.code.lower())

    def fetched_from_host(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Count inputs that lie on the host although the instance is on a GPU."""
        inputs = sum(isinstance(array, np.ndarray) for request in requests for array in request.values())
        if inputs:
            self._change("host_inputs_total", inputs)

    def _change(self, name: str, value: float, **labels: str) -> None:
        if self._flusher.is_alive():  # a server that refuses metrics must not make them pile up here
            self._waiting.put((name, value, labels))

    def _flush(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(FLUSH_S)
            while not self._waiting.empty():
                name, value, labels = self._waiting.get()
                getattr(self._metric(name, labels), CHANGES[METRICS[name].kind])(value)

    def _metric(self, name: str, labels: Mapping[str, str]) -> Any:
        key = name, *labels.values()
        if key not in self._series:
            about = METRICS[name]
            if name not in self._families:
                self._families[name] = pb_utils.MetricFamily(
                    name=f"nereid_onnxruntime_{name}",
                    description=about.description,
                    kind=getattr(pb_utils.MetricFamily, about.kind),
                )
            extra = {"buckets": list(about.buckets)} if about.buckets else {}
            self._series[key] = self._families[name].Metric(labels={**self._labels, **labels}, **extra)
        return self._series[key]


@dataclass(frozen=True, slots=True)
class MetricKind:
    """A metric family: Triton's kind, its sentence, and the upper bounds of a histogram's buckets."""

    kind: str
    description: str
    buckets: tuple[float, ...] = ()


FLUSH_S = 0.5
CHANGES = {"HISTOGRAM": "observe", "COUNTER": "increment", "GAUGE": "increment"}
METRICS = {
    "run_seconds": MetricKind(
        "HISTOGRAM",
        "Duration of one run of the network",
        (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0),
    ),
    "batch_size": MetricKind("HISTOGRAM", "Rows of one run of the network", (1, 2, 4, 8, 16, 32, 64, 128)),
    "rejected_total": MetricKind("COUNTER", "Requests answered with an error, by its code"),
    "session_start_seconds_total": MetricKind("COUNTER", "Time that opening sessions took"),
    "sessions_total": MetricKind("COUNTER", "Sessions opened"),
    "instances": MetricKind("GAUGE", "Instances, by the execution provider in use"),
    "host_inputs_total": MetricKind("COUNTER", "Inputs on the host of an instance on a GPU: each is copied"),
}


def version_folder(document: Mapping[str, Any]) -> Path:
    """Return the version's folder of the model that is being auto-completed."""
    folder = Path(pb_utils.get_model_dir())
    # Triton means the folder of the model file, which may be given with a path in it.
    depth = len(Path(document.get("default_model_filename") or "model.onnx").parts) - 1
    return folder.parents[depth - 1] if depth else folder


def _array(tensor: Any, is_on_gpu: bool) -> Any:
    if tensor.is_cpu():
        return tensor.as_numpy()
    import cupy

    array = cupy.from_dlpack(tensor)
    return array if is_on_gpu else array.get()


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return pb_utils.Tensor(name, value)
    return value if isinstance(value, pb_utils.Tensor) else pb_utils.Tensor.from_dlpack(name, value)
