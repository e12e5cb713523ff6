"""Requests to one model of a Triton server, blocking: one interface for every transport and every task."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Self, Unpack

import numpy as np

from nereid.client.images import ImageLike, name_of
from nereid.client.model_client.base_client import BaseClient, ResultOrError
from nereid.client.request import Options, ProtocolName
from nereid.client.result_kind import Result
from nereid.client.transport import BlockingConnection, Connection, Headers, run


class ModelClient(BaseClient[Result]):
    """A client for several threads."""

    def _connect(self, url: str, protocol: ProtocolName, headers: Headers) -> Connection:
        self._owner, self._pool = os.getpid(), ThreadPoolExecutor(self._concurrency)
        self._connection = BlockingConnection(url, protocol, headers)
        return self._connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error:
            self._connection.close()  # the caller discards the requests in flight
        self.close()

    def close(self) -> None:
        """Wait for the requests of a stream in flight, then remove the regions and close all connections."""
        self._pool_of_this_process().shutdown(cancel_futures=True)
        self._remove_regions()
        self._connection.close()

    def infer(self, image: ImageLike, **options: Unpack[Options]) -> Result:
        """Return the result of one image; `Classifier.classify` has the arguments and errors."""
        return run(self._requests.result(image, options))

    def arrays(self, image: ImageLike, **options: Unpack[Options]) -> dict[str, np.ndarray]:
        """Return the outputs for one image as the model returns them, each [1, …], by name."""
        return run(self._requests.arrays(image, options))

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
        return run(self._requests.outcomes(images, names, options))

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
