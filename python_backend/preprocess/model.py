"""Triton adapter of the `preprocess` backend; all behaviour is in `nereid.vision.imaging.pipeline`."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereid.backends.triton import stub_processes
from nereid.backends.triton.metric_reporter import ImageSignalReporter
from nereid.backends.triton.model_trace import ModelTracer
from nereid.backends.triton.tensors import read_images, report_failed_device, respond_to_batch
from nereid.base.config.model_config import ModelConfig
from nereid.vision.imaging.pipeline import Pipeline


class TritonPythonModel:
    """Encoded images to network inputs, one outcome per request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Build the pipeline; the load fails if a parameter is invalid or contradictory."""
        stub_processes.close_connections()
        config = ModelConfig.from_args(args, may_use_gpu=True)
        self.signals = ImageSignalReporter(config)
        self.pipeline = Pipeline.from_config(config, sink=self.signals.sink)
        self.output = config.outputs[0].name
        self.tracer = ModelTracer(config)
        self.config, self.has_failed = config, False

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Prepare all images of the batch; a bad image fails only its own request."""
        trace = self.tracer.begin(requests)
        batch = self.pipeline.run([read_images(request) for request in requests])
        if batch.device_failure and not self.has_failed:
            self.has_failed = True
            report_failed_device(self.config, batch.device_failure.reason)
        responses = respond_to_batch(batch, **{self.output: batch.tensor})
        if trace:
            trace.record_preparation(batch.times)
            trace.end(batch.outcomes)
        return responses

    def finalize(self) -> None:
        """Report the signals of the last images."""
        self.signals.close()
        self.tracer.close()
