"""Triton adapter of the `text_reader` backend; all behaviour is in `nereid.tasks.read.backend`."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereid.backends.triton import stub_processes
from nereid.base.config.model_config import ModelConfig
from nereid.tasks.read.backend import ReaderModel


class TritonPythonModel:
    """Encoded images to lines of text, one outcome per request."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the networks, or check their configs; a missing or wrong one fails the load."""
        stub_processes.close_connections()
        self.model = ReaderModel(ModelConfig.from_args(args))

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Read a batch; a bad image fails its own request only."""
        return self.model.execute(requests)

    def finalize(self) -> None:
        """Report the end of the instance."""
        self.model.close()
