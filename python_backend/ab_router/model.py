"""Triton adapter of the `ab_router` backend; all behaviour is in `nereid.backends.triton.route_model`."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereid.backends.triton import stub_processes
from nereid.backends.triton.route_model import RouteModel
from nereid.base.config.model_config import ModelConfig


class TritonPythonModel:
    """One public name in front of several pinned models."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the route; the load fails if it is invalid."""
        stub_processes.close_connections()
        self.model = RouteModel(ModelConfig.from_args(args), args["model_instance_name"])

    def execute(self, requests: Sequence[Any]) -> None:
        """Start every request; each responds through its own sender."""
        self.model.execute(requests)

    def finalize(self) -> None:
        """Wait for requests that are still being mirrored."""
        self.model.close()
