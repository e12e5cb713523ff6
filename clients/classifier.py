"""Classify images on a Triton server: one interface, HTTP or gRPC behind it."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

Protocol = Literal["grpc", "http"]
DEFAULT_PORTS: dict[Protocol, int] = {"http": 8000, "grpc": 8001}
# The statuses that say the request itself was at fault, as each protocol spells them.
REFUSED = ("400", "404", "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")
SCORES, VARIANT, VERSION, REASON = "scores", "variant", "version", "route_reason"


class ClassifierError(Exception):
    """Base of what `Classifier` raises; the message is the server's own."""


class RequestRefused(ClassifierError):
    """The request was at fault: the same one will be refused again."""


class ServerFailed(ClassifierError):
    """The server was at fault, or could not be reached in time."""


@dataclass(frozen=True, slots=True)
class Label:
    """One class and its score, a probability in 0..1."""

    index: int
    name: str
    score: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The best classes of one image, and who answered.

    `version` is that of the network behind a route, else that of the model called; `variant` and `reason`
    are empty for a model that is no route. `latency_ms` is what the caller waited.
    """

    labels: tuple[Label, ...]
    model: str
    version: str
    variant: str
    reason: str
    latency_ms: float


class Classifier:
    """A connection to one model of one server; safe to use from several threads.

    Args:
        url: HOST:PORT of the server, without a scheme.
        protocol: `grpc` or `http`.
        model: a route, or any model with an input `image` and an output `scores`.
        timeout_s: how long one request may take.
        concurrency: how many requests `classify_many` keeps in flight, so that the server can batch them.

    Example:
        >>> with Classifier("localhost:8001") as classifier:
        ...     classifier.classify(Path("cat.jpg")).labels[0].name
        'tabby'
    """

    def __init__(
        self,
        url: str,
        protocol: Protocol = "grpc",
        model: str = "classify",
        timeout_s: float = 30.0,
        concurrency: int = 8,
    ) -> None:
        self.model = model
        self._url = url
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._pool = ThreadPoolExecutor(concurrency)
        self._grpc = tritonclient.grpc.InferenceServerClient(url) if protocol == "grpc" else None
        self._per_thread = threading.local()
        self._opened: list[Any] = [self._grpc] if self._grpc else []
        self._output_names: set[str] | None = None

    def __enter__(self) -> "Classifier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is in flight, then close all connections."""
        self._pool.shutdown()
        for client in self._opened:
            client.close()

    def classify(
        self, image: bytes | Path, top_k: int = 5, variant: str = "", version: str = "", route_key: str = ""
    ) -> Prediction:
        """Classify one image file.

        Args:
            image: the file's bytes, or its path; the server decodes it.
            top_k: how many classes to return.
            variant: let this variant of the route answer.
            version: let the variant with this version of the network answer.
            route_key: sticky identity: the same key gets the same variant.

        Raises:
            RequestRefused: not an image, or an unknown model, variant or version.
            ServerFailed: the server failed, cannot be reached, or answers something else than Triton does.
            ValueError: `top_k` is less than 1, or a header is no printable ASCII.
            OSError: `image` is a path that cannot be read.
        """
        encoded = image.read_bytes() if isinstance(image, Path) else image
        given = {"x-variant": variant, "x-model-version": version, "x-route-key": route_key}
        headers = {name: value for name, value in given.items() if value}
        _check(top_k, headers)
        begin = time.perf_counter()
        try:
            result = self._infer(encoded, top_k, headers)
            return _prediction(result, self.model, (time.perf_counter() - begin) * 1e3)
        except ClassifierError:
            raise
        except InferenceServerException as error:
            raise _translate(error) from None
        except Exception as error:  # what a broken connection or a foreign server makes the transports raise
            raise ServerFailed(f"{self._url}: {type(error).__name__}: {error}") from None

    def classify_many(
        self, images: Iterable[bytes | Path], **options: Any
    ) -> Iterator[Prediction | ClassifierError | OSError]:
        """Classify images as they come, several at a time.

        `options` are those of `classify`. Yields, in the order of `images`, the prediction or the error of
        each: one bad image does not stop the rest.
        """

        def outcome(image: bytes | Path) -> Prediction | ClassifierError | OSError:
            try:
                return self.classify(image, **options)
            except (ClassifierError, OSError) as error:
                return error

        remaining = iter(images)
        # Twice as many as are in flight: enough to keep all threads busy, few enough to bound memory.
        first = islice(remaining, 2 * self._concurrency)
        waiting = deque(self._pool.submit(outcome, image) for image in first)
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(self._pool.submit(outcome, image) for image in islice(remaining, 1))

    def _infer(self, encoded: bytes, top_k: int, headers: dict[str, str]) -> Any:
        client = self._client()
        protocol = tritonclient.grpc if self._grpc else tritonclient.http
        tensor = protocol.InferInput("image", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[encoded]], dtype=object))
        outputs = [
            protocol.InferRequestedOutput(name, class_count=top_k if name == SCORES else 0)
            for name in sorted(self._outputs(client) & {SCORES, VARIANT, VERSION, REASON})
        ]
        options = {"client_timeout": self._timeout_s} if self._grpc else {}
        return client.infer(self.model, [tensor], outputs=outputs, headers=headers, **options)

    def _client(self) -> Any:
        if self._grpc:
            return self._grpc
        # The HTTP client is built on gevent, whose connections belong to the thread that made them.
        if not hasattr(self._per_thread, "client"):
            self._per_thread.client = tritonclient.http.InferenceServerClient(
                self._url, connection_timeout=self._timeout_s, network_timeout=self._timeout_s
            )
            self._opened.append(self._per_thread.client)
        return self._per_thread.client

    def _outputs(self, client: Any) -> set[str]:
        if self._output_names is None:
            options = {"as_json": True, "client_timeout": self._timeout_s} if self._grpc else {}
            metadata = client.get_model_metadata(self.model, **options)
            self._output_names = {output["name"] for output in metadata["outputs"]}
        if SCORES not in self._output_names:
            names = ", ".join(sorted(self._output_names))
            raise RequestRefused(f"model '{self.model}' has no output '{SCORES}', it has: {names}")
        return self._output_names


def _check(top_k: int, headers: dict[str, str]) -> None:
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"{name} must be printable ASCII, got {value!r}")


def _prediction(result: Any, model: str, latency_ms: float) -> Prediction:
    def word(name: str) -> str:
        array = result.as_numpy(name)
        return "" if array is None else array.item().decode()

    response = result.get_response()
    own_version = response["model_version"] if isinstance(response, dict) else response.model_version
    labels = tuple(_label(entry.decode()) for entry in result.as_numpy(SCORES).ravel())
    return Prediction(labels, model, word(VERSION) or own_version, word(VARIANT), word(REASON), latency_ms)


def _label(entry: str) -> Label:
    """Read one entry of Triton's classification extension, `SCORE:INDEX:NAME`; the name may be missing."""
    score, index, *name = entry.split(":", 2)
    return Label(int(index), name[0] if name else "", float(score))


def _translate(error: InferenceServerException) -> ClassifierError:
    kind = RequestRefused if error.status() in REFUSED else ServerFailed
    return kind(error.message() or str(error))
