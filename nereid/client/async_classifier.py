"""Classification of images on a Triton server from asyncio."""

import asyncio
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar, Unpack

import numpy as np

from nereid.client import transport
from nereid.client.batch_split import Outcome
from nereid.client.images import ImageLike, encode, encode_or_error, name_of
from nereid.client.model_requests import ModelRequests
from nereid.client.prediction import Prediction
from nereid.client.request import CONCURRENCY, TIMEOUT_S, Options, ProtocolName, check_arguments, key_header
from nereid.client.shared_memory import Regions
from nereid.client.shared_regions import Kind
from nereid.client.transport import AsyncConnection

Encoded = TypeVar("Encoded")


class AsyncClassifier:
    """`Classifier` for asyncio: the same arguments, predictions and errors.

    Over gRPC a cancelled task cancels its request on the server, too.

    Example:
        >>> async with AsyncClassifier("localhost:8001") as classifier:
        ...     (await classifier.classify("cat.jpg")).labels[0].name
        'tabby'
    """

    def __init__(
        self,
        url: str,
        protocol: ProtocolName = "grpc",
        model: str = "classify",
        timeout_s: float = TIMEOUT_S,
        concurrency: int = CONCURRENCY,
        shared_memory: Kind | None = None,
        api_key: str = "",
    ) -> None:
        check_arguments(url, protocol, concurrency, shared_memory, api_key)
        self.model = model
        self._concurrency = concurrency
        self._connection = AsyncConnection(url, protocol, key_header(api_key))
        regions = Regions(shared_memory, url, protocol) if shared_memory else None
        self._requests = ModelRequests(protocol, model, timeout_s, regions)
        self._finalizer = weakref.finalize(self, regions.close) if regions else None

    async def __aenter__(self) -> "AsyncClassifier":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove the regions of shared memory, then close the connections."""
        if self._finalizer:
            await asyncio.to_thread(self._finalizer)
        await self._connection.close()

    async def classify(self, image: ImageLike, **options: Unpack[Options]) -> Prediction:
        """Classify one image; arguments and errors as `Classifier.classify`."""
        request = self._requests.start(options)
        encoded = [await _in_thread(encode, image)]
        return (await transport.run_async(self._connection, request.predictions(encoded)))[0]

    async def scores(self, image: ImageLike, **options: Unpack[Options]) -> np.ndarray:
        """Return the scores of all classes as the model returns them, float32[C]; arguments as `classify`."""
        request = self._requests.start(options, is_for_scores=True)
        encoded = await _in_thread(encode, image)
        return await transport.run_async(self._connection, request.scores(encoded))

    def classify_many(
        self,
        images: Iterable[ImageLike] | AsyncIterable[ImageLike],
        batch_size: int = 1,
        **options: Unpack[Options],
    ) -> AsyncIterator[Outcome]:
        """Classify a stream of images, several at a time; see `Classifier.classify_many`.

        Outcomes do not wait for the next image of an asynchronous iterable. The event loop reads any other
        iterable.
        """
        self._requests.check(batch_size, options)
        return self._outcomes(images, batch_size, options)

    async def _outcomes(
        self, images: Iterable[ImageLike] | AsyncIterable[ImageLike], batch_size: int, options: Options
    ) -> AsyncIterator[Outcome]:
        # Unbounded: the final None must fit even if the reader has gone.
        started: asyncio.Queue[asyncio.Task[list[Outcome]] | None] = asyncio.Queue()
        ahead = asyncio.Semaphore(2 * self._concurrency)
        running: set[asyncio.Task[Any]] = set()
        slots = asyncio.Semaphore(self._concurrency)

        async def classify(batch: list[ImageLike], names: list[str]) -> list[Outcome]:
            async with slots:
                return await self._classify_batch(batch, names, options)

        async def start() -> None:
            position = 0
            try:
                async for batch in _batches(images, batch_size):
                    await ahead.acquire()
                    names = [name_of(image, position + index) for index, image in enumerate(batch)]
                    position += len(batch)
                    running.add(task := asyncio.create_task(classify(batch, names)))
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

    async def _classify_batch(
        self, images: list[ImageLike], names: list[str], options: Options
    ) -> list[Outcome]:
        request = self._requests.start(options)
        encoded = [await _in_thread(encode_or_error, image) for image in images]
        return await transport.run_async(self._connection, request.outcomes(encoded, names))


async def _batches(
    images: Iterable[ImageLike] | AsyncIterable[ImageLike], size: int
) -> AsyncIterator[list[ImageLike]]:
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


async def _each(images: Iterable[ImageLike] | AsyncIterable[ImageLike]) -> AsyncIterator[ImageLike]:
    if isinstance(images, AsyncIterable):
        async for image in images:
            yield image
    else:
        for image in images:
            yield image


async def _in_thread(encode: Callable[[ImageLike], Encoded], image: ImageLike) -> Encoded | bytes:
    # Reading a file and encoding pixels would block the loop.
    return image if isinstance(image, bytes) else await asyncio.to_thread(encode, image)
