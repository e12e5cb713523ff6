"""Instances of models of the `ab_router` backend: one public name in front of several pinned models."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid.backends.routing.assignment import ANSWER, ROUTE_THREADS, LoadedRoute
from nereid.backends.routing.attempts import AdmittedRequest
from nereid.backends.routing.interfaces import NO_PARAMETERS, RequestTrace, RoutedRequest, deadline_parameter
from nereid.backends.routing.observation import RouteQuality
from nereid.backends.routing.reference_file import ReferenceWatch, path_of
from nereid.backends.routing.route_file import RouteWatch
from nereid.backends.routing.router import Router
from nereid.backends.triton import stub_processes
from nereid.backends.triton.metric_reporter import SIGNALS_FLUSH_INTERVAL_S, MetricReporter
from nereid.backends.triton.metrics import ROUTE_METRICS, ROUTE_PREFIX, ROUTE_QUALITY_METRICS
from nereid.backends.triton.model_trace import open_tracer
from nereid.backends.triton.tensors import log_info, log_warn, read_parameters, reject, send_response
from nereid.base.config.model_config import ModelConfig
from nereid.base.config.server_flags import measures_signals
from nereid.base.contract import IMAGE, ROUTE_OUTPUTS
from nereid.base.errors import InvalidRequest, ServingError, from_message
from nereid.base.task_registry import make_task_outputs
from nereid.vision.imaging.formats.image_header import LARGE_COST, estimate_header_cost, read_header

# Seconds between two reads of the route file.
POLL_INTERVAL_S = 0.5


class RouteModel:
    """One instance: each request runs in a thread, which responds after the variant.

    Raises:
        InvalidConfig: the route file is invalid, or its models do not fit.
    """

    def __init__(self, config: ModelConfig, instance: str) -> None:
        self._config = config
        self._tracer = open_tracer()
        self._outputs = [output.name for output in config.outputs if output.name not in ROUTE_OUTPUTS]
        task = make_task_outputs(self._outputs, _class_names(config))
        self._watch = RouteWatch(config, lambda model, version: pb_utils.is_model_ready(model, str(version)))
        reporter = partial(MetricReporter, ROUTE_PREFIX, route=config.name, model_instance=instance)
        self._metrics = reporter(ROUTE_METRICS)
        self._signals = reporter(ROUTE_QUALITY_METRICS, SIGNALS_FLUSH_INTERVAL_S)
        self._quality = RouteQuality(self._signals, task)
        self._reference = ReferenceWatch(path_of(config.folder.parent, config.name))
        self._poll_reference()
        self._is_awake, self._is_closing = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(ROUTE_THREADS)
        self._router = Router(
            self._watch.loaded,
            task,
            self._metrics,
            self._warn,
            has_process=partial(stub_processes.has_process, config.folder.parent),
            wake=self._is_awake.set,
            begin_trace=self._begin_trace,
            observe=self._quality.observe if measures_signals() else None,
            spawn=self._pool.submit,
        )
        self._show(self._watch.loaded)
        self._housekeeper = threading.Thread(target=self._run_housekeeping, daemon=True)
        self._housekeeper.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start every request and return: requests overlap, and each responds through its own sender."""
        for request in requests:
            routed = _TritonRequest(request, self._outputs, self._config)
            if admitted := self._router.admit(routed):
                self._pool.submit(self._handle, admitted)

    def close(self) -> None:
        """Wait for the requests to shadows; all others have been answered when Triton closes an instance."""
        self._is_closing.set()
        self._is_awake.set()
        self._housekeeper.join()
        self._pool.shutdown()
        self._metrics.close()
        self._signals.close()
        if self._tracer:
            self._tracer.close()

    def _begin_trace(self, request: RoutedRequest) -> RequestTrace:
        return RequestTrace(self._tracer, self._config.name, str(request) if self._tracer else "")

    def _handle(self, admitted: AdmittedRequest) -> None:
        try:
            self._router.handle(admitted)
        except Exception as error:
            self._warn(f"the response of request '{admitted.request}' could not be sent: {error!r}")

    def _run_housekeeping(self) -> None:
        polled_at = 0.0
        while True:
            self._is_awake.wait(self._router.sleep_s(POLL_INTERVAL_S))
            self._is_awake.clear()
            if self._is_closing.is_set():
                return
            try:
                self._router.expire()
                self._router.free_abandoned()
            except Exception as error:
                self._warn(f"a late or cancelled request could not be ended: {error!r}")
            if time.monotonic() - polled_at >= POLL_INTERVAL_S:
                polled_at = time.monotonic()
                self._router.revive()
                self._poll()
                self._poll_reference()

    def _poll(self) -> None:
        """Read the route file if it has changed; an invalid one changes nothing."""
        try:
            loaded = self._watch.poll()
        except Exception as error:
            self._metrics.add("reloads_total", outcome="refused")
            kept = self._watch.loaded.route.generation
            self._warn(f"generation {kept} stays, {self._watch.path.name} is refused: {error}")
            return
        if loaded:
            self._router.use(loaded)
            self._metrics.add("reloads_total", outcome="accepted")
            self._show(loaded)

    def _poll_reference(self) -> None:
        """Read the route's reference if its file has changed; without a valid one, no class is counted."""
        if self._reference.poll():
            self._quality.use(self._reference.classes)
            if self._reference.problem:
                self._warn(f"no class is counted: {self._reference.problem}")

    def _show(self, loaded: LoadedRoute) -> None:
        route = loaded.route
        self._metrics.set("generation", route.generation)
        self._metrics.set_only("served_since_seconds", time.time(), sha256=loaded.sha256)
        weights = ", ".join(f"{variant.name} {variant.weight:g}" for variant in route.variants)
        log_info(f"route {self._config.name}: generation {route.generation}, weights {weights}")

    def _warn(self, line: str) -> None:
        log_warn(f"route {self._config.name}: {line}")


