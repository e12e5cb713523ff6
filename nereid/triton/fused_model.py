"""Instances of models of the `fused` backend: a preprocessing model and a network in one process.

On a CPU every hop between processes costs about 1 ms of CPU; this model runs the code of both backends of
the ensemble in one process.
"""

from collections.abc import Sequence
from typing import Any

from nereid.config.model_config import FusedSettings, ModelConfig
from nereid.imaging.pipeline import Batch, Pipeline
from nereid.serving_errors import InferenceFailed, InvalidConfig, ServingError
from nereid.triton.onnx_model import open_session
from nereid.triton.tensors import read_images, respond_to_batch


class FusedModel:
    """One instance: encoded images to scores, one outcome per request."""

    def __init__(self, config: ModelConfig) -> None:
        """Open both siblings.

        Raises:
            InvalidConfig: a sibling is missing, or the tensors of the three models do not fit.
        """
        names = config.settings(FusedSettings)
        preprocess = config.sibling(names.preprocess, names.preprocess_version).replacing(names.of_preprocess)
        network = config.sibling(names.network, names.network_version).replacing(names.of_network)
        self._pipeline = Pipeline.from_config(preprocess, config.max_batch_size, config.cpu_instances)
        self._session, self._metrics = open_session(config, network)
        made, taken, scores = preprocess.outputs[0], network.inputs[0], network.outputs[0]
        if taken.kind != made.kind:
            raise InvalidConfig(
                f"model '{config.name}': input of '{names.network}': expected {taken.kind}, "
                f"got {made.kind} from '{names.preprocess}'"
            )
        if len(config.outputs) != 1 or config.outputs[0].kind != scores.kind:
            got = ", ".join(f"'{each.name}' {each.kind}" for each in config.outputs)
            raise InvalidConfig(
                f"model '{config.name}': expected one output like '{scores.name}' of its network, "
                f"{scores.kind}, got {got}"
            )
        self._input, self._output, self._response = taken.name, scores.name, config.outputs[0].name

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Decode, transform and run the network once for all good images of the batch."""
        batch = self._pipeline.run([read_images(request) for request in requests])
        for outcome in batch.outcomes:
            if isinstance(outcome, ServingError):
                self._metrics.rejected(outcome)
        if not len(batch.tensor):
            return respond_to_batch(batch)
        try:
            (scores,) = self._session.run({self._input: batch.tensor}, [self._output])
        except InferenceFailed as error:
            failed: list[slice | ServingError] = [
                error if isinstance(rows, slice) else rows for rows in batch.outcomes
            ]
            return respond_to_batch(Batch(batch.tensor, failed))
        return respond_to_batch(batch, **{self._response: scores})

    def close(self) -> None:
        """Report the end of the instance."""
        self._metrics.closed(self._session.provider)
