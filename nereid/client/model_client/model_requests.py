"""Requests to one model on one server: what is sent, and what the answers mean; connections do the I/O."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from nereid.client.classifier_errors import ClassifierError, Unreachable
from nereid.client.images import ImageLike, encode, encode_or_error
from nereid.client.model_client.batch_split import BatchSplit
from nereid.client.request import NO_LIMIT, CheckedOptions, Options, check_options, image_tensor
from nereid.client.result_kind import Result, ResultKind, Timings
from nereid.client.retry import Attempts, Budget
from nereid.client.shared_memory import SharedMemory
from nereid.client.transport import Connection

Encoded = TypeVar("Encoded")


@dataclass(slots=True)
class ModelRequest:
    """One request from the encoding of its images on; the parts of a batch share its time limit."""

    checked: CheckedOptions
    attempts: Attempts
    began_s: float
    encoded_s: float = 0.0

    def timings(self) -> Timings:
        """Return the time until now; the parts of a batch add to the time of the request."""
        encode_ms = round((self.encoded_s - self.began_s) * 1e3, 3)
        request_ms = round((time.perf_counter() - self.encoded_s) * 1e3, 3)
        return Timings(encode_ms, request_ms, self.attempts.count)


class ModelRequests(Generic[Result]):
    """The requests of one client; keeps the model's outputs, its batch limit and the retry budget.

    Args:
        connection: blocking, or for asyncio.
        model: name of the model.
        kind: the results that the model must have.
        timeout_s: default time limit of a request, in seconds.
        memory: shared memory for the images; None sends images in the request.
    """

    def __init__(
        self,
        connection: Connection,
        model: str,
        kind: ResultKind[Result],
        timeout_s: float,
        memory: SharedMemory | None,
    ) -> None:
        self._connection, self._memory = connection, memory
        self._model, self._kind = model, kind
        self._timeout_s = timeout_s
        self._batch_limit = NO_LIMIT
        self._budget = Budget()
        self._outputs: list[str] = []

    def check(self, batch_size: int, options: Options) -> None:
        """Check the arguments of a stream.

        Raises:
            ValueError: an argument is invalid.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        check_options(options, self._timeout_s, known=self._kind.options)

    async def result(self, image: ImageLike, options: Options) -> Result:
        """Return the result of one image; `Classifier.classify` has the errors."""
        request = self._start(options)
        return (await self._results(request, await self._encoded(request, encode, [image])))[0]

    async def arrays(self, image: ImageLike, options: Options) -> dict[str, np.ndarray]:
        """Return the outputs for one image, each [1, …], by name; errors as `result`."""
        request = self._start(options, is_for_scores=True)
        result = await self._send(request, await self._encoded(request, encode, [image]))
        return {name: result.as_numpy(name) for name in self._kind.outputs}

    async def outcomes(
        self, images: Sequence[ImageLike], names: Sequence[str], options: Options
    ) -> list[Result | ClassifierError]:
        """Return the outcome of each image, or of its failed encoding; split a batch that is rejected."""
        request = self._start(options)
        encoded = await self._encoded(request, encode_or_error, images)
        batch = BatchSplit[Result](encoded, names, self._batch_limit)
        while files := batch.next_request():
            try:
                results = await self._results(request, files)
            except ClassifierError as error:
                batch.failed(error)
            else:
                batch.succeeded(results)
        self._batch_limit = min(self._batch_limit, batch.limit)
        return batch.outcomes()

    def _start(self, options: Options, is_for_scores: bool = False) -> ModelRequest:
        began_s = time.perf_counter()
        checked = check_options(options, self._timeout_s, is_for_scores, self._kind.options)
        return ModelRequest(checked, Attempts(self._budget, checked.timeout_s), began_s)

    async def _encoded(
        self, request: ModelRequest, encoder: Callable[[ImageLike], Encoded], images: Sequence[ImageLike]
    ) -> list[Encoded]:
        encoded = [await self._connection.convert(encoder, image) for image in images]
        request.encoded_s = time.perf_counter()
        return encoded

    async def _results(self, request: ModelRequest, files: Sequence[bytes]) -> list[Result]:
        result = await self._send(request, files)
        return self._kind.read(result, self._model, request.checked.request_id, request.timings())

    async def _send(self, request: ModelRequest, files: Sequence[bytes]) -> Any:
        """Return tritonclient's result for images that share a request.

        Raises:
            ClassifierError: the error of the last attempt.
        """
        with self._budget.in_flight():
            while True:
                try:
                    result = await self._attempt(request, files)
                except ClassifierError as error:
                    if self._memory and isinstance(error, Unreachable):
                        self._memory.reconnected()
                    if (pause_s := request.attempts.pause_s(error)) is None:
                        raise
                    await self._connection.pause(pause_s)
                else:
                    request.attempts.succeeded()
                    return result

    async def _attempt(self, request: ModelRequest, files: Sequence[bytes]) -> Any:
        if not self._outputs:
            remaining_s = request.attempts.remaining_s()
            metadata = await self._connection.read("get_model_metadata", remaining_s, self._model)
            self._outputs = self._kind.wanted_outputs(metadata)
        infer, result = partial(self._infer, request), None
        if self._memory:
            result = await self._memory.infer(files, request.attempts, infer)
        if result is None:
            result = await infer(image_tensor(self._connection.protocol, files))
        if not self._kind.is_complete(result, len(files)):
            names = ", ".join(self._kind.outputs)
            raise Unreachable(f"the peer is not a Triton server: its response lacks {names} of all images")
        return result

    async def _infer(self, request: ModelRequest, tensor: Any) -> Any:
        remaining_s = request.attempts.remaining_s()
        protocol = self._connection.protocol
        arguments = request.checked.infer_arguments(protocol, tensor, self._outputs, remaining_s)
        return await self._connection.call("infer", remaining_s, self._model, **arguments)