class _TritonRequest:
    """A request of Triton as a `RoutedRequest`.

    Args:
        request: the request object of Triton.
        outputs: names of the variants' outputs.
    """

    def __init__(self, request: Any, outputs: Sequence[str], config: ModelConfig) -> None:
        self._request, self._outputs, self._config = request, outputs, config
        self.timeout_s = request.timeout() / 1e6

    def __str__(self) -> str:
        return str(self._request.request_id())

    def check(self) -> None:
        # Without the batch dimension, the variant would fail: Triton 24.10 computes batch sizes with 32 bits,
        # and passes a batch of 0 without it.
        if not (most := self._config.max_batch_size):
            return
        ranks = {tensor.name: len(tensor.dims) + 1 for tensor in self._config.inputs}
        for tensor in self._request.inputs():
            name, shape = tensor.name(), list(tensor.shape())
            if len(shape) != ranks[name] or not 1 <= shape[0] <= most:
                raise InvalidRequest(
                    f"input '{name}': expected a batch of 1 to {most}, got the shape {shape}"
                )

    def parameters(self) -> Mapping[str, Any]:
        return read_parameters(self._request)

    def is_cancelled(self) -> bool:
        return bool(self._request.is_cancelled())

    def is_large(self) -> bool:
        images = pb_utils.get_input_tensor_by_name(self._request, IMAGE)
        return images is not None and any(
            estimate_header_cost(read_header(image)) >= LARGE_COST for image in images.as_numpy().ravel()
        )

    def forward(
        self, model: str, version: int, timeout_s: float, parameters: Mapping[str, Any] = NO_PARAMETERS
    ) -> Any:
        # Without the request's trace: forwarded while tracing is on, it crashes Triton 24.10 with a SIGSEGV.
        request_id = self._request.request_id()
        response = pb_utils.InferenceRequest(
            model_name=model,
            model_version=version,
            request_id=request_id,
            inputs=self._request.inputs(),
            requested_output_names=self._outputs,
            # The timeout is for queues with a policy, the parameter for our own backends.
            timeout=int(timeout_s * 1e6),
            parameters={**deadline_parameter(timeout_s), **parameters},
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            # The client chose the id, whose text must not be mistaken for the error's class.
            raise from_message(response.error().message().replace(f"[request id: {request_id}] ", ""))
        return response

    def arrays(self, response: Any, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        return {name: pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in names}

    def respond(self, response: Any, variant: str, version: str, reason: str) -> None:
        tensors = response.output_tensors()
        rows = tensors[0].shape()[0] if self._config.max_batch_size else 0
        self._respond(tensors, rows, (variant, version, reason))

    def answer(self, rows: Mapping[str, np.ndarray]) -> None:
        count = self._request.inputs()[0].shape()[0] if self._config.max_batch_size else 0
        arrays = {name: np.repeat(row[None], count, axis=0) if count else row for name, row in rows.items()}
        tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items()]
        self._respond(tensors, count, (ANSWER, "", ANSWER))

    def _respond(self, tensors: Sequence[Any], rows: int, strings: Sequence[str]) -> None:
        requested = self._request.requested_output_names()
        shape = (rows, 1) if rows else (1,)
        outputs = zip(ROUTE_OUTPUTS, strings, strict=True)
        returned = [tensor for tensor in tensors if tensor.name() in requested]
        returned += [_repeated(name, text, shape) for name, text in outputs if name in requested]
        self._send(pb_utils.InferenceResponse(returned))

    def reject(self, error: ServingError) -> None:
        self._send(reject(error))

    def _send(self, response: Any) -> None:
        send_response(self._request.get_response_sender(), response)


@lru_cache(256)
def _repeated(name: str, text: str, shape: tuple[int, ...]) -> Any:
    return pb_utils.Tensor(name, np.full(shape, text.encode(), object))


def _class_names(config: ModelConfig) -> Sequence[str]:
    outputs = config.document.get("output") or [{}]
    try:
        return (config.folder / (outputs[0].get("label_filename") or "")).read_text().splitlines()
    except (OSError, UnicodeDecodeError):  # missing, or a folder
        return ()
