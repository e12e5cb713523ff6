"""Instances of models of the `onnxruntime` backend: tensors in, tensors out, for one ONNX file.

Other backends run networks in their own process, or as models of the server.
"""

import time
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid.backends.triton.metric_reporter import SessionMetrics
from nereid.backends.triton.model_trace import ModelTracer
from nereid.backends.triton.tensors import (
    log_info,
    log_warn,
    read_tensors,
    reject,
    report_failed_device,
    respond,
    version_folder,
)
from nereid.base.config.model_config import ModelConfig
from nereid.base.config.server_flags import server_command_line
from nereid.base.errors import Cancelled, ServingError, from_message
from nereid.base.tracing.context import trace_parameters
from nereid.vision.inference.network_file import complete_config
from nereid.vision.inference.session import RunOutcome, Session, SessionEvents
from nereid.vision.inference.session_options import BackendSettings

# Triton 24.10 does not drop a cancelled request that waits for its instance. The check is a round trip to the
# server for each request, which pays off if a run takes longer than this.
MIN_RUN_FOR_CHECK_S = 0.01
CLIENT_GONE = Cancelled("the client disconnected before the request ran")


def load_backend_settings() -> BackendSettings:
    """Read the flags for ONNX Runtime from the server's command line."""
    return BackendSettings.from_command_line(server_command_line())


def open_session(
    config: ModelConfig, network: ModelConfig, metrics: SessionMetrics | None = None, stream: int = 0
) -> tuple[Session, SessionMetrics]:
    """Open `network` for an instance of the model `config`, and log it once per model.

    Args:
        metrics: the session's metrics; None for the model's.
        stream: as for `Session.from_config`.

    Raises:
        InvalidConfig: the network cannot be served with its config.
    """
    metrics = metrics or SessionMetrics(config.name, config.version)
    start = time.perf_counter()
    instances = None if network is config else config.cpu_instances
    session = Session.from_config(
        network, load_backend_settings(), instances, _events(config, metrics), stream
    )
    metrics.record_open(session.provider, time.perf_counter() - start)
    if config.is_first_instance:
        log_info(f"'{config.name}' version {config.version}: {session}")
    return session, metrics


def _events(config: ModelConfig, metrics: SessionMetrics) -> SessionEvents:
    def report_device(reason: str) -> None:
        metrics.record_device_failure()
        report_failed_device(config, reason)

    return SessionEvents(
        metrics.record_run, metrics.record_halved_batch, metrics.record_warmup, report_device
    )


def auto_complete(model_config: Any) -> Any:
    """Fill in the fields of Triton's `model_config` that come from the ONNX file."""
    document = model_config.as_dict()
    complete_config(document, version_folder(document), load_backend_settings(), log_info, log_warn)
    return model_config


class OnnxModel:
    """One instance of a model."""

    def __init__(self, config: ModelConfig) -> None:
        self._session, self._metrics = open_session(config, network=config)
        self._tracer = ModelTracer(config, provider=self._session.provider)
        self._last_s = 0.0

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Run the network once for all requests whose clients still wait."""
        trace, begin_ns = self._tracer.begin(requests), time.time_ns()
        start, must_check = time.perf_counter(), self._last_s > MIN_RUN_FOR_CHECK_S
        is_wanted = [not (must_check and request.is_cancelled()) for request in requests]
        results = iter(self._run([*compress(requests, is_wanted)]))
        outcomes = [next(results) if flag else CLIENT_GONE for flag in is_wanted]
        if trace:
            trace.record_run(begin_ns, sum(is_wanted))
        responses = [self._respond(outcome) for outcome in outcomes]
        if trace:
            trace.end(outcomes)
        if any(is_wanted):
            self._last_s = time.perf_counter() - start
        return responses

    def close(self) -> None:
        """Report the end of the instance."""
        self._tracer.close()
        self._metrics.record_close(self._session.provider)

    def _run(self, requests: Sequence[Any]) -> list[RunOutcome]:
        arrays = [read_tensors(request, self._session.is_on_gpu) for request in requests]
        if self._session.is_on_gpu:
            self._metrics.record_host_inputs(arrays)
        # Triton passes the names as a set, and clients may read outputs by position.
        requested_names = [sorted(request.requested_output_names()) for request in requests]
        return self._session.run_requests(arrays, requested_names)

    def _respond(self, outcome: RunOutcome) -> Any:
        if isinstance(outcome, ServingError):
            self._metrics.record_rejection(outcome)
            return reject(outcome)
        return respond(**outcome)


class LocalNetwork:
    """A network in the process of the model `config`; raises InvalidConfig."""

    def __init__(self, config: ModelConfig, network: ModelConfig) -> None:
        metrics = SessionMetrics(network.name, network.version)
        self._session, self._metrics = open_session(config, network, metrics)
        self._input = network.inputs[0].name
        self._outputs = [output.name for output in network.outputs]

    def __call__(self, tensor: np.ndarray, traceparent: str = "") -> Sequence[np.ndarray]:
        """Return the outputs for one batch, in their order in the config; it has no span of its own."""
        return self._session.run({self._input: tensor}, self._outputs)

    def close(self) -> None:
        """Report the end of the instance."""
        self._metrics.record_close(self._session.provider)


class ServedNetwork:
    """A network that the server runs as a model of its own."""

    def __init__(self, network: ModelConfig) -> None:
        self._name, self._version = network.name, network.version
        self._input = network.inputs[0].name
        self._outputs = [output.name for output in network.outputs]

    def __call__(self, tensor: np.ndarray, traceparent: str = "") -> Sequence[np.ndarray]:
        """Return the outputs for one batch, in their order in the config.

        Args:
            traceparent: the span that the model continues; "" for none.

        Raises:
            ServingError: the model rejected the request, or failed.
        """
        response = pb_utils.InferenceRequest(
            model_name=self._name,
            model_version=self._version,
            inputs=[pb_utils.Tensor(self._input, tensor)],
            requested_output_names=self._outputs,
            parameters=trace_parameters(traceparent) if traceparent else {},
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            raise from_message(response.error().message())
        tensors = {output.name(): output for output in response.output_tensors()}
        return [np.array(tensors[name].as_numpy()) for name in self._outputs]

    def close(self) -> None:
        """Do nothing: the model reports its own end."""
