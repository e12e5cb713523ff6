"""Classification of images on a Triton server from asyncio."""

import asyncio
import time
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Unpack

import numpy as np

from nereid.client import prediction, transport
from nereid.client.batch_split import BatchSplit, Outcome, Unusable
from nereid.client.classifier_errors import ClassifierError
from nereid.client.images import ImageLike, encode
from nereid.client.model_requests import ModelRequests
from nereid.client.prediction import Prediction, Timings
from nereid.client.request import (
    CONCURRENCY,
    NO_LIMIT,
    TIMEOUT_S,
    CheckedOptions,
    Options,
    ProtocolName,
    check_arguments,
    check_options,
)
from nereid.client.retry import Attempts
from nereid.client.shared_memory import Regions
from nereid.client.shared_regions import Kind
from nereid.client.transport import AsyncConnection
from nereid.contract import SCORES


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
    ) -> None:
        check_arguments(url, protocol, concurrency, shared_memory)
        self.model = model
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._limit = NO_LIMIT
        self._connection = AsyncConnection(url, protocol)
        regions = Regions(shared_memory, url, protocol) if shared_memory else None
        self._requests = ModelRequests(protocol, model, regions)
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
        began = time.perf_counter()
        checked = check_options(options, self._timeout_s)
        attempts = self._requests.attempts(checked)
        file = await _encode(image)
        encode_s = time.perf_counter() - began
        result = await self._request(checked, attempts, [file])
        request_s = time.perf_counter() - began - encode_s
        timings = Timings.of(encode_s, request_s, attempts.count)
        return prediction.read(result, self.model, checked.request_id, timings)[0]

    async def scores(self, image: ImageLike, **options: Unpack[Options]) -> np.ndarray:
        """Return the scores of all classes as the model returns them, float32[C]; arguments as `classify`."""
        checked = check_options(options, self._timeout_s, is_for_scores=True)
        attempts = self._requests.attempts(checked)
        result = await self._request(checked, attempts, [await _encode(image)])
        scores: np.ndarray = result.as_numpy(SCORES)[0]
        return scores

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
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        check_options(options, self._timeout_s)
        return self._outcomes(images, batch_size, options)

    async def _outcomes(
        self, images: Iterable[ImageLike] | AsyncIterable[ImageLike], batch_size: int, options: Options
    ) -> AsyncIterator[Outcome]:
        # Unbounded: the final None must fit even if the reader has gone.
        started: asyncio.Queue[asyncio.Task[list[Outcome]] | None] = asyncio.Queue()
        ahead = asyncio.Semaphore(2 * self._concurrency)
        running: set[asyncio.Task[Any]] = set()
        slots = asyncio.Semaphore(self._concurrency)

        async def classify(batch: list[ImageLike]) -> list[Outcome]:
            async with slots:
                return await self._classify_batch(batch, options)

        async def start() -> None:
            try:
                async for batch in _batches(images, batch_size):
                    await ahead.acquire()
                    running.add(task := asyncio.create_task(classify(batch)))
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

    async def _classify_batch(self, images: list[ImageLike], options: Options) -> list[Outcome]:
        began = time.perf_counter()
        checked = check_options(options, self._timeout_s)
        attempts = self._requests.attempts(checked)
        batch = BatchSplit([await _encode_or_error(image) for image in images], self._limit)
        encode_s = time.perf_counter() - began
        while files := batch.next_request():
            try:
                result = await self._request(checked, attempts, files)
                request_s = time.perf_counter() - began - encode_s
                timings = Timings.of(encode_s, request_s, attempts.count)
                predictions = prediction.read(result, self.model, checked.request_id, timings)
            except (ClassifierError, OSError) as error:  # OSError: full shared memory
                batch.failed(error)
            else:
                batch.succeeded(predictions)
        self._limit = min(self._limit, batch.limit)
        return batch.outcomes()

    async def _request(self, checked: CheckedOptions, attempts: Attempts, files: list[bytes]) -> Any:
        return await transport.run_async(self._connection, self._requests.send(checked, attempts, files))


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


async def _encode(image: ImageLike) -> bytes:
    # In a thread: reading a file and encoding pixels would block the loop.
    return image if isinstance(image, bytes) else await asyncio.to_thread(encode, image)


async def _encode_or_error(image: ImageLike) -> bytes | Unusable:
    try:
        return await _encode(image)
    except (OSError, TypeError, ValueError) as error:
        return error
