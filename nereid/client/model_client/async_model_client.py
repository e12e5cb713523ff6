"""Requests to one model of a Triton server from asyncio."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np

from nereid.client.images import ImageLike, name_of
from nereid.client.model_client.base_client import BaseClient, ResultOrError
from nereid.client.request import Options, ProtocolName
from nereid.client.result_kind import Result
from nereid.client.transport import AsyncConnection, Connection, Headers

Images = Iterable[ImageLike] | AsyncIterable[ImageLike]


class AsyncModelClient(BaseClient[Result]):
    """`ModelClient` for asyncio: the same arguments, results and errors."""

    def _connect(self, url: str, protocol: ProtocolName, headers: Headers) -> Connection:
        self._connection = AsyncConnection(url, protocol, headers)
        return self._connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove the regions of shared memory, then close the connections."""
        if self._memory:
            await asyncio.to_thread(self._remove_regions)
        await self._connection.close()

    async def infer(self, image: ImageLike, **options: Unpack[Options]) -> Result:
        """Return the result of one image; `Classifier.classify` has the arguments and errors."""
        return await self._requests.result(image, options)

    async def arrays(self, image: ImageLike, **options: Unpack[Options]) -> dict[str, np.ndarray]:
        """Return the outputs for one image as the model returns them, each [1, …], by name."""
        return await self._requests.arrays(image, options)

    def infer_many(
        self, images: Images, batch_size: int = 1, **options: Unpack[Options]
    ) -> AsyncIterator[ResultOrError[Result]]:
        """Return the outcomes of a stream of images, several at a time; see `Classifier.classify_many`.

        Outcomes do not wait for the next image of an asynchronous iterable. The event loop reads any other
        iterable.
        """
        self._requests.check(batch_size, options)
        return self._outcomes(images, batch_size, options)

    async def _outcomes(
        self, images: Images, batch_size: int, options: Options
    ) -> AsyncIterator[ResultOrError[Result]]:
        # Unbounded: the final None must fit even if the reader has gone.
        started: asyncio.Queue[asyncio.Task[list[ResultOrError[Result]]] | None] = asyncio.Queue()
        ahead = asyncio.Semaphore(2 * self._concurrency)
        slots = asyncio.Semaphore(self._concurrency)
        running: set[asyncio.Task[Any]] = set()

        async def infer(batch: list[ImageLike], names: list[str]) -> list[ResultOrError[Result]]:
            async with slots:
                return await self._requests.outcomes(batch, names, options)

        async def start() -> None:
            position = 0
            try:
                async for batch in _batches(images, batch_size):
                    await ahead.acquire()
                    names = [name_of(image, position + index) for index, image in enumerate(batch)]
                    position += len(batch)
                    running.add(task := asyncio.create_task(infer(batch, names)))
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
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _batches(images: Images, size: int) -> AsyncIterator[list[ImageLike]]:
    """Yield the images in batches; the error of their iterator follows the images before it."""
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


async def _each(images: Images) -> AsyncIterator[ImageLike]:
    if isinstance(images, AsyncIterable):
        async for image in images:
            yield image
    else:
        for image in images:
            yield image
