"""Requests to one model of a Triton server from asyncio."""

import asyncio
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from nereid.client import transport
from nereid.client.images import ImageLike, encode, encode_or_error, name_of
from nereid.client.model_client.model_client import ResultOrError
from nereid.client.model_client.model_requests import ModelRequests
from nereid.client.request import CONCURRENCY, TIMEOUT_S, Options, ProtocolName, check_arguments, key_header
from nereid.client.results.result_kind import Result, ResultKind
from nereid.client.shared_memory import Regions
from nereid.client.shared_regions import Kind
from nereid.client.transport import AsyncConnection

Encoded = TypeVar("Encoded")


class AsyncModelClient(Generic[Result]):
    """`ModelClient` for asyncio: the same arguments, results and errors."""

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
        self._connection = AsyncConnection(url, protocol, key_header(api_key))
        regions = Regions(shared_memory, url, protocol) if shared_memory else None
        self._requests = ModelRequests(protocol, model, kind, timeout_s, regions)
        self._finalizer = weakref.finalize(self, regions.close) if regions else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def shared_memory_refusal(self) -> str:
        """Why images are sent in requests and not in shared memory; empty while nothing was refused."""
        return self._requests.images.refusal

    async def close(self) -> None:
        """Remove the regions of shared memory, then close the connections."""
        if self._finalizer:
            await asyncio.to_thread(self._finalizer)
        await self._connection.close()

    async def infer(self, image: ImageLike, **options: Unpack[Options]) -> Result:
        """Return the result of one image; `Classifier.classify` has the arguments and errors."""
        request = self._requests.start(options)
        encoded = [await in_thread(encode, image)]
        return (await transport.run_async(self._connection, request.results(encoded)))[0]

    def infer_many(
        self,
        images: Iterable[ImageLike] | AsyncIterable[ImageLike],
        batch_size: int = 1,
        **options: Unpack[Options],
    ) -> AsyncIterator[ResultOrError[Result]]:
        """Return the outcomes of a stream of images, several at a time; see `Classifier.classify_many`.

        Outcomes do not wait for the next image of an asynchronous iterable. The event loop reads any other
        iterable.
        """
        self._requests.check(batch_size, options)
        return self._outcomes(images, batch_size, options)

    async def _outcomes(
        self, images: Iterable[ImageLike] | AsyncIterable[ImageLike], batch_size: int, options: Options
    ) -> AsyncIterator[ResultOrError[Result]]:
        # Unbounded: the final None must fit even if the reader has gone.
        started: asyncio.Queue[asyncio.Task[list[ResultOrError[Result]]] | None] = asyncio.Queue()
        ahead = asyncio.Semaphore(2 * self._concurrency)
        running: set[asyncio.Task[Any]] = set()
        slots = asyncio.Semaphore(self._concurrency)

        async def infer(batch: list[ImageLike], names: list[str]) -> list[ResultOrError[Result]]:
            async with slots:
                return await self._infer_batch(batch, names, options)

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

    async def _infer_batch(
        self, images: list[ImageLike], names: list[str], options: Options
    ) -> list[ResultOrError[Result]]:
        request = self._requests.start(options)
        encoded = [await in_thread(encode_or_error, image) for image in images]
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


async def in_thread(encode: Callable[[ImageLike], Encoded], image: ImageLike) -> Encoded | bytes:
    """Encode an image; only bytes are not encoded in a thread."""
    # Reading a file and encoding pixels would block the loop.
    return image if isinstance(image, bytes) else await asyncio.to_thread(encode, image)
