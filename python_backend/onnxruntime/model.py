"""Triton adapter of the `onnxruntime` backend; all behaviour is in `python_backend.session`."""

from python_backend.errors import ServingError
from python_backend.model_config import ModelConfig
from python_backend.session import Session
from python_backend.triton_io import answer, fail, read_tensors


class TritonPythonModel:
    """Tensors in, tensors out, for one ONNX file."""

    def initialize(self, args):
        """Open the model file; a wrong config fails the load."""
        config = ModelConfig.from_args(args)
        self.session = Session.from_config(config)
        self.inputs = [tensor.name for tensor in config.inputs]
        self.outputs = [tensor.name for tensor in config.outputs]

    def execute(self, requests):
        """Run the network once for the whole batch."""
        arrays = [read_tensors(request, self.inputs) for request in requests]
        outcomes = self.session.run_requests(self.inputs, arrays, self.outputs)
        return [
            fail(outcome)
            if isinstance(outcome, ServingError)
            else answer(**dict(zip(self.outputs, outcome, strict=True)))
            for outcome in outcomes
        ]
