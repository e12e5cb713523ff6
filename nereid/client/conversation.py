"""How a classifier gets its answers, step by step: repeated where that is safe, by shared memory if asked."""

from functools import partial
from typing import Any

from nereid.client import prediction
from nereid.client.errors import ClassifierError, Unreachable
from nereid.client.request import Ask, ProtocolName, image_tensor, metadata_options, wanted_outputs
from nereid.client.retry import Attempts, Budget
from nereid.client.shared_memory import Regions
from nereid.client.steps import Call, Pause, Steps


class Exchange:
    """What a classifier has learnt of one model on one server.

    Args:
        protocol: that of its connection.
        model: whom to ask.
        regions: where images are put for the server; None to send them.
    """

    def __init__(self, protocol: ProtocolName, model: str, regions: Regions | None) -> None:
        self._protocol = protocol
        self._model = model
        self._regions = regions
        self._budget = Budget()
        self._outputs: list[str] = []

    def attempts(self, asked: Ask) -> Attempts:
        """Begin to count the time of a request."""
        return Attempts(self._budget, asked.timeout_s)

    def request(self, asked: Ask, attempts: Attempts, files: list[bytes]) -> Steps[Any]:
        """Return tritonclient's result for images that share a request.

        Raises:
            ClassifierError: of the last attempt.
        """
        with self._budget.in_flight():
            while True:
                try:
                    result = yield from self._attempt(asked, attempts, files)
                except ClassifierError as error:
                    if (pause_s := attempts.pause_s(error)) is None:
                        raise
                    yield Pause(pause_s)
                else:
                    attempts.succeeded()
                    return result

    def _attempt(self, asked: Ask, attempts: Attempts, files: list[bytes]) -> Steps[Any]:
        if not self._outputs:
            options = metadata_options(self._protocol)
            metadata = yield Call("get_model_metadata", attempts.remaining_s(), (self._model,), options)
            self._outputs = wanted_outputs(metadata)
        if self._regions is None:
            result = yield self._infer(asked, attempts, image_tensor(self._protocol, files))
        else:
            call = partial(self._infer, asked, attempts)
            result = yield from self._regions.infer(files, attempts, call)
        if not prediction.is_whole(result, len(files)):
            raise Unreachable("what answers is no Triton: it answers without scores")
        return result

    def _infer(self, asked: Ask, attempts: Attempts, tensor: Any) -> Call:
        remaining_s = attempts.remaining_s()
        arguments = asked.arguments(self._protocol, tensor, self._outputs, remaining_s)
        return Call("infer", remaining_s, (self._model,), arguments)
