"""Reading of text on a Triton server, blocking and from asyncio."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Unpack

from nereid.client.images import ImageLike
from nereid.client.model_client.async_model_client import AsyncModelClient
from nereid.client.model_client.model_client import ModelClient, ResultOrError
from nereid.client.request import CONCURRENCY, TIMEOUT_S, ProtocolName, RequestOptions
from nereid.client.results.text_reading import READINGS, Reading
from nereid.client.shared_regions import Kind


class Reader(ModelClient[Reading]):
    """A connection to one model that reads text; arguments, retries and errors as of `Classifier`.

    Args:
        model: a route, or any model with an input `image` and the outputs `text`, `confidence` and `box`.

    Example:
        >>> with Reader("localhost:8001") as reader:
        ...     reader.read("label.jpg").lines[12].text
        'RB 123 456 785 GB'
    """

    def __init__(
        self,
        url: str,
        protocol: ProtocolName = "grpc",
        model: str = "read_text",
        timeout_s: float = TIMEOUT_S,
        concurrency: int = CONCURRENCY,
        shared_memory: Kind | None = None,
        api_key: str = "",
    ) -> None:
        super().__init__(READINGS, url, protocol, model, timeout_s, concurrency, shared_memory, api_key)

    def read(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Reading:
        """Read the text of one image; arguments and errors as `Classifier.classify`."""
        return self.infer(image, **options)

    def read_many(
        self, images: Iterable[ImageLike], **options: Unpack[RequestOptions]
    ) -> Iterator[ResultOrError[Reading]]:
        """Read the text of a stream of images, several at a time; see `Classifier.classify_many`.

        Each image has its own request, because images differ in their number of lines.
        """
        return self.infer_many(images, **options)


class AsyncReader(AsyncModelClient[Reading]):
    """`Reader` for asyncio: the same arguments, results and errors."""

    def __init__(
        self,
        url: str,
        protocol: ProtocolName = "grpc",
        model: str = "read_text",
        timeout_s: float = TIMEOUT_S,
        concurrency: int = CONCURRENCY,
        shared_memory: Kind | None = None,
        api_key: str = "",
    ) -> None:
        super().__init__(READINGS, url, protocol, model, timeout_s, concurrency, shared_memory, api_key)

    async def read(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Reading:
        """Read the text of one image; see `Reader.read`."""
        return await self.infer(image, **options)

    def read_many(
        self, images: Iterable[ImageLike] | AsyncIterable[ImageLike], **options: Unpack[RequestOptions]
    ) -> AsyncIterator[ResultOrError[Reading]]:
        """Read the text of a stream of images; see `Reader.read_many`."""
        return self.infer_many(images, **options)
