"""Requests to one model on one server, with retries and with shared memory."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic

import numpy as np

from nereid.client.classifier_errors import ClassifierError, Unreachable
from nereid.client.image_sender import ImageSender
from nereid.client.images import Unusable
from nereid.client.model_client.batch_split import BatchSplit
from nereid.client.prediction import Timings
from nereid.client.request import (
    NO_LIMIT,
    CheckedOptions,
    Options,
    ProtocolName,
    check_options,
)
from nereid.client.results.result_kind import Result, ResultKind
from nereid.client.retry import Attempts, Budget
from nereid.client.sans_io import Flow, Pause, Rpc
from nereid.client.shared_memory import Regions


class ModelRequests(Generic[Result]):
    """Sends the requests of a client; keeps the model's outputs, its batch limit and the retry budget.

    Args:
        protocol: protocol of the connection.
        model: name of the model.
        kind: the results that the model must have.
        timeout_s: default time limit of a request, in seconds.
        regions: shared memory for the images; None sends images in the request.
    """

    def __init__(
        self,
        protocol: ProtocolName,
        model: str,
        kind: ResultKind[Result],
        timeout_s: float,
        regions: Regions | None,
    ) -> None:
        self.model, self.kind = model, kind
        self.batch_limit = NO_LIMIT
        self._protocol = protocol
        self._timeout_s = timeout_s
        self.images = ImageSender(protocol, regions)
        self._budget = Budget()
        self._outputs: list[str] = []

    def check(self, batch_size: int, options: Options) -> None:
        """Check the arguments of `infer_many`.

        Raises:
            ValueError: an argument is invalid.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        check_options(options, self._timeout_s, known=self.kind.options)

    def start(self, options: Options, is_for_scores: bool = False) -> "ImageRequest[Result]":
        """Check the options of a request, and start its time limit.

        Raises:
            ValueError: an option is invalid.
        """
        began_s = time.perf_counter()
        checked = check_options(options, self._timeout_s, is_for_scores, self.kind.options)
        return ImageRequest(self, checked, Attempts(self._budget, checked.timeout_s), began_s)

    def send(self, checked: CheckedOptions, attempts: Attempts, files: list[bytes]) -> Flow[Any]:
        """Return tritonclient's result for images that share a request.

        Raises:
            ClassifierError: the error of the last attempt.
        """
        with self._budget.in_flight():
            while True:
                try:
                    result = yield from self._attempt(checked, attempts, files)
                except ClassifierError as error:
                    if isinstance(error, Unreachable):
                        self.images.reconnected()
                    if (pause_s := attempts.pause_s(error)) is None:
                        raise
                    yield Pause(pause_s)
                else:
                    attempts.succeeded()
                    return result

    def _attempt(self, checked: CheckedOptions, attempts: Attempts, files: list[bytes]) -> Flow[Any]:
        if not self._outputs:
            options = {"as_json": True} if self._protocol == "grpc" else {}
            metadata = yield Rpc("get_model_metadata", attempts.remaining_s(), (self.model,), options)
            self._outputs = self.kind.wanted_outputs(metadata)
        result = yield from self.images.infer(files, attempts, partial(self._infer, checked, attempts))
        if not self.kind.is_complete(result, len(files)):
            names = ", ".join(self.kind.outputs)
            raise Unreachable(f"the peer is not a Triton server: its response lacks {names} of all images")
        return result

    def _infer(self, checked: CheckedOptions, attempts: Attempts, tensor: Any) -> Rpc:
        remaining_s = attempts.remaining_s()
        arguments = checked.infer_arguments(self._protocol, tensor, self._outputs, remaining_s)
        return Rpc("infer", remaining_s, (self.model,), arguments)


class ImageRequest(Generic[Result]):
    """One request of a client, from the encoding of its images; its parts share the time limit."""

    def __init__(
        self, requests: ModelRequests[Result], checked: CheckedOptions, attempts: Attempts, began_s: float
    ) -> None:
        self._requests, self._checked, self._attempts = requests, checked, attempts
        self._began_s, self._encoded_s = began_s, 0.0

    def results(self, files: list[bytes]) -> Flow[list[Result]]:
        """Return the results of encoded images that share a request.

        Raises:
            ClassifierError: the error of the last attempt.
        """
        # The first part ends the encoding; further parts of a batch add to the time of the request.
        self._encoded_s = self._encoded_s or time.perf_counter()
        result = yield from self._requests.send(self._checked, self._attempts, files)
        encode_ms = round((self._encoded_s - self._began_s) * 1e3, 3)
        request_ms = round((time.perf_counter() - self._encoded_s) * 1e3, 3)
        timings = Timings(encode_ms, request_ms, self._attempts.count)
        return self._requests.kind.read(result, self._requests.model, self._checked.request_id, timings)

    def arrays(self, file: bytes) -> Flow[dict[str, np.ndarray]]:
        """Return the outputs for one encoded image, each [1, …], by name; errors as `results`."""
        result = yield from self._requests.send(self._checked, self._attempts, [file])
        return {name: result.as_numpy(name) for name in self._requests.kind.outputs}

    def outcomes(
        self, images: Sequence[bytes | Unusable], names: Sequence[str]
    ) -> Flow[list[Result | ClassifierError]]:
        """Return the outcome of each image, or of its failed encoding; split a batch that is rejected."""
        batch = BatchSplit[Result](images, names, self._requests.batch_limit)
        while files := batch.next_request():
            try:
                results = yield from self.results(files)
            except ClassifierError as error:
                batch.failed(error)
            else:
                batch.succeeded(results)
        self._requests.batch_limit = min(self._requests.batch_limit, batch.limit)
        return batch.outcomes()
