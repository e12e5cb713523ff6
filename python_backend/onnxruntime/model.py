"""Triton adapter of the `onnxruntime` backend; all behaviour is in `nereid.inference.session`."""

import time
from itertools import compress

from nereid.config.model_config import ModelConfig
from nereid.inference.session import complete_config
from nereid.serving_errors import Cancelled, ServingError
from nereid.triton import inherited_sockets
from nereid.triton.tensors import answer, fail, log_info, log_warn, read_tensors, version_folder
from nereid.triton.triton_session import backend_settings, open_session

# Triton 24.10 does not drop a cancelled request that waits for its instance. To ask is a round trip to the
# server for each request, which pays where a run is this long.
WORTH_ASKING_S = 0.01
GONE = Cancelled("the client left before the request ran")


class TritonPythonModel:
    """Tensors in, tensors out, for one ONNX file."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        """Fill in what the config leaves to be read from the ONNX file."""
        document = auto_complete_model_config.as_dict()
        complete_config(document, version_folder(document), backend_settings(), log_info, log_warn)
        return auto_complete_model_config

    def initialize(self, args):
        """Open the model file; a wrong config fails the load."""
        inherited_sockets.close_connections()
        config = ModelConfig.from_args(args, may_use_gpu=True)
        self.session, self.metrics = open_session(config, network=config)
        self.last_s = 0.0

    def execute(self, requests):
        """Run the network once for all requests that somebody still waits for."""
        start, asks = time.perf_counter(), self.last_s > WORTH_ASKING_S
        is_wanted = [not (asks and request.is_cancelled()) for request in requests]
        outcomes = iter(self._run([*compress(requests, is_wanted)]))
        responses = [self._respond(next(outcomes) if each else GONE) for each in is_wanted]
        if any(is_wanted):
            self.last_s = time.perf_counter() - start
        return responses

    def finalize(self):
        """Leave the count of instances."""
        self.metrics.closed(self.session.provider)

    def _run(self, requests):
        arrays = [read_tensors(request, self.session.is_on_gpu) for request in requests]
        if self.session.is_on_gpu:
            self.metrics.fetched_from_host(arrays)
        return self.session.run_requests(arrays, [request.requested_output_names() for request in requests])

    def _respond(self, outcome):
        if isinstance(outcome, ServingError):
            self.metrics.rejected(outcome)
            return fail(outcome)
        return answer(**outcome)
