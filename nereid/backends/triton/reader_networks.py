"""The networks of a reader: sessions in its own process, or models of the same server."""

from collections.abc import Sequence

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid.backends.triton.metric_reporter import SessionMetrics
from nereid.backends.triton.onnx_model import open_session
from nereid.base.config.model_config import ModelConfig
from nereid.base.serving_errors import from_message
from nereid.base.tracing.context import sent_in
from nereid.tasks.read.reading_settings import ReadingSettings


class LocalNetwork:
    """A network in this process.

    Args:
        config: of the reader.
        network: of the network.
        settings: of the reader.
    """

    def __init__(self, config: ModelConfig, network: ModelConfig, settings: ReadingSettings) -> None:
        """Open the network.

        Raises:
            InvalidConfig: it cannot be served with its config.
        """
        network = network.replacing(settings.of_network)
        metrics = SessionMetrics(network.name, network.version)
        self._session, self._metrics = open_session(config, network, metrics)
        self._input = network.inputs[0].name
        self._outputs = [output.name for output in network.outputs]

    def __call__(self, tensor: np.ndarray, traceparent: str = "") -> Sequence[np.ndarray]:
        """Return the outputs for one batch, in their order in the config; it has no span of its own."""
        return self._session.run({self._input: tensor}, self._outputs)

    def close(self) -> None:
        """Report the end of the instance."""
        self._metrics.closed(self._session.provider)


class ServedNetwork:
    """A network that the server runs as a model of its own."""

    def __init__(self, config: ModelConfig, network: ModelConfig, settings: ReadingSettings) -> None:
        self._name, self._version = network.name, network.version
        self._input = network.inputs[0].name
        self._outputs = [output.name for output in network.outputs]

    def __call__(self, tensor: np.ndarray, traceparent: str = "") -> Sequence[np.ndarray]:
        """Return the outputs for one batch, in their order in the config.

        Args:
            tensor: the input.
            traceparent: the span that the model continues; "" for none.

        Raises:
            ServingError: the model rejected the request, or failed.
        """
        response = pb_utils.InferenceRequest(
            model_name=self._name,
            model_version=self._version,
            inputs=[pb_utils.Tensor(self._input, tensor)],
            requested_output_names=self._outputs,
            parameters=sent_in(traceparent) if traceparent else {},
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        if response.has_error():
            raise from_message(response.error().message())
        tensors = {each.name(): each for each in response.output_tensors()}
        return [np.array(tensors[name].as_numpy()) for name in self._outputs]

    def close(self) -> None:
        """Do nothing: the model reports its own end."""


def open_network(
    config: ModelConfig, network: ModelConfig, settings: ReadingSettings
) -> LocalNetwork | ServedNetwork:
    """Return a network of the reader `config`, where its settings place it.

    Raises:
        InvalidConfig: it cannot be served with its config.
    """
    return (LocalNetwork if settings.is_in_process else ServedNetwork)(config, network, settings)
