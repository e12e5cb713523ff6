"""Instances of models of the `fused` backend: the steps of an ensemble in one process.

A hop between processes costs about 1 ms of CPU, and more if a tensor on a GPU is passed on. This model runs
the code of the ensemble's backends in one process.
"""

import time
from collections.abc import Sequence
from typing import Any

from nereid.config.model_config import FusedSettings, ModelConfig
from nereid.imaging.pipeline import Pipeline
from nereid.inference.batching import to_host
from nereid.serving_errors import DeviceFailed, InvalidConfig, ServingError, from_exception
from nereid.triton.model_trace import BatchTrace, ModelTracer
from nereid.triton.onnx_model import backend_settings, open_session
from nereid.triton.quality_reporter import ImageSignals
from nereid.triton.steps.after_network import Images, Outcome, open_after
from nereid.triton.tensors import read_images, reject, respond


class FusedModel:
    """One instance: encoded images to the model's outputs, one outcome per request."""

    def __init__(self, config: ModelConfig) -> None:
        """Open the siblings.

        Raises:
            InvalidConfig: a sibling is missing, or the tensors of the models do not fit.
        """
        names = config.settings(FusedSettings)
        # The plain configs are for a CPU.
        profile = backend_settings().profile if config.kind == "GPU" else ""
        preprocess, network = (
            config.sibling(*sibling, profile).replacing(changed)
            for sibling, changed in zip(names.models, (names.of_preprocess, names.of_network), strict=False)
        )
        self._signals = ImageSignals(config)
        self._pipeline = Pipeline.from_config(
            preprocess, config.max_batch_size, config.cpu_instances, self._signals.sink
        )
        self._session, self._metrics = open_session(config, network)
        made, taken = preprocess.outputs[0], network.inputs[0]
        if taken.kind != made.kind:
            raise InvalidConfig(
                f"model '{config.name}': input of '{names.network}': expected {taken.kind}, "
                f"got {made.kind} from '{names.preprocess}'"
            )
        self._after = open_after(config, names, network)
        self._tracer = ModelTracer(config, begins=True, provider=self._session.provider)
        self._input = taken.name

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Decode, transform and run the network once for all good images of the batch."""
        trace = self._tracer.begin(requests)
        outcomes = self._run([self._after.accept(read_images(request)) for request in requests], trace)
        for outcome in outcomes:
            if isinstance(outcome, ServingError):
                self._metrics.rejected(outcome)
        if trace:
            trace.end(outcomes)
        return [reject(each) if isinstance(each, ServingError) else respond(**each) for each in outcomes]

    def _run(self, images: Sequence[Images], trace: BatchTrace | None) -> list[Outcome]:
        batch = self._pipeline.run(images)
        if batch.device_failure:
            self._session.fail(batch.device_failure.reason)
        if trace:
            trace.prepared(batch.times)
        if not len(batch.tensor):
            return [each if isinstance(each, ServingError) else {} for each in batch.outcomes]
        begin_ns, wanted = time.time_ns(), self._after.wanted
        try:
            results = [to_host(each) for each in self._session.run({self._input: batch.tensor}, wanted)]
        except Exception as raised:  # outside of here, it would fail the bad requests, too
            error = from_exception(raised)
            if isinstance(error, DeviceFailed):
                self._session.fail(error.reason)
            return [error if isinstance(rows, slice) else rows for rows in batch.outcomes]
        if trace:
            trace.ran(begin_ns, len(batch.tensor))
        return self._after.finish(batch, images, dict(zip(wanted, results, strict=True)))

    def close(self) -> None:
        """Report the end of the instance."""
        self._tracer.close()
        self._metrics.closed(self._session.provider)
        self._signals.close()
