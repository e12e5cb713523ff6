"""Requests to one model on one server: building them and reading the responses; connections do the I/O."""

import copy
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np

from nereid.base.contract import read_bad_images, read_batch_limit
from nereid.client.client_errors import NereidError, Unreachable, UnusableImage
from nereid.client.images import ImageLike, Unusable, encode, encode_or_error, name_of
from nereid.client.request import (
    DEFAULT_CONCURRENCY,
    DEFAULT_TIMEOUT_S,
    NO_LIMIT,
    CheckedOptions,
    Headers,
    MemoryKind,
    ProtocolName,
    RequestOptions,
    check_arguments,
    check_options,
    image_tensor,
    key_header,
)
from nereid.client.result_kind import Result, ResultKind, Timings
from nereid.client.retry import Attempts, RetryBudget
from nereid.client.shared_memory import SharedMemory
from nereid.client.transport import Connection

# The outcome for each image of a stream.
ResultOrError: TypeAlias = Result | NereidError
Encoded = TypeVar("Encoded")


@dataclass(slots=True)
class ModelRequest:
    """One request, starting when its images are encoded; all parts of a batch share its time limit."""

    checked: CheckedOptions
    attempts: Attempts
    started_at: float
    encoded_at: float = 0.0

    def timings(self) -> Timings:
        """Return the time spent so far; the parts of a batch add to the request's time."""
        encode_ms = round((self.encoded_at - self.started_at) * 1e3, 3)
        request_ms = round((time.perf_counter() - self.encoded_at) * 1e3, 3)
        return Timings(encode_ms, request_ms, self.attempts.count)


class BaseClient(ABC, Generic[Result]):
    """A connection to one model on one server; see `Classifier` for the arguments.

    Attributes:
        kind: the kind of results the model must produce.
        model: name of the model.
    """

    kind: ClassVar[ResultKind[Any]]
    _connection: Connection

    def __init__(
        self,
        url: str,
        protocol: ProtocolName = "grpc",
        model: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        concurrency: int = DEFAULT_CONCURRENCY,
        shared_memory: MemoryKind | None = None,
        api_key: str = "",
    ) -> None:
        check_arguments(url, protocol, concurrency, shared_memory, api_key)
        self.model = model or self.kind.model
        self._timeout_s, self._concurrency = timeout_s, concurrency
        self._connect(url, protocol, key_header(api_key))
        self._memory = SharedMemory(shared_memory, self._connection) if shared_memory else None
        # Also runs when the process exits without calling `close`.
        self._remove_regions = weakref.finalize(self, self._memory.close) if self._memory else lambda: None
        self._batch_limit = NO_LIMIT
        self._budget = RetryBudget()
        self._outputs: list[str] = []

    @abstractmethod
    def _connect(self, url: str, protocol: ProtocolName, headers: Headers) -> None:
        """Set `_connection`."""

    @property
    def shared_memory_refusal(self) -> str:
        """Why images are sent in requests instead of shared memory; empty while it is not refused."""
        return self._memory.refusal if self._memory else ""

    def _check_stream(self, batch_size: int, options: RequestOptions) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if batch_size > 1 and not self.kind.has_equal_shapes:
            raise ValueError(f"batch_size must be 1, because results differ in size, got {batch_size}")
        check_options(options, self._timeout_s, options_type=self.kind.options)

    async def _result(self, image: ImageLike, options: RequestOptions) -> Result:
        request = self._start(options)
        return (await self._results(request, await self._encoded(request, encode, [image])))[0]

    async def _arrays(self, image: ImageLike, options: RequestOptions) -> dict[str, np.ndarray]:
        request = self._start(options, is_for_scores=True)
        result = await self._send(request, await self._encoded(request, encode, [image]))
        return {name: result.as_numpy(name) for name in self.kind.outputs}

    async def _batch_outcomes(
        self, images: Sequence[ImageLike], position: int, options: RequestOptions
    ) -> list[ResultOrError[Result]]:
        """Return each image's result or error, including encoding errors; split the batch if it is rejected.

        `position` is the first image's position in its stream.
        """
        request = self._start(options)
        encoded = await self._encoded(request, encode_or_error, images)
        names = [name_of(image, position + index) for index, image in enumerate(images)]
        batch = BatchSplit[Result](encoded, names, self._batch_limit)
        while files := batch.next_request():
            try:
                results = await self._results(request, files)
            except NereidError as error:
                batch.record_failure(error)
            else:
                batch.record_results(results)
        self._batch_limit = min(self._batch_limit, batch.limit)
        return batch.outcomes()

    def _start(self, options: RequestOptions, is_for_scores: bool = False) -> ModelRequest:
        started_at = time.perf_counter()
        checked = check_options(options, self._timeout_s, is_for_scores, self.kind.options)
        return ModelRequest(checked, Attempts(self._budget, checked.timeout_s), started_at)

    async def _encoded(
        self, request: ModelRequest, encoder: Callable[[ImageLike], Encoded], images: Sequence[ImageLike]
    ) -> list[Encoded]:
        encoded = [await self._connection.convert(encoder, image) for image in images]
        request.encoded_at = time.perf_counter()
        return encoded

    async def _results(self, request: ModelRequest, files: Sequence[bytes]) -> list[Result]:
        result = await self._send(request, files)
        return self.kind.read(result, self.model, request.checked.request_id, request.timings())

    async def _send(self, request: ModelRequest, files: Sequence[bytes]) -> Any:
        """Return tritonclient's result for images sent in one request.

        Raises:
            NereidError: the error of the last attempt.
        """
        with self._budget.in_flight():
            while True:
                try:
                    result = await self._attempt(request, files)
                except NereidError as error:
                    if self._memory and isinstance(error, Unreachable):
                        self._memory.on_reconnect()
                    if (pause_s := request.attempts.record_failure(error)) is None:
                        raise
                    await self._connection.pause(pause_s)
                else:
                    self._budget.record_success()
                    break
        if not self.kind.is_complete(result, len(files)):
            names = ", ".join(self.kind.outputs)
            raise Unreachable(f"the peer is not a Triton server: its response lacks {names} of all images")
        return result

    async def _attempt(self, request: ModelRequest, files: Sequence[bytes]) -> Any:
        if not self._outputs:
            remaining_s = request.attempts.remaining_s()
            metadata = await self._connection.read("get_model_metadata", remaining_s, self.model)
            self._outputs = self.kind.needed_outputs(metadata)
        infer, result = partial(self._infer, request), None
        if self._memory:
            result = await self._memory.infer(files, request.attempts, infer)
        return await infer(image_tensor(self._connection.protocol, files)) if result is None else result

    async def _infer(self, request: ModelRequest, tensor: Any) -> Any:
        remaining_s = request.attempts.remaining_s()
        protocol = self._connection.protocol
        arguments = request.checked.infer_arguments(
            protocol, tensor, self._outputs, self.kind.ranked, remaining_s
        )
        return await self._connection.call("infer", remaining_s, self.model, **arguments)


