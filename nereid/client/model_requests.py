"""Requests to one model on one server, with retries and with shared memory."""

from functools import partial
from typing import Any

from nereid.client import prediction
from nereid.client.classifier_errors import ClassifierError, Unreachable
from nereid.client.request import CheckedOptions, ProtocolName, image_tensor, metadata_options, wanted_outputs
from nereid.client.retry import Attempts, Budget
from nereid.client.sans_io import Flow, Pause, Rpc
from nereid.client.shared_memory import Regions


class ModelRequests:
    """Sends the requests of a classifier; keeps the model's outputs and the retry budget.

    Args:
        protocol: protocol of the connection.
        model: name of the model.
        regions: shared memory for the images; None sends images in the request.
    """

    def __init__(self, protocol: ProtocolName, model: str, regions: Regions | None) -> None:
        self._protocol = protocol
        self._model = model
        self._regions = regions
        self._budget = Budget()
        self._outputs: list[str] = []

    def attempts(self, checked: CheckedOptions) -> Attempts:
        """Start the time limit of a request."""
        return Attempts(self._budget, checked.timeout_s)

    def send(self, checked: CheckedOptions, attempts: Attempts, files: list[bytes]) -> Flow[Any]:
        """Return tritonclient's result for images that share a request.

        Raises:
            ClassifierError: the error of the last attempt.
        """
        with self._budget.in_flight():
            while True:
                try:
                    result = yield from self._attempt(checked, attempts, files)
                except ClassifierError as error:
                    if (pause_s := attempts.pause_s(error)) is None:
                        raise
                    yield Pause(pause_s)
                else:
                    attempts.succeeded()
                    return result

    def _attempt(self, checked: CheckedOptions, attempts: Attempts, files: list[bytes]) -> Flow[Any]:
        if not self._outputs:
            options = metadata_options(self._protocol)
            metadata = yield Rpc("get_model_metadata", attempts.remaining_s(), (self._model,), options)
            self._outputs = wanted_outputs(metadata)
        if self._regions is None:
            result = yield self._infer(checked, attempts, image_tensor(self._protocol, files))
        else:
            infer = partial(self._infer, checked, attempts)
            result = yield from self._regions.infer(files, attempts, infer)
        if not prediction.is_complete(result, len(files)):
            raise Unreachable("the peer is not a Triton server: its response lacks scores of all images")
        return result

    def _infer(self, checked: CheckedOptions, attempts: Attempts, tensor: Any) -> Rpc:
        remaining_s = attempts.remaining_s()
        arguments = checked.infer_arguments(self._protocol, tensor, self._outputs, remaining_s)
        return Rpc("infer", remaining_s, (self._model,), arguments)
