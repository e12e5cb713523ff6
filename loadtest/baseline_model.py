"""A minimal Triton model.py for an ONNX network: the baseline for the cost of our backend."""

import time
from pathlib import Path

import onnxruntime
import triton_python_backend_utils as pb_utils

from nereid.triton.metric_reporter import SessionMetrics


class TritonPythonModel:
    """Run `InferenceSession.run` for each request, and nothing else."""

    def initialize(self, args):
        """Open the network in the folder of this file."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.metrics = SessionMetrics(args["model_name"], int(args["model_version"]))

    def execute(self, requests):
        """Respond to the requests one by one."""
        return [self._respond(request) for request in requests]

    def _respond(self, request):
        inputs = request.inputs()[0].as_numpy()
        start = time.perf_counter()
        (scores,) = self.session.run(["scores"], {"input": inputs})
        self.metrics.ran(time.perf_counter() - start, len(inputs))
        return pb_utils.InferenceResponse([pb_utils.Tensor("scores", scores)])
