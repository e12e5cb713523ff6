"""Base clients for the task clients, blocking and asyncio, with one interface for every transport."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import numpy as np

from nereid.client import transport
from nereid.client.base_client import BaseClient, ResultOrError
from nereid.client.images import ImageLike
from nereid.client.request import Headers, ProtocolName, RequestOptions
from nereid.client.result_kind import Result
from nereid.client.transport import AsyncConnection, BlockingConnection

ImageStream: TypeAlias = Iterable[ImageLike] | AsyncIterable[ImageLike]


class ModelClient(BaseClient[Result]):
    """A thread-safe client for one model; task clients add methods named after their task."""

    _connection: BlockingConnection

    def _connect(self, url: str, protocol: ProtocolName, headers: Headers) -> None:
        self._owner, self._pool = os.getpid(), ThreadPoolExecutor(self._concurrency)
        self._connection = BlockingConnection(url, protocol, headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error:
            self._connection.close()  # the caller abandons the requests in flight
        self.close()

    def close(self) -> None:
        """Wait for stream requests in flight, then remove shared memory regions and close all connections."""
        self._pool_of_this_process().shutdown(cancel_futures=True)
        self._remove_regions()
        self._connection.close()

    def infer(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Result:
        """Return the result of one image; `Classifier.classify` has the arguments and errors."""
        return transport.run(self._result(image, options))

    def arrays(self, image: ImageLike, **options: Unpack[RequestOptions]) -> dict[str, np.ndarray]:
        """Return the outputs for one image as the model returns them, each [1, …], by name."""
        return transport.run(self._arrays(image, options))

    def infer_many(
        self, images: Iterable[ImageLike], batch_size: int = 1, **options: Unpack[RequestOptions]
    ) -> Iterator[ResultOrError[Result]]:
        """Return the outcomes of a stream of images, sent concurrently; see `Classifier.classify_many`."""
        self._check_stream(batch_size, options)
        return self._outcomes(iter(images), batch_size, options)

    def _outcomes(
        self, images: Iterator[ImageLike], batch_size: int, options: RequestOptions
    ) -> Iterator[ResultOrError[Result]]:
        waiting: deque[Future[list[ResultOrError[Result]]]] = deque()
        pool = self._pool_of_this_process()
        failure: Exception | None = None
        position = 0
        try:
            while True:
                # Twice the concurrency: enough to keep all threads busy, few enough to limit memory.
                while not failure and len(waiting) < 2 * self._concurrency:
                    batch, failure = _next_batch(images, batch_size)
                    if not batch:
                        break
                    waiting.append(pool.submit(self._infer_batch, batch, position, options))
                    position += len(batch)
                if not waiting:
                    break
                yield from waiting.popleft().result()
            if failure:
                raise failure
        finally:
            for future in waiting:
                future.cancel()

    def _infer_batch(
        self, images: list[ImageLike], position: int, options: RequestOptions
    ) -> list[ResultOrError[Result]]:
        return transport.run(self._batch_outcomes(images, position, options))

    def _pool_of_this_process(self) -> ThreadPoolExecutor:
        if os.getpid() != self._owner:  # a forked process does not inherit its parent's threads
            self._owner, self._pool = os.getpid(), ThreadPoolExecutor(self._concurrency)
        return self._pool


def _next_batch(images: Iterator[ImageLike], size: int) -> tuple[list[ImageLike], Exception | None]:
    batch: list[ImageLike] = []
    try:
        batch.extend(islice(images, size))
    except Exception as error:
        return batch, error
    return batch, None


class AsyncModelClient(BaseClient[Result]):
    """`ModelClient` for asyncio: the same arguments, results and errors."""

    _connection: AsyncConnection

    def _connect(self, url: str, protocol: ProtocolName, headers: Headers) -> None:
        self._connection = AsyncConnection(url, protocol, headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove the shared memory regions, then close the connections."""
        if self._memory:
            await asyncio.to_thread(self._remove_regions)
        await self._connection.close()

    async def infer(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Result:
        """Return the result of one image; `Classifier.classify` has the arguments and errors."""
        return await self._result(image, options)

    async def arrays(self, image: ImageLike, **options: Unpack[RequestOptions]) -> dict[str, np.ndarray]:
        """Return the outputs for one image as the model returns them, each [1, …], by name."""
        return await self._arrays(image, options)

    def infer_many(
        self, images: ImageStream, batch_size: int = 1, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[ResultOrError[Result]]:
        """Return the outcomes of a stream of images, sent concurrently; see `Classifier.classify_many`.

        Outcomes are not held back while an asynchronous iterable waits for its next image. Any other iterable
        is read in the event loop.
        """
        self._check_stream(batch_size, options)
        return self._outcomes(images, batch_size, options)

    async def _outcomes(
        self, images: ImageStream, batch_size: int, options: RequestOptions
    ) -> AsyncIterator[ResultOrError[Result]]:
        # Unbounded, because the final None must fit even if the reader is gone.
        started: asyncio.Queue[asyncio.Task[list[ResultOrError[Result]]] | None] = asyncio.Queue()
        ahead = asyncio.Semaphore(2 * self._concurrency)
        slots = asyncio.Semaphore(self._concurrency)
        running: set[asyncio.Task[Any]] = set()

        async def infer(batch: list[ImageLike], position: int) -> list[ResultOrError[Result]]:
            async with slots:
                return await self._batch_outcomes(batch, position, options)

        async def start() -> None:
            position = 0
            try:
                async for batch in _batches(images, batch_size):
                    await ahead.acquire()
                    running.add(task := asyncio.create_task(infer(batch, position)))
                    position += len(batch)
                    started.put_nowait(task)
            finally:
                started.put_nowait(None)

        running.add(starting := asyncio.create_task(start()))
        try:
            while (task := await started.get()) is not None:
                for outcome in await task:
                    yield outcome
                running.discard(task)
                ahead.release()
            await starting
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _batches(images: ImageStream, size: int) -> AsyncIterator[list[ImageLike]]:
    """Yield the images in batches; an error from the iterator is raised after the images before it."""
    batch: list[ImageLike] = []
    failure: Exception | None = None
    try:
        async for image in _each(images):
            batch.append(image)
            if len(batch) == size:
                yield batch
                batch = []
    except Exception as error:
        failure = error
    if batch:
        yield batch
    if failure:
        raise failure


async def _each(images: ImageStream) -> AsyncIterator[ImageLike]:
    if isinstance(images, AsyncIterable):
        async for image in images:
            yield image
    else:
        for image in images:
            yield image
