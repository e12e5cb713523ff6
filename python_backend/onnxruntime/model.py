"""Triton adapter of the `onnxruntime` backend; all behaviour is in `nereid.backends.triton.onnx_model`."""

from collections.abc import Mapping, Sequence
from typing import Any

from nereid.backends.triton import stub_processes
from nereid.backends.triton.onnx_model import OnnxModel, auto_complete
from nereid.base.config.model_config import ModelConfig


class TritonPythonModel:
    """Tensors in, tensors out, for one ONNX file."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fill in the fields of the config that come from the ONNX file."""
        return auto_complete(auto_complete_model_config)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the model file; the load fails if the config is invalid."""
        stub_processes.close_connections()
        self.model = OnnxModel(ModelConfig.from_args(args, may_use_gpu=True))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Serve a batch; a bad request fails alone."""
        return self.model.execute(requests)

    def finalize(self) -> None:
        """Report that the instance is shutting down."""
        self.model.close()
