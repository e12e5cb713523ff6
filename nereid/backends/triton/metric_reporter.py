"""Report a model's metrics to Triton."""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid.backends.triton.metrics import IMAGE_METRICS, IMAGE_PREFIX, SESSION_METRICS, SESSION_PREFIX
from nereid.base.config.model_config import ModelConfig
from nereid.base.config.server_flags import measures_signals
from nereid.base.errors import ServingError
from nereid.base.prometheus_text import MetricSpec

FLUSH_INTERVAL_S = 0.5
# A flush sends up to 20 counters for each signal, so it is rare: at most 2 ms of CPU in this time.
SIGNALS_FLUSH_INTERVAL_S = 5.0
_Key = tuple[str, tuple[tuple[str, str], ...]]


class MetricReporter:
    """Metrics of a model on Triton's metrics page; instances with the same labels share the series.

    Each change is a round trip to the server, too expensive for every request. Changes are therefore summed,
    and sent `flush_s` seconds after the first.

    Args:
        specs: the metric families by their names without the prefix.
        flush_s: seconds from a change to its report.
        labels: the labels that all series have.
    """

    def __init__(
        self, prefix: str, specs: Mapping[str, MetricSpec], flush_s: float = FLUSH_INTERVAL_S, **labels: str
    ) -> None:
        self._prefix, self._labels, self._flush_s = prefix, labels, flush_s
        self._specs = {**specs, **_counters_of_histograms(specs)}
        self._histograms: dict[_Key, list[float]] = {}
        self._families: dict[str, Any] = {}
        self._series: dict[_Key, Any] = {}
        self._lock = threading.Lock()
        self._sums: dict[_Key, float] = {}
        self._observed: list[tuple[_Key, float]] = []
        self._values: dict[_Key, float] = {}
        self._sole_values: dict[str, tuple[dict[str, str], float]] = {}
        self._sole_families: set[str] = set()
        self._is_changed, self._is_closing = threading.Event(), threading.Event()
        self._flusher = threading.Thread(target=self._flush, daemon=True)
        self._flusher.start()

    def add(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Increment a counter, or observe a value in a histogram."""
        if not self._flusher.is_alive():  # if the server refuses metrics, they must not accumulate here
            return
        key = name, tuple(labels.items())
        with self._lock:
            spec = self._specs[name]
            if spec.kind == "HISTOGRAM":
                self._observed.append((key, value))
            elif spec.kind == "COUNTER_HISTOGRAM":
                self._count_in_histogram(key, spec, value)
            else:
                self._sums[key] = self._sums.get(key, 0.0) + value
        self._wake()

    def record_rejection(self, error: ServingError) -> None:
        """Count a request that was rejected."""
        self.add("rejected_total", reason=error.code.lower())

    def add_all(self, values: Mapping[str, float], /) -> None:
        """Observe values by the names of their histograms; cheaper than one call of `add` for each."""
        if not self._flusher.is_alive():
            return
        with self._lock:
            for name, value in values.items():
                self._count_in_histogram((name, ()), self._specs[name], value)
        self._wake()

    def _count_in_histogram(self, key: _Key, spec: MetricSpec, value: float) -> None:
        if (histogram := self._histograms.get(key)) is None:
            histogram = self._histograms[key] = [0.0] * (len(spec.buckets) + 2)
        histogram[bisect_left(spec.buckets, value)] += 1
        histogram[-1] += value

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set the value of a gauge."""
        with self._lock:
            self._values[name, tuple(labels.items())] = value
        self._wake()

    def set_only(self, name: str, value: float, /, **labels: str) -> None:
        """Set the value of a gauge, and remove its earlier series."""
        with self._lock:
            self._sole_values[name] = labels, value
        self._wake()

    def close(self) -> None:
        """Send the last changes, and stop reporting."""
        self._is_closing.set()
        self._wake()
        self._flusher.join()

    def _wake(self) -> None:
        if not self._is_changed.is_set():
            self._is_changed.set()

    def _flush(self) -> None:
        is_last = False
        while not is_last:
            self._is_changed.wait()
            is_last = self._is_closing.wait(self._flush_s)
            self._is_changed.clear()
            with self._lock:
                sums, self._sums = self._sums, {}
                observed, self._observed = self._observed, []
                values, self._values = self._values, {}
                sole_values, self._sole_values = self._sole_values, {}
                histograms, self._histograms = self._histograms, {}
            for key, histogram in histograms.items():
                self._increment_all(key, histogram)
            for key, value in sums.items():
                self._metric(key).increment(value)
            for key, value in values.items():
                self._metric(key).set(value)
            for key, value in observed:
                self._metric(key).observe(value)
            for name, (labels, value) in sole_values.items():
                self._forget(name)
                self._metric((name, tuple(labels.items()))).set(value)
                self._sole_families.add(name)
        for name in self._sole_families:
            self._forget(name)

    def _increment_all(self, key: _Key, histogram: Sequence[float]) -> None:
        """Send the counters of a histogram; all exist from the first report, so that none appears later."""
        name, labels = key
        for part, bound, value in _parts(self._specs[name].buckets, histogram):
            metric = self._metric((f"{name}_{part}", (*labels, *((("le", bound),) if bound else ()))))
            if value:
                metric.increment(value)

    def _forget(self, name: str) -> None:
        """Remove all series of a family: Triton removes a series only with its family, the family last."""
        self._series = {key: series for key, series in self._series.items() if key[0] != name}
        self._families.pop(name, None)

    def _metric(self, key: _Key) -> Any:
        if key not in self._series:
            name, labels = key
            spec = self._specs[name]
            if name not in self._families:
                self._families[name] = pb_utils.MetricFamily(
                    name=self._prefix + name,
                    description=spec.description,
                    kind=getattr(pb_utils.MetricFamily, spec.kind),
                )
            extra = {"buckets": list(spec.buckets)} if spec.buckets else {}
            self._series[key] = self._families[name].Metric(labels=self._labels | dict(labels), **extra)
        return self._series[key]


def _counters_of_histograms(specs: Mapping[str, MetricSpec]) -> dict[str, MetricSpec]:
    return {
        f"{name}_{part}": MetricSpec("COUNTER", spec.description)
        for name, spec in specs.items()
        if spec.kind == "COUNTER_HISTOGRAM"
        for part in ("bucket", "count", "sum")
    }


def _parts(bounds: Sequence[float], histogram: Sequence[float]) -> Iterator[tuple[str, str, float]]:
    *counts, total = histogram
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    for bound, value in zip(names, accumulate(counts), strict=True):
        yield "bucket", bound, value
    yield "count", "", sum(counts)
    yield "sum", "", total


class SessionMetrics(MetricReporter):
    """Metrics of an ONNX Runtime session."""

    def __init__(self, model: str, version: int) -> None:
        super().__init__(SESSION_PREFIX, SESSION_METRICS, model=model, version=str(version))

    def record_open(self, provider: str, seconds: float) -> None:
        """Count an instance, and the seconds that opening its session took."""
        self.add("session_start_seconds_total", seconds)
        self.add("sessions_total")
        self.add("instances", provider=provider)

    def record_close(self, provider: str) -> None:
        """Count an instance that ends, and stop reporting."""
        self.add("instances", -1, provider=provider)
        self.close()

    def record_run(self, seconds: float, rows: int) -> None:
        """Observe the seconds and rows of one run."""
        self.add("run_seconds", seconds)
        self.add("batch_size", rows)

    def record_halved_batch(self) -> None:
        """Count a batch that did not fit into memory and is run in halves."""
        self.add("fallbacks_total", **{"from": "batch", "to": "halves", "reason": "out_of_memory"})

    def record_warmup(self, seconds: float) -> None:
        """Count a run at load, and its seconds."""
        self.add("warm_up_runs_total")
        self.add("warm_up_seconds_total", seconds)

    def record_device_failure(self) -> None:
        """Count a failure of the device, after which the instance is replaced."""
        self.add("device_failures_total")

    def record_host_inputs(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Count the inputs in host memory for an instance on a GPU."""
        inputs = sum(isinstance(array, np.ndarray) for request in requests for array in request.values())
        if inputs:
            self.add("host_inputs_total", inputs)


class ImageSignalReporter(MetricReporter):
    """Signals of the images of a preprocessing or fused model; `sink` receives one image's, if any."""

    def __init__(self, config: ModelConfig) -> None:
        labels = {"model": config.name, "version": str(config.version)}
        super().__init__(IMAGE_PREFIX, IMAGE_METRICS, SIGNALS_FLUSH_INTERVAL_S, **labels)
        self.sink = self.add_all if measures_signals() else None
