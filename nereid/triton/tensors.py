"""Between Triton's Python objects and arrays: the only library module that imports `pb_utils`."""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid.routing import deadline
from nereid.serving_errors import InvalidRequest, ServingError, from_exception
from nereid.triton.metrics import SESSION_METRICS, SESSION_PREFIX, MetricKind

if TYPE_CHECKING:  # OpenCV and its kin cost time and memory, and only some backends need them
    from nereid.imaging.pipeline import Batch


def read_images(request: Any) -> list[bytes] | ServingError:
    """Return the encoded images of one request, its tensor `image`, BYTES [N, 1]; or why it is refused."""
    try:
        deadline.check(read_parameters(request))
    except ServingError as error:
        return from_exception(error)
    return list(pb_utils.get_input_tensor_by_name(request, "image").as_numpy().ravel())


def read_tensors(request: Any, is_on_gpu: bool = False) -> dict[str, Any]:
    """Return the request's input tensors by name; they live as long as the request.

    Args:
        is_on_gpu: leave those that lie on a GPU there, as CuPy arrays; else all are NumPy's.
    """
    return {tensor.name(): _array(tensor, is_on_gpu) for tensor in request.inputs()}


def read_parameters(request: Any) -> dict[str, Any]:
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


class Metrics:
    """What a model counts, on Triton's metrics page; instances with the same labels share the series.

    Every change is a round trip to the server, which has to wake up for it on a request's path, but hardly
    for many in a row: so changes are summed up, and handed on every `FLUSH_S` seconds.

    Args:
        prefix: what the families' names start with.
        kinds: the families, by the rest of their names.
        labels: what all series have.
    """

    def __init__(self, prefix: str, kinds: Mapping[str, MetricKind], **labels: str) -> None:
        self._prefix, self._kinds, self._labels = prefix, kinds, labels
        self._families: dict[str, Any] = {}
        self._series: dict[_Key, Any] = {}
        self._lock = threading.Lock()
        self._sums: dict[_Key, float] = {}
        self._observed: list[tuple[_Key, float]] = []
        self._values: dict[_Key, float] = {}
        self._only: dict[str, tuple[dict[str, str], float]] = {}
        self._alone: set[str] = set()
        self._is_closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush, daemon=True)
        self._flusher.start()

    def add(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Count, or observe in a histogram."""
        if not self._flusher.is_alive():  # a server that refuses metrics must not make them pile up here
            return
        key = name, tuple(labels.items())
        with self._lock:
            if self._kinds[name].kind == "HISTOGRAM":
                self._observed.append((key, value))
            else:
                self._sums[key] = self._sums.get(key, 0.0) + value

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Give a gauge a value."""
        with self._lock:
            self._values[name, tuple(labels.items())] = value

    def set_only(self, name: str, value: float, /, **labels: str) -> None:
        """Give a gauge a value, and let the series go that it had until now."""
        with self._lock:
            self._only[name] = labels, value

    def close(self) -> None:
        """Hand on the last changes; nothing is handed on after."""
        self._is_closing.set()
        self._flusher.join()

    def _flush(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(FLUSH_S)
            with self._lock:
                sums, self._sums = self._sums, {}
                observed, self._observed = self._observed, []
                values, self._values = self._values, {}
                only, self._only = self._only, {}
            for key, value in sums.items():
                self._metric(key).increment(value)
            for key, value in values.items():
                self._metric(key).set(value)
            for key, value in observed:
                self._metric(key).observe(value)
            for name, (labels, value) in only.items():
                self._forget(name)
                self._metric((name, tuple(labels.items()))).set(value)
                self._alone.add(name)
        for name in self._alone:
            self._forget(name)

    def _forget(self, name: str) -> None:
        """Drop all series of a family: Triton drops one only with its family, and that last."""
        self._series = {key: series for key, series in self._series.items() if key[0] != name}
        self._families.pop(name, None)

    def _metric(self, key: "_Key") -> Any:
        if key not in self._series:
            name, labels = key
            about = self._kinds[name]
            if name not in self._families:
                self._families[name] = pb_utils.MetricFamily(
                    name=self._prefix + name,
                    description=about.description,
                    kind=getattr(pb_utils.MetricFamily, about.kind),
                )
            extra = {"buckets": list(about.buckets)} if about.buckets else {}
            self._series[key] = self._families[name].Metric(labels=self._labels | dict(labels), **extra)
        return self._series[key]


class SessionMetrics(Metrics):
    """What a session does."""

    def __init__(self, model: str, version: int) -> None:
        super().__init__(SESSION_PREFIX, SESSION_METRICS, model=model, version=str(version))

    def opened(self, provider: str, seconds: float) -> None:
        """Count an instance, and how long its session took to open."""
        self.add("session_start_seconds_total", seconds)
        self.add("sessions_total")
        self.add("instances", provider=provider)

    def closed(self, provider: str) -> None:
        """Count an instance that ends; nothing is handed on after."""
        self.add("instances", -1, provider=provider)
        self.close()

    def ran(self, seconds: float, rows: int) -> None:
        """Observe one run."""
        self.add("run_seconds", seconds)
        self.add("batch_size", rows)

    def rejected(self, error: ServingError) -> None:
        """Count a request that got an error."""
        self.add("rejected_total", reason=error.code.lower())

    def fetched_from_host(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Count inputs that lie on the host although the instance is on a GPU."""
        inputs = sum(isinstance(array, np.ndarray) for request in requests for array in request.values())
        if inputs:
            self.add("host_inputs_total", inputs)


FLUSH_S = 0.5
_Key = tuple[str, tuple[tuple[str, str], ...]]


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