class BatchSplit(Generic[Result]):
    """Images that share a request until the server rejects it.

    After a rejection, the valid images are sent again without the bad ones, or in smaller requests.

    Args:
        images: encoded images, or the errors that prevented their encoding.
        names: names of the images, for their outcomes.
        limit: maximum images per request.
    """

    def __init__(self, images: Sequence[bytes | Unusable], names: Sequence[str], limit: int) -> None:
        self.limit = limit
        self._names = names
        self._outcomes: dict[int, ResultOrError[Result] | Unusable] = {}
        self._images: dict[int, bytes] = {}
        for index, image in enumerate(images):
            if isinstance(image, bytes):
                self._images[index] = image
            else:
                self._outcomes[index] = image
        self._requests = deque(_parts(list(self._images), limit))

    def next_request(self) -> list[bytes] | None:
        """Return the images for the next request, or None once every image has an outcome."""
        return [self._images[index] for index in self._requests[0]] if self._requests else None

    def record_results(self, results: Sequence[Result]) -> None:
        """Record the results of the current request."""
        self._outcomes.update(zip(self._requests.popleft(), results, strict=True))

    def record_failure(self, error: NereidError) -> None:
        """Record the error of the current request, and queue the images that may still succeed."""
        indices = self._requests.popleft()
        text = str(error)
        if (limit := read_batch_limit(text)) and limit < len(indices):
            self.limit = limit
            self._requests.extendleft(reversed(_parts(indices, self.limit)))
        elif len(indices) > 1 and (bad := read_bad_images(text, len(indices))):
            rest = [index for position, index in enumerate(indices) if position not in bad.reasons]
            self._outcomes.update(
                {
                    indices[position]: type(error)(bad.prefix + reason)
                    for position, reason in bad.reasons.items()
                }
            )
            # If the list does not match the request, each image is sent on its own.
            self._requests.extendleft(reversed(_parts(rest, len(indices) if bad.reasons else 1)))
        else:
            self._outcomes.update(dict.fromkeys(indices, error))

    def outcomes(self) -> list[ResultOrError[Result]]:
        """Return the outcome of each image, in the original order."""
        return [_named(self._outcomes[index], name) for index, name in enumerate(self._names)]


def _named(outcome: Any, name: str) -> Any:
    if not isinstance(outcome, Exception):
        return replace(outcome, image=name)
    if isinstance(outcome, NereidError):
        error = copy.copy(outcome)  # images that share a request share its error
    else:
        error = UnusableImage(str(outcome))
        error.__cause__ = outcome
    error.image = name
    return error


def _parts(indices: list[int], size: int) -> list[list[int]]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]
