"""Classification of images on a Triton server: one interface for every transport."""

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Unpack

import numpy as np

from nereid.client import transport
from nereid.client.batch_split import Outcome
from nereid.client.images import ImageLike, encode, encode_or_error, name_of
from nereid.client.model_requests import ModelRequests
from nereid.client.prediction import Prediction
from nereid.client.request import CONCURRENCY, TIMEOUT_S, Options, ProtocolName, check_arguments, key_header
from nereid.client.shared_memory import Regions
from nereid.client.shared_regions import Kind


class Classifier:
    """A connection to one model of one server; safe to use from several threads.

    A classifier repeats a request only after a fault that is safe to repeat (docs/clients.md). Its
    retries end with the request's time limit, or with a budget that all requests share.

    Args:
        url: address of the server, HOST:PORT without a scheme.
        protocol: `grpc` or `http`.
        model: a route, or any model with an input `image` and an output `scores`.
        timeout_s: time limit of a request in seconds, all attempts together.
        concurrency: number of requests that `classify_many` keeps in flight, for the server to batch.
        shared_memory: `system` passes images in the memory of this machine, `cuda` in the memory of its first
            GPU; None sends them. The server needs `nereid serve --allow-shm`. `close` removes the regions.
        api_key: the key that a guarded server expects; "" for none.

    Raises:
        ValueError: an argument is invalid.
        NoCuda: the machine has no GPU, or a library is missing.

    Example:
        >>> with Classifier("localhost:8001") as classifier:
        ...     classifier.classify("cat.jpg").labels[0].name
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
        self._owner, self._pool = os.getpid(), ThreadPoolExecutor(concurrency)
        self._connection = transport.Connection(url, protocol, key_header(api_key))
        regions = Regions(shared_memory, url, protocol) if shared_memory else None
        self._requests = ModelRequests(protocol, model, timeout_s, regions)
        # Also at the end of the process, without `close`.
        self._finalizer = weakref.finalize(self, regions.close) if regions else None

    def __enter__(self) -> "Classifier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error:
            self._connection.close()  # the caller discards the requests in flight
        self.close()

    def close(self) -> None:
        """Wait for the requests of `classify_many` in flight, then close all connections."""
        self._pool_of_this_process().shutdown(cancel_futures=True)
        if self._finalizer:
            self._finalizer()
        self._connection.close()

    def classify(self, image: ImageLike, **options: Unpack[Options]) -> Prediction:
        """Classify one image.

        Args:
            image: an image file (its bytes, its path, or opened for reading bytes), a PIL image, or an array
                uint8[H, W, 3] (RGB) or uint8[H, W] (grey). The server decodes it.
            options: options of the request, see `Options`.

        Returns:
            The `top_k` best classes, best first, and the model that computed them.

        Raises:
            RequestRefused: not an image, or an unknown model, variant or version.
            ServerFailed: the server failed; the subclasses name the reason (docs/clients.md).
            ValueError: an option is invalid, or an array or a PIL image has an unknown form.
            TypeError: `image` has another type.
            OSError: a file cannot be read, or the encoded pixels cannot be stored.
            RuntimeError: the classifier is closed.
        """
        request = self._requests.start(options)
        return transport.run(self._connection, request.predictions([encode(image)]))[0]

    def scores(self, image: ImageLike, **options: Unpack[Options]) -> np.ndarray:
        """Return the scores of all classes as the model returns them, float32[C]; arguments as `classify`."""
        request = self._requests.start(options, is_for_scores=True)
        return transport.run(self._connection, request.scores(encode(image)))

    def classify_many(
        self, images: Iterable[ImageLike], batch_size: int = 1, **options: Unpack[Options]
    ) -> Iterator[Outcome]:
        """Classify a stream of images, several at a time.

        Args:
            images: read a little ahead of the outcomes, on the caller's thread. If the iterator raises, its
                error follows the outcomes of the images before it.
            batch_size: number of images that share a request; the classifier splits a batch that the server
                rejects.
            options: options of each request, as for `classify`; `timeout_s` includes the parts sent again.

        Returns:
            In the order of `images`, the prediction of each, or its error: `UnusableImage`, or that of
                `classify`. `outcome.image` names the image. A bad image does not stop the others.

        Raises:
            ValueError: an option is invalid.
        """
        self._requests.check(batch_size, options)
        return self._outcomes(iter(images), batch_size, options)

    def _outcomes(self, images: Iterator[ImageLike], batch_size: int, options: Options) -> Iterator[Outcome]:
        waiting: deque[Future[list[Outcome]]] = deque()
        pool = self._pool_of_this_process()
        failure: Exception | None = None
        position = 0
        try:
            while True:
                # Twice the requests in flight: enough to keep all threads busy, few enough to limit memory.
                while not failure and len(waiting) < 2 * self._concurrency:
                    batch, failure = _next_batch(images, batch_size)
                    if not batch:
                        break
                    names = [name_of(image, position + index) for index, image in enumerate(batch)]
                    position += len(batch)
                    waiting.append(pool.submit(self._classify_batch, batch, names, options))
                if not waiting:
                    break
                yield from waiting.popleft().result()
            if failure:
                raise failure
        finally:
            for future in waiting:
                future.cancel()

    def _classify_batch(self, images: list[ImageLike], names: list[str], options: Options) -> list[Outcome]:
        request = self._requests.start(options)
        encoded = [encode_or_error(image) for image in images]
        return transport.run(self._connection, request.outcomes(encoded, names))

    def _pool_of_this_process(self) -> ThreadPoolExecutor:
        if os.getpid() != self._owner:  # a fork has no threads of its parent
            self._owner, self._pool = os.getpid(), ThreadPoolExecutor(self._concurrency)
        return self._pool


def _next_batch(images: Iterator[ImageLike], size: int) -> tuple[list[ImageLike], Exception | None]:
    batch: list[ImageLike] = []
    try:
        batch.extend(islice(images, size))
    except Exception as error:
        return batch, error
    return batch, None
