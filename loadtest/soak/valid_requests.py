"""Requests that need a correct response: over every transport, single and in batches, small and large."""

import asyncio
import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any, Literal

from loadtest.soak.traffic import Kind, Target
from loadtest.swap import References
from nereid.client.async_classifier import AsyncClassifier
from nereid.client.classifier import Classifier
from nereid.client.classifier_errors import RequestRefused
from nereid.client.prediction import Label, Prediction, Timings
from nereid.client.request import ProtocolName
from nereid.tune import photos

SMALL, LARGE = photos.SIZES_WH
NOT_AN_IMAGE = b"this is not an image"
JPEG = {"Content-Type": "image/jpeg"}
# Parallel requests of an asyncio caller, and the place of the invalid image in a batch.
TOGETHER, BAD_PLACE = 3, 3
TIMEOUT_S = 30.0

Headers = Mapping[str, str]
Memory = Literal["system"]
AsyncClient = tuple[asyncio.Runner, AsyncClassifier]


class Photo:
    """A photo, and the expected scores of each version."""

    def __init__(self, file: bytes, references: References) -> None:
        self.file, self.references = file, references

    def fault(self, prediction: Prediction) -> str:
        """Return the fault of a response, empty for a correct one."""
        return self.references.check(prediction)


def kinds(known: Mapping[str, Photo]) -> list[Kind]:
    """Return all kinds, together about 30 images per second."""
    small, large = known[SMALL], known[LARGE]
    http, grpc = partial(opened, "http"), partial(opened, "grpc")
    return [
        Kind("HTTP, small", 3, http, partial(classify, small)),
        Kind("HTTP, large", 1, http, partial(classify, large)),
        Kind("gRPC, small", 3, grpc, partial(classify, small)),
        Kind("gRPC, large", 1, grpc, partial(classify, large)),
        Kind("gRPC, small, a key", 1, grpc, partial(classify, small, route_key="alice")),
        Kind("HTTP, small, a version", 1, http, partial(classify, small, version="2")),
        Kind("shared memory, HTTP, large", 1, partial(http, memory="system"), partial(classify, large)),
        Kind("shared memory, gRPC, large", 2, partial(grpc, memory="system"), partial(classify, large)),
        Kind("asyncio, HTTP, small, three in parallel", 1, _async("http"), partial(classify_parallel, small)),
        Kind(
            "asyncio, gRPC, large, three in parallel", 0.5, _async("grpc"), partial(classify_parallel, large)
        ),
        Kind(
            "asyncio, shared memory, three in parallel",
            0.5,
            _async("grpc", memory="system"),
            partial(classify_parallel, large),
        ),
        Kind("batch of 8 with a bad image, HTTP", 0.25, http, partial(classify_batch, small)),
        Kind("batch of 8 with a bad image, gRPC", 0.25, grpc, partial(classify_batch, small)),
        Kind("opened anew, gRPC, shared memory", 0.5, addressed, partial(classify_anew, "grpc", large)),
        Kind("opened anew, HTTP, shared memory", 0.5, addressed, partial(classify_anew, "http", small)),
        Kind("gateway, small", 3, gateway, partial(post_image, small)),
        Kind("gateway, large", 1, gateway, partial(post_image, large)),
        Kind("gateway, batch of 4", 0.5, gateway, partial(post_batch, small)),
    ]


def opened(
    protocol: ProtocolName, target: Target, memory: Memory | None = None
) -> AbstractContextManager[Classifier]:
    """Open a classifier."""
    return Classifier(target.url(protocol), protocol, shared_memory=memory)


@contextmanager
def opened_async(
    protocol: ProtocolName, target: Target, memory: Memory | None = None
) -> Iterator[AsyncClient]:
    """Open a classifier for asyncio; gives it with the runner of its event loop."""
    with asyncio.Runner() as runner:
        classifier = AsyncClassifier(target.url(protocol), protocol, shared_memory=memory)
        try:
            yield runner, classifier
        finally:
            runner.run(classifier.close())


_async = partial(partial, opened_async)


