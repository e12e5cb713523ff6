"""Triton adapter of the `fused` backend; all behaviour is in `nereid.backends.triton.fused_model`."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereid.backends.triton import stub_processes
from nereid.backends.triton.fused_model import FusedModel
from nereid.base.config.model_config import ModelConfig


class TritonPythonModel:
    """Encoded images to scores, one outcome per request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open both siblings; the load fails if one is missing or invalid."""
        stub_processes.close_connections()
        self.model = FusedModel(ModelConfig.from_args(args, may_use_gpu=True))

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Serve a batch; a bad image fails only its own request. None if responses are sent later."""
        return self.model.execute(requests)

    def finalize(self) -> None:
        """Report that the instance is shutting down."""
        self.model.close()
