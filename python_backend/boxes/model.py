"""Triton adapter of the `boxes` backend; all behaviour is in `nereid.backends.triton.postprocess_model`."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereid.backends.triton import stub_processes
from nereid.backends.triton.postprocess_model import PostprocessModel
from nereid.base.config.model_config import ModelConfig


class TritonPythonModel:
    """Converts a detector's outputs and the image header to boxes, one outcome per request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read head, thresholds and labels; the load fails if one is invalid."""
        stub_processes.close_connections()
        self.model = PostprocessModel(ModelConfig.from_args(args))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Find the objects of each request; a bad one fails alone."""
        return self.model.execute(requests)

    def finalize(self) -> None:
        """Report that the instance is shutting down."""
        self.model.close()
