"""Instances of models of the `fused` backend: the steps of an ensemble in one process.

A hop between processes costs about 1 ms of CPU, and more for a tensor on a GPU. This model runs
the code of the ensemble's backends in one process.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from nereid.backends.triton.batch_pipeline import SLOTS, BatchPipeline
from nereid.backends.triton.device_streams import (
    DeviceStreams,
    FusedBatch,
    StageTimestamps,
    can_bind,
    check_overlap,
    open_device_streams,
    open_stream,
)
from nereid.backends.triton.metric_reporter import ImageSignalReporter
from nereid.backends.triton.model_trace import BatchTrace, ModelTracer
from nereid.backends.triton.onnx_model import load_backend_settings, open_session
from nereid.backends.triton.post_processing import PostProcessingOutcome, RequestImages, open_post_processing
from nereid.backends.triton.tensors import log_error, read_images, reject, send_or_log, to_response
from nereid.base.config.model_config import FusedSettings, ModelConfig
from nereid.base.errors import DeviceFailed, InvalidConfig, ServingError, from_exception
from nereid.vision.imaging.pipeline import Pipeline
from nereid.vision.inference.batching import to_host


class FusedModel:
    """One instance: encoded images to the model's outputs, one outcome per request; raises InvalidConfig."""

    def __init__(self, config: ModelConfig) -> None:
        settings = config.settings(FusedSettings)
        # The plain configs are for a CPU.
        profile = load_backend_settings().profile if config.device_kind == "GPU" else ""
        preprocess, network = (
            config.sibling(*sibling, profile).with_parameters(changed)
            for sibling, changed in zip(
                settings.models, (settings.preprocess_overrides, settings.network_overrides), strict=False
            )
        )
        self._signals = ImageSignalReporter(config)
        self._post = open_post_processing(config, settings, network)
        is_bound = can_bind(config, preprocess, network, self._post.needed_outputs)
        slots = SLOTS if settings.overlap_batches else 1
        self._pipeline = Pipeline.from_config(
            preprocess, config.max_batch_size, config.cpu_instances, self._signals.sink, slots
        )
        stream = open_stream(config.device_id) if is_bound else None
        self._session, self._metrics = open_session(config, network, stream=stream.ptr if stream else 0)
        preprocess_output, network_input = preprocess.outputs[0], network.inputs[0]
        if network_input.type_and_dims != preprocess_output.type_and_dims:
            raise InvalidConfig(
                f"model '{config.name}': input of '{settings.network}': expected "
                f"{network_input.type_and_dims}, got {preprocess_output.type_and_dims} from "
                f"'{settings.preprocess}'"
            )
        if settings.overlap_batches:
            check_overlap(config, self._session.is_on_stream)
        self._tracer = ModelTracer(
            config, starts_traces=True, has_one_thread=slots == 1, provider=self._session.provider
        )
        self._input = network_input.name
        self._streams: DeviceStreams | None = None
        self._batch_pipeline: BatchPipeline | None = None
        if self._session.is_on_stream:
            preprocessor, outputs = self._pipeline.preprocessor, self._post.needed_outputs
            open_them = partial(
                open_device_streams, preprocessor, self._session, stream, self._input, outputs
            )
            if settings.overlap_batches:
                self._batch_pipeline = BatchPipeline(open_them, self._session.fail, log_error)
            else:
                self._streams = open_them()

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Decode, transform and run the network once for all good images of the batch.

        Returns None if the batch overlaps with the next one: its responses are sent later.
        """
        trace = self._tracer.begin(requests)
        images = [self._post.accept(read_images(request)) for request in requests]
        if self._streams is None and self._batch_pipeline is None:
            return self._respond(self._run(images, trace), trace)
        job = FusedBatch(images, self._post, trace, self._metrics.record_run)
        if self._streams:
            return self._respond(job.outcomes(*self._run_bound(job, self._streams)), trace)
        assert self._batch_pipeline
        senders = [request.get_response_sender() for request in requests]
        sent = DeferredBatch(job, senders, lambda outcomes: self._respond(outcomes, trace))
        if job.images:
            self._batch_pipeline.submit(sent)
        else:
            sent.answer({}, None)
        return None

    def _respond(self, outcomes: Sequence[PostProcessingOutcome], trace: BatchTrace | None) -> list[Any]:
        for outcome in outcomes:
            if isinstance(outcome, ServingError):
                self._metrics.record_rejection(outcome)
        if trace:
            trace.end(outcomes)
        return [to_response(outcome) for outcome in outcomes]

    def _run_bound(
        self, job: FusedBatch, streams: DeviceStreams
    ) -> tuple[Mapping[str, np.ndarray] | ServingError, StageTimestamps | None]:
        if self._session.device_failure:
            return DeviceFailed(self._session.device_failure), None
        outputs, stages = job.run(streams)
        if isinstance(outputs, DeviceFailed):
            self._session.fail(outputs.reason)
        return outputs, stages

    def _run(self, images: Sequence[RequestImages], trace: BatchTrace | None) -> list[PostProcessingOutcome]:
        batch = self._pipeline.run(images)
        if batch.device_failure:
            self._session.fail(batch.device_failure.reason)
        if trace:
            trace.record_preparation(batch.times)
        if not len(batch.tensor):
            return [outcome if isinstance(outcome, ServingError) else {} for outcome in batch.outcomes]
        begin_ns, needed = time.time_ns(), self._post.needed_outputs
        try:
            results = [to_host(output) for output in self._session.run({self._input: batch.tensor}, needed)]
        except Exception as raised:  # outside of here, it would also fail the bad requests
            error = from_exception(raised)
            if isinstance(error, DeviceFailed):
                self._session.fail(error.reason)
            return [error if isinstance(rows, slice) else rows for rows in batch.outcomes]
        if trace:
            trace.record_run(begin_ns, len(batch.tensor))
        return self._post.finish(batch, images, dict(zip(needed, results, strict=True)))

    def close(self) -> None:
        """Answer what is in the pipeline, and report the end of the instance."""
        if self._batch_pipeline:
            self._batch_pipeline.close()
        self._tracer.close()
        self._metrics.record_close(self._session.provider)
        self._signals.close()


class DeferredBatch:
    """A batch whose responses are sent after `execute` has returned.

    Args:
        senders: the response sender of each request.
        respond: builds the responses of all outcomes.
    """

    def __init__(
        self,
        job: FusedBatch,
        senders: Sequence[Any],
        respond: Callable[[Sequence[PostProcessingOutcome]], Sequence[Any]],
    ) -> None:
        self.images, self.on_prepared = job.images, job.on_prepared
        self._job, self._senders, self._respond = job, senders, respond

    def answer(
        self, outputs: Mapping[str, np.ndarray] | ServingError, stages: StageTimestamps | None
    ) -> None:
        """Send the response of each request; a request without one never finishes."""
        try:
            outcomes = self._job.outcomes(outputs, stages)
        except Exception as error:  # every request needs a response
            outcomes = [from_exception(error)] * len(self._senders)
        try:
            responses = self._respond(outcomes)
        except Exception as error:  # likewise
            responses = [reject(from_exception(error))] * len(self._senders)
        for sender, response in zip(self._senders, responses, strict=True):
            send_or_log(sender, response)
