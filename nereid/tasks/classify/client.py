"""Image classification on a Triton server, blocking and asyncio."""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Unpack, cast

import numpy as np

from nereid.base.contract import SCORES
from nereid.client.base_client import ResultOrError
from nereid.client.images import ImageLike
from nereid.client.model_client import AsyncModelClient, ImageStream, ModelClient
from nereid.client.request import Options, RequestOptions
from nereid.tasks.classify.result import PREDICTIONS, Prediction


class Classifier(ModelClient[Prediction]):
    """A connection to one model on one server; safe to use from several threads.

    A classifier retries only after a fault that makes it safe to send the request again (docs/clients.md).
    Retries are bounded by the request's time limit and by a budget shared by all requests.

    Args:
        url: server address, HOST:PORT without a scheme.
        protocol: `grpc` or `http`.
        model: a route, or any model with an input `image` and an output `scores`; default `classify`.
        timeout_s: time limit of a request in seconds, including all attempts.
        concurrency: number of requests that `classify_many` keeps in flight, so the server can batch them.
        shared_memory: `system` passes images through this machine's memory, `cuda` through its first GPU's;
            None sends them. The server needs `nereid serve --allow-shm`. While it refuses shared memory,
            images are sent and `shared_memory_refusal` holds the reason. `close` removes the regions.
        api_key: the key expected by a guarded server; "" for none.

    Raises:
        ValueError: an argument is invalid.
        NoCuda: the machine has no GPU, or a library is missing.

    Example:
        >>> with Classifier("localhost:8001") as classifier:
        ...     classifier.classify("cat.jpg").labels[0].name
        'tabby'
    """

    kind = PREDICTIONS

    def classify(self, image: ImageLike, **options: Unpack[Options]) -> Prediction:
        """Classify one image.

        Args:
            image: an image file (its bytes, its path, or opened for reading bytes), a PIL image, or an array
                uint8[H, W, 3] (RGB) or uint8[H, W] (grey). The server decodes it.
            options: request options, see `Options`.

        Returns:
            The `top_k` best classes, best first, and the model that computed them.

        Raises:
            RequestRefused: not an image, or an unknown model, variant or version.
            ServerFailed: the server failed; the subclasses give the reason (docs/clients.md).
            ValueError: an option is invalid, or an array or PIL image has an unsupported format.
            TypeError: `image` has another type.
            OSError: a file cannot be read, or the encoded pixels cannot be stored.
            RuntimeError: the classifier is closed.
        """
        return self.infer(image, **cast(RequestOptions, options))

    def scores(self, image: ImageLike, **options: Unpack[Options]) -> np.ndarray:
        """Return all classes' scores, float32[C], as the model returns them; arguments as for `classify`."""
        scores: np.ndarray = self.arrays(image, **cast(RequestOptions, options))[SCORES][0]
        return scores

    def classify_many(
        self, images: Iterable[ImageLike], batch_size: int = 1, **options: Unpack[Options]
    ) -> Iterator[ResultOrError[Prediction]]:
        """Classify a stream of images, several at a time.

        Args:
            images: read slightly ahead of the outcomes, on the caller's thread. If the iterator raises, its
                error follows the outcomes of the images before it.
            batch_size: number of images per request; the classifier splits a batch that the server rejects.
            options: options of each request, as for `classify`; `timeout_s` includes the parts sent again.

        Returns:
            In the order of `images`, each image's prediction or its error: `UnusableImage`, or one that
                `classify` raises. `outcome.image` names the image. A bad image does not stop the others.

        Raises:
            ValueError: an option is invalid.
        """
        return self.infer_many(images, batch_size, **cast(RequestOptions, options))


class AsyncClassifier(AsyncModelClient[Prediction]):
    """`Classifier` for asyncio, with the same arguments, predictions and errors.

    Over gRPC, cancelling a task also cancels its request on the server.

    Example:
        >>> async with AsyncClassifier("localhost:8001") as classifier:
        ...     (await classifier.classify("cat.jpg")).labels[0].name
        'tabby'
    """

    kind = PREDICTIONS

    async def classify(self, image: ImageLike, **options: Unpack[Options]) -> Prediction:
        """Classify one image; arguments and errors as for `Classifier.classify`."""
        return await self.infer(image, **cast(RequestOptions, options))

    async def scores(self, image: ImageLike, **options: Unpack[Options]) -> np.ndarray:
        """Return all classes' scores, float32[C], as the model returns them; arguments as for `classify`."""
        scores: np.ndarray = (await self.arrays(image, **cast(RequestOptions, options)))[SCORES][0]
        return scores

    def classify_many(
        self, images: ImageStream, batch_size: int = 1, **options: Unpack[Options]
    ) -> AsyncIterator[ResultOrError[Prediction]]:
        """Classify a stream of images, several at a time; see `Classifier.classify_many`.

        With an asynchronous iterable, outcomes do not wait for the next image. Any other iterable is read on
        the event loop.
        """
        return self.infer_many(images, batch_size, **cast(RequestOptions, options))