@contextmanager
def addressed(target: Target) -> Iterator[Target]:
    """Open nothing; each request opens its own connection."""
    yield target


def connected(address: str) -> AbstractContextManager[http.client.HTTPConnection]:
    """Open a lazy connection to HOST:PORT for the duration of the context."""
    return closing(http.client.HTTPConnection(address, timeout=TIMEOUT_S))


def gateway(target: Target) -> AbstractContextManager[http.client.HTTPConnection]:
    """Open a connection to the gateway."""
    return connected(target.gateway)


def classify(photo: Photo, classifier: Classifier, route_key: str = "", version: str = "") -> str:
    """Classify once; a route key or a version must decide the response."""
    options: Any = {"version": version} if version else {"route_key": route_key}
    prediction = classifier.classify(photo.file, **options)
    if route_key and prediction.reason != "route-key":
        return f"expected the reason route-key, got {prediction.reason}"
    if version and prediction.version != version:
        return f"expected version {version}, got {prediction.version}"
    return photo.fault(prediction)


def classify_anew(protocol: ProtocolName, photo: Photo, target: Target) -> str:
    """Open a connection with shared memory, classify once, and close it."""
    with opened(protocol, target, "system") as classifier:
        return photo.fault(classifier.classify(photo.file))


def classify_parallel(photo: Photo, client: AsyncClient) -> str:
    """Send parallel requests from asyncio."""
    runner, classifier = client

    async def send() -> str:
        found = await asyncio.gather(*(classifier.classify(photo.file) for _ in range(TOGETHER)))
        return "; ".join(filter(None, map(photo.fault, found)))

    return runner.run(send())


def classify_batch(photo: Photo, classifier: Classifier) -> str:
    """Send several images, one of them invalid; only that one may be rejected."""
    files = [photo.file] * 8
    files[BAD_PLACE] = NOT_AN_IMAGE
    outcomes = classifier.classify_many(files, batch_size=4)
    faults = (outcome_fault(place, one, photo) for place, one in enumerate(outcomes))
    return "; ".join(filter(None, faults))


def outcome_fault(place: int, outcome: Prediction | Exception, photo: Photo) -> str:
    """Return the fault of one outcome in a batch, empty for a correct one."""
    if place == BAD_PLACE:
        is_rejected = type(outcome) is RequestRefused
        return "" if is_rejected else f"image {place}: expected a rejection, got {outcome}"
    if isinstance(outcome, Exception):
        return f"image {place}: {type(outcome).__name__}: {outcome}"
    return photo.fault(outcome)


def post(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: Headers
) -> tuple[int, dict[str, Any]]:
    """Send a POST over a kept connection; returns status and document."""
    connection.request("POST", path, body, dict(headers))
    with connection.getresponse() as response:
        return response.status, json.loads(response.read())


def post_image(photo: Photo, connection: http.client.HTTPConnection) -> str:
    """Send a single image to the gateway."""
    status, document = post(connection, "/predict", photo.file, JPEG)
    is_ok = status == http.HTTPStatus.OK
    return photo.fault(as_prediction(document)) if is_ok else f"{status} {document}"


def post_batch(photo: Photo, connection: http.client.HTTPConnection) -> str:
    """Send several images to the gateway in one request."""
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%s\r\n' % photo.file
    body, headers = part * 4 + b"--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}
    status, document = post(connection, "/v1/classify", body, headers)
    found = document.get("results", [])
    if status != http.HTTPStatus.OK or len(found) != 4 or any("error" in each for each in found):
        return f"{status} {document}"
    return "; ".join(filter(None, (photo.fault(as_prediction(each)) for each in found)))


def as_prediction(document: Mapping[str, Any]) -> Prediction:
    """Convert a response of the gateway to a prediction."""
    labels = tuple(Label(each["index"], each["label"], each["score"]) for each in document["predictions"])
    model, version, variant, reason = (document[name] for name in ("model", "version", "variant", "reason"))
    return Prediction(labels, model, version, variant, reason, "", Timings(0, 0))
