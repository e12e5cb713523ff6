"""Classify images on a Triton server: one interface, whatever carries the request."""

import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
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
from nereid.contract import SCORES


class Classifier:
    """A connection to one model of one server; safe to use from several threads.

    A request is repeated only after a fault that is safe to repeat (docs/clients.md), within its time and a
    budget that all requests share.

    Args:
        url: HOST:PORT of the server, without a scheme.
        protocol: `grpc` or `http`.
        model: a route, or any model with an input `image` and an output `scores`.
        timeout_s: how long an answer may take, all attempts together.
        concurrency: how many requests `classify_many` keeps in flight, so that the server can batch them.
        shared_memory: `system` hands images over in this machine's memory, `cuda` in that of its first GPU;
            for `nereid serve --allow-shm`. Close the classifier, which takes its regions away again.

    Raises:
        ValueError: one of these cannot be meant.
        NoCuda: there is no GPU, or no library for it.

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
    ) -> None:
        check_arguments(url, protocol, concurrency, shared_memory)
        self.model = model
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._limit = NO_LIMIT
        self._owner, self._pool = os.getpid(), ThreadPoolExecutor(concurrency)
        self._connection = transport.connect(url, protocol)
        regions = Regions(shared_memory, url, protocol) if shared_memory else None
        self._requests = ModelRequests(protocol, model, regions)
        # Also when the process ends, and nobody has closed it.
        self._finalizer = weakref.finalize(self, regions.close) if regions else None

    def __enter__(self) -> "Classifier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error:
            self._connection.close()  # nobody wants what is in flight
        self.close()

    def close(self) -> None:
        """Wait for what `classify_many` has in flight, then close all connections."""
        self._pool_of_this_process().shutdown(cancel_futures=True)
        if self._finalizer:
            self._finalizer()
        self._connection.close()

    def classify(self, image: ImageLike, **options: Unpack[Options]) -> Prediction:
        """Classify one image.

        Args:
            image: an image file (its bytes, its path, or opened for reading bytes), a PIL image, or
                uint8[H, W, 3] (RGB) or uint8[H, W]; the server decodes it.
            options: see `Options`.

        Raises:
            RequestRefused: not an image, or an unknown model, variant or version.
            ServerFailed: the server failed; its subclasses say how (docs/clients.md).
            ValueError: an option cannot be meant, or an array or a PIL image has a form that is not known.
            TypeError: `image` is none of the above.
            OSError: a file cannot be read, or what pixels are encoded to cannot be stored.
            RuntimeError: the classifier is closed.
        """
        began = time.perf_counter()
        checked = check_options(options, self._timeout_s)
        attempts = self._requests.attempts(checked)
        file = encode(image)
        encode_s = time.perf_counter() - began
        result = self._request(checked, attempts, [file])
        request_s = time.perf_counter() - began - encode_s
        timings = Timings.of(encode_s, request_s, attempts.count)
        return prediction.read(result, self.model, checked.request_id, timings)[0]

    def scores(self, image: ImageLike, **options: Unpack[Options]) -> np.ndarray:
        """Return the scores of all classes as the model gives them, float32[C]; else as `classify`."""
        checked = check_options(options, self._timeout_s, is_for_scores=True)
        attempts = self._requests.attempts(checked)
        scores: np.ndarray = self._request(checked, attempts, [encode(image)]).as_numpy(SCORES)[0]
        return scores

    def classify_many(
        self, images: Iterable[ImageLike], batch_size: int = 1, **options: Unpack[Options]
    ) -> Iterator[Outcome]:
        """Classify images as they come, several at a time.

        Args:
            images: read a little ahead of the answers, on the caller's thread; what it raises comes after
                the outcomes of those that it gave.
            batch_size: how many images share a request; those that the server would not take together are
                sent apart.
            options: those of `classify`; `timeout_s` is for each request, with what of it is sent again.

        Returns:
            In the order of `images`, the prediction of each, or what `classify` would have raised: one bad
            image does not stop the rest.

        Raises:
            ValueError: an option cannot be meant.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        check_options(options, self._timeout_s)
        return self._outcomes(iter(images), batch_size, options)

    def _outcomes(self, images: Iterator[ImageLike], batch_size: int, options: Options) -> Iterator[Outcome]:
        waiting: deque[Future[list[Outcome]]] = deque()
        pool = self._pool_of_this_process()
        failure: Exception | None = None
        try:
            while True:
                # Twice as many as are in flight: enough to keep all threads busy, few enough to bound memory.
                while not failure and len(waiting) < 2 * self._concurrency:
                    group, failure = _group(images, batch_size)
                    if not group:
                        break
                    waiting.append(pool.submit(self._classify_group, group, options))
                if not waiting:
                    break
                yield from waiting.popleft().result()
            if failure:
                raise failure
        finally:
            for future in waiting:
                future.cancel()

    def _classify_group(self, images: list[ImageLike], options: Options) -> list[Outcome]:
        began = time.perf_counter()
        checked = check_options(options, self._timeout_s)
        attempts = self._requests.attempts(checked)
        group = BatchSplit([_encode_or_error(image) for image in images], self._limit)
        encode_s = time.perf_counter() - began
        while files := group.next_request():
            try:
                result = self._request(checked, attempts, files)
                request_s = time.perf_counter() - began - encode_s
                timings = Timings.of(encode_s, request_s, attempts.count)
                predictions = prediction.read(result, self.model, checked.request_id, timings)
            except (ClassifierError, OSError) as error:  # such as memory for it that is full
                group.failed(error)
            else:
                group.succeeded(predictions)
        self._limit = min(self._limit, group.limit)
        return group.outcomes()

    def _pool_of_this_process(self) -> ThreadPoolExecutor:
        if os.getpid() != self._owner:  # a fork has none of the threads
            self._owner, self._pool = os.getpid(), ThreadPoolExecutor(self._concurrency)
        return self._pool

    def _request(self, checked: CheckedOptions, attempts: Attempts, files: list[bytes]) -> Any:
        return transport.run(self._connection, self._requests.send(checked, attempts, files))


def _group(images: Iterator[ImageLike], size: int) -> tuple[list[ImageLike], Exception | None]:
    group: list[ImageLike] = []
    try:
        group.extend(islice(images, size))
    except Exception as error:
        return group, error
    return group, None


def _encode_or_error(image: ImageLike) -> bytes | Unusable:
    try:
        return encode(image)
    except (OSError, TypeError, ValueError) as error:
        return error
