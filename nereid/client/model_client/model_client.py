"""Requests to one model of a Triton server: one interface for every transport and every task."""

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Generic, Self, TypeAlias, Unpack

import numpy as np

from nereid.client import transport
from nereid.client.classifier_errors import ClassifierError
from nereid.client.images import ImageLike, encode, encode_or_error, name_of
from nereid.client.model_client.model_requests import ModelRequests
from nereid.client.request import CONCURRENCY, TIMEOUT_S, Options, ProtocolName, check_arguments, key_header
from nereid.client.results.result_kind import Result, ResultKind
from nereid.client.shared_memory import Regions
from nereid.client.shared_regions import Kind

# What a stream of images gives for each of them.
ResultOrError: TypeAlias = Result | ClassifierError


class ModelClient(Generic[Result]):
    """A connection to one model of one server; `Classifier` has the description of its arguments.

    Args:
        kind: the results that the model must have.
    """

    def __init__(
        self,
        kind: ResultKind[Result],
        url: str,
        protocol: ProtocolName,
        model: str,
        timeout_s: float = TIMEOUT_S,
        concurrency: int = CONCURRENCY,
        shared_memory: Kind | None = None,
        api_key: str = "",
    ) -> None:
        check_arguments(url, protocol, concurrency, shared_memory, api_key)
        self.model = model
        self._concurrency = concurrency
        self._owner, self._pool = os.getpid(), ThreadPoolExecutor(concurrency)
        self._connection = transport.Connection(url, protocol, key_header(api_key))
        regions = Regions(shared_memory, url, protocol) if shared_memory else None
        self._requests = ModelRequests(protocol, model, kind, timeout_s, regions)
        # Also at the end of the process, without `close`.
        self._finalizer = weakref.finalize(self, regions.close) if regions else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error:
            self._connection.close()  # the caller discards the requests in flight
        self.close()

    @property
    def shared_memory_refusal(self) -> str:
        """Why images are sent in requests and not in shared memory; empty while nothing was refused."""
        return self._requests.images.refusal

    def close(self) -> None:
        """Wait for the requests of a stream in flight, then close all connections."""
        self._pool_of_this_process().shutdown(cancel_futures=True)
        if self._finalizer:
            self._finalizer()
        self._connection.close()

    def infer(self, image: ImageLike, **options: Unpack[Options]) -> Result:
        """Return the result of one image; `Classifier.classify` has the arguments and errors."""
        request = self._requests.start(options)
        return transport.run(self._connection, request.results([encode(image)]))[0]

    def arrays(self, image: ImageLike, **options: Unpack[Options]) -> dict[str, np.ndarray]:
        """Return the outputs for one image as the model returns them, each [1, …], by name."""
        request = self._requests.start(options, is_for_scores=True)
        return transport.run(self._connection, request.arrays(encode(image)))

    def infer_many(
        self, images: Iterable[ImageLike], batch_size: int = 1, **options: Unpack[Options]
    ) -> Iterator[ResultOrError[Result]]:
        """Return the outcomes of a stream of images, several at a time; see `Classifier.classify_many`."""
        self._requests.check(batch_size, options)
        return self._outcomes(iter(images), batch_size, options)

    def _outcomes(
        self, images: Iterator[ImageLike], batch_size: int, options: Options
    ) -> Iterator[ResultOrError[Result]]:
        waiting: deque[Future[list[ResultOrError[Result]]]] = deque()
        pool = self._pool_of_this_process()
        failure: Exception | None = None
        position = 0
        try:
            while True:
                # Twice the requests in flight: enough to keep all threads busy, few enough to limit memory.
                while not failure and len(waiting) < 2 * self._concurrency:
                    batch, failure = _next_batch(images, batch_size)
                    if not batch:
                        break
                    names = [name_of(image, position + index) for index, image in enumerate(batch)]
                    position += len(batch)
                    waiting.append(pool.submit(self._infer_batch, batch, names, options))
                if not waiting:
                    break
                yield from waiting.popleft().result()
            if failure:
                raise failure
        finally:
            for future in waiting:
                future.cancel()

    def _infer_batch(
        self, images: list[ImageLike], names: list[str], options: Options
    ) -> list[ResultOrError[Result]]:
        request = self._requests.start(options)
        encoded = [encode_or_error(image) for image in images]
        return transport.run(self._connection, request.outcomes(encoded, names))

    def _pool_of_this_process(self) -> ThreadPoolExecutor:
        if os.getpid() != self._owner:  # a fork has no threads of its parent
            self._owner, self._pool = os.getpid(), ThreadPoolExecutor(self._concurrency)
        return self._pool


def _next_batch(images: Iterator[ImageLike], size: int) -> tuple[list[ImageLike], Exception | None]:
    batch: list[ImageLike] = []
    try:
        batch.extend(islice(images, size))
    except Exception as error:
        return batch, error
    return batch, None
