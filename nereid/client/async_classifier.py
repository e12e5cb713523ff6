"""Classification of images on a Triton server from asyncio."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Unpack

import numpy as np

from nereid.client import transport
from nereid.client.images import ImageLike, encode
from nereid.client.model_client.async_model_client import AsyncModelClient, in_thread
from nereid.client.model_client.batch_split import Outcome
from nereid.client.prediction import PREDICTIONS, Prediction
from nereid.client.request import CONCURRENCY, TIMEOUT_S, Options, ProtocolName
from nereid.client.shared_regions import Kind
from nereid.contract import SCORES


class AsyncClassifier(AsyncModelClient[Prediction]):
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
        super().__init__(PREDICTIONS, url, protocol, model, timeout_s, concurrency, shared_memory, api_key)

    async def classify(self, image: ImageLike, **options: Unpack[Options]) -> Prediction:
        """Classify one image; arguments and errors as `Classifier.classify`."""
        return await self.infer(image, **options)

    async def scores(self, image: ImageLike, **options: Unpack[Options]) -> np.ndarray:
        """Return the scores of all classes as the model returns them, float32[C]; arguments as `classify`."""
        request = self._requests.start(options, is_for_scores=True)
        encoded = await in_thread(encode, image)
        arrays = await transport.run_async(self._connection, request.arrays(encoded))
        scores: np.ndarray = arrays[SCORES][0]
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
        return self.infer_many(images, batch_size, **options)
