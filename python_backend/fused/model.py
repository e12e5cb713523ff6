"""Triton adapter of the `fused` backend: a preprocessing model and a network in one process.

On a CPU every hop between processes costs about 1 ms of CPU; this backend composes the two library pieces
that the ensemble's backends use, and has no behaviour of its own.
"""

from nereid.config.model_config import FusedSettings, ModelConfig
from nereid.imaging.pipeline import Batch, Pipeline
from nereid.serving_errors import InferenceFailed, InvalidConfig, ServingError
from nereid.triton import inherited_sockets
from nereid.triton.tensors import answer_batch, read_images
from nereid.triton.triton_session import open_session


class TritonPythonModel:
    """Encoded images to scores, one outcome per request."""

    def initialize(self, args):
        """Open both siblings; a missing or wrong one fails the load."""
        inherited_sockets.close_connections()
        config = ModelConfig.from_args(args)
        names = config.settings(FusedSettings)
        preprocess = config.sibling(names.preprocess, names.preprocess_version).replacing(names.of_preprocess)
        network = config.sibling(names.network, names.network_version).replacing(names.of_network)
        self.pipeline = Pipeline.from_config(preprocess, config.max_batch_size, config.cpu_instances)
        self.session, self.metrics = open_session(config, network)
        self.input = network.inputs[0].name
        self.output = network.outputs[0].name
        made, wanted = preprocess.outputs[0], network.inputs[0]
        if (made.datatype, made.dims) != (wanted.datatype, wanted.dims):
            raise InvalidConfig(
                f"model '{config.name}': '{names.network}' needs {wanted.datatype} {list(wanted.dims)}, "
                f"'{names.preprocess}' gives {made.datatype} {list(made.dims)}"
            )
        told = [(tensor.datatype, tensor.dims) for tensor in config.outputs]
        if told != [(network.outputs[0].datatype, network.outputs[0].dims)]:
            raise InvalidConfig(
                f"model '{config.name}' must have one output like its network's '{self.output}', "
                f"{network.outputs[0].datatype} {list(network.outputs[0].dims)}"
            )
        self.answered = config.outputs[0].name

    def execute(self, requests):
        """Decode, transform and run the network once for all good images of the batch."""
        batch = self.pipeline.run([read_images(request) for request in requests])
        for outcome in batch.outcomes:
            if isinstance(outcome, ServingError):
                self.metrics.rejected(outcome)
        if not len(batch.tensor):
            return answer_batch(batch)
        try:
            (scores,) = self.session.run({self.input: batch.tensor}, [self.output])
        except InferenceFailed as error:
            failed = [error if isinstance(rows, slice) else rows for rows in batch.outcomes]
            return answer_batch(Batch(batch.tensor, failed))
        return answer_batch(batch, **{self.answered: scores})

    def finalize(self):
        """Leave the count of instances."""
        self.metrics.closed(self.session.provider)
