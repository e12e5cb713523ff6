"""Instances of models that do the post-processing of a task: outputs of a network, and the encoded image."""

from collections.abc import Sequence
from typing import Any

from nereid.backends.triton.model_trace import ModelTracer
from nereid.backends.triton.post_processing import (
    PostProcessingOutcome,
    only_one,
    open_postprocessor,
    postprocess,
)
from nereid.backends.triton.tensors import read_images, read_tensors, to_response
from nereid.base.config.model_config import ModelConfig
from nereid.base.contract import IMAGE
from nereid.base.errors import ServingError, from_exception


class PostprocessModel:
    """One instance: one image per request, one outcome per request; raises InvalidConfig."""

    def __init__(self, config: ModelConfig) -> None:
        step = open_postprocessor(config)
        assert step, f"no task has post-processing for '{config.name}'"
        self._step = step
        self._tracer = ModelTracer(config)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Run the step for each request; a bad one fails alone."""
        trace = self._tracer.begin(requests)
        outcomes = [self._run(request) for request in requests]
        if trace:
            trace.end(outcomes)
        return [to_response(outcome) for outcome in outcomes]

    def close(self) -> None:
        """Report the end of the instance."""
        self._tracer.close()

    def _run(self, request: Any) -> PostProcessingOutcome:
        images = only_one(read_images(request))
        try:
            arrays = {} if isinstance(images, ServingError) else read_tensors(request)
        except Exception as error:  # a bad request must not fail the others
            return from_exception(error)
        return postprocess(self._step, images, {name: arrays[name] for name in arrays.keys() - {IMAGE}})
