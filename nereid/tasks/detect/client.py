"""Object detection on a Triton server, blocking and asyncio."""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Unpack

from nereid.client.base_client import ResultOrError
from nereid.client.images import ImageLike
from nereid.client.model_client import AsyncModelClient, ImageStream, ModelClient
from nereid.client.request import RequestOptions
from nereid.tasks.detect.result import DETECTIONS, Detection


class Detector(ModelClient[Detection]):
    """A connection to one model that detects objects; arguments, retries and errors as for `Classifier`.

    Args:
        model: a route, or any model with an input `image` and the outputs `box`, `score` and `label`; default
            `detect`.

    Example:
        >>> with Detector("localhost:8001") as detector:
        ...     detector.detect("street.jpg").objects[0].label
        'car'
    """

    kind = DETECTIONS

    def detect(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Detection:
        """Detect the objects in one image; arguments and errors as for `Classifier.classify`."""
        return self.infer(image, **options)

    def detect_many(
        self, images: Iterable[ImageLike], **options: Unpack[RequestOptions]
    ) -> Iterator[ResultOrError[Detection]]:
        """Detect the objects in a stream of images, several at a time; see `Classifier.classify_many`.

        Each image is sent in its own request, because the number of objects differs between images.
        """
        return self.infer_many(images, **options)


class AsyncDetector(AsyncModelClient[Detection]):
    """`Detector` for asyncio, with the same arguments, results and errors."""

    kind = DETECTIONS

    async def detect(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Detection:
        """Detect the objects in one image; see `Detector.detect`."""
        return await self.infer(image, **options)

    def detect_many(
        self, images: ImageStream, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[ResultOrError[Detection]]:
        """Detect the objects in a stream of images; see `Detector.detect_many`."""
        return self.infer_many(images, **options)
