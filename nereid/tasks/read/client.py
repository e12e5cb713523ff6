"""Text recognition on a Triton server, blocking and asyncio."""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Unpack

from nereid.client.base_client import ResultOrError
from nereid.client.images import ImageLike
from nereid.client.model_client import AsyncModelClient, ImageStream, ModelClient
from nereid.client.request import RequestOptions
from nereid.tasks.read.result import READINGS, Reading


class Reader(ModelClient[Reading]):
    """A connection to one model that reads text; arguments, retries and errors as for `Classifier`.

    Args:
        model: a route, or any model with an input `image` and the outputs `text`, `confidence` and `box`;
            default `read_text`.

    Example:
        >>> with Reader("localhost:8001") as reader:
        ...     reader.read("label.jpg").lines[12].text
        'RB 123 456 785 GB'
    """

    kind = READINGS

    def read(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Reading:
        """Read the text of one image; arguments and errors as for `Classifier.classify`."""
        return self.infer(image, **options)

    def read_many(
        self, images: Iterable[ImageLike], **options: Unpack[RequestOptions]
    ) -> Iterator[ResultOrError[Reading]]:
        """Read the text of a stream of images, several at a time; see `Classifier.classify_many`.

        Each image is sent in its own request, because the number of lines differs between images.
        """
        return self.infer_many(images, **options)


class AsyncReader(AsyncModelClient[Reading]):
    """`Reader` for asyncio, with the same arguments, results and errors."""

    kind = READINGS

    async def read(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Reading:
        """Read the text of one image; see `Reader.read`."""
        return await self.infer(image, **options)

    def read_many(
        self, images: ImageStream, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[ResultOrError[Reading]]:
        """Read the text of a stream of images; see `Reader.read_many`."""
        return self.infer_many(images, **options)
