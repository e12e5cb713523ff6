"""Instances of models of the `boxes` backend: the last step of a detector that is an ensemble."""

from collections.abc import Sequence
from typing import Any

from nereid.backends.triton.model_trace import ModelTracer
from nereid.backends.triton.steps.after_network import Outcome, only_one
from nereid.backends.triton.tensors import read_images, read_tensors, reject, respond
from nereid.base.config.model_config import ModelConfig
from nereid.base.contract import IMAGE
from nereid.base.serving_errors import ServingError, from_exception
from nereid.tasks.detect.detector import Detector, outputs_by_role


class BoxesModel:
    """One instance: the outputs of a network and the encoded image to boxes, scores and labels."""

    def __init__(self, config: ModelConfig) -> None:
        """Read the parameters.

        Raises:
            InvalidConfig: a parameter is invalid, or the tensors do not fit it.
        """
        self._detector = Detector.from_config(config)
        self._tracer = ModelTracer(config)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Find the objects of each request; a bad one fails alone."""
        trace = self._tracer.begin(requests)
        outcomes = [self._find(request) for request in requests]
        if trace:
            trace.end(outcomes)
        return [reject(each) if isinstance(each, ServingError) else respond(**each) for each in outcomes]

    def close(self) -> None:
        """Report the end of the instance."""
        self._tracer.close()

    def _find(self, request: Any) -> Outcome:
        images = only_one(read_images(request))
        if isinstance(images, ServingError):
            return images
        try:
            arrays = {name: each for name, each in read_tensors(request, False).items() if name != IMAGE}
            size_wh = self._detector.upright_size(images[0])
            found = self._detector.find(size_wh, outputs_by_role(self._detector, arrays))
            return self._detector.tensors(found)
        except Exception as error:  # a bad request must not fail the others
            return from_exception(error)
