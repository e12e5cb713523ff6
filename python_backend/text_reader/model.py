"""Triton adapter of the `text_reader` backend; all behaviour is in `nereid.tasks.read.backend`."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereid.backends.triton import stub_processes
from nereid.base.config.model_config import ModelConfig
from nereid.tasks.read.backend import ReaderModel


class TritonPythonModel:
    """Encoded images to lines of text, one outcome per request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the networks, or check their configs; the load fails if one is missing or invalid."""
        stub_processes.close_connections()
        self.model = ReaderModel(ModelConfig.from_args(args))

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Read a batch; a bad image fails only its own request."""
        return self.model.execute(requests)

    def finalize(self) -> None:
        """Report that the instance is shutting down."""
        self.model.close()
