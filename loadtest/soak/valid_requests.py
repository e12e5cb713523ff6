"""Requests that need a correct response: over every transport, single and in batches, small and large."""

import asyncio
import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any, Literal

from loadtest.soak.traffic import Kind, Send, Target
from loadtest.swap import References
from nereid.client.async_classifier import AsyncClassifier
from nereid.client.classifier import Classifier
from nereid.client.errors import RequestRefused
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
    return [
        Kind("HTTP, small", 3, partial(single, "http", small)),
        Kind("HTTP, large", 1, partial(single, "http", large)),
        Kind("gRPC, small", 3, partial(single, "grpc", small)),
        Kind("gRPC, large", 1, partial(single, "grpc", large)),
        Kind("gRPC, small, a key", 1, partial(single, "grpc", small, route_key="alice")),
        Kind("HTTP, small, a version", 1, partial(of_version, "http", small, "2")),
        Kind("shared memory, HTTP, large", 1, partial(single, "http", large, memory="system")),
        Kind("shared memory, gRPC, large", 2, partial(single, "grpc", large, memory="system")),
        Kind("asyncio, HTTP, small, three in parallel", 1, partial(gathered, "http", small)),
        Kind("asyncio, gRPC, large, three in parallel", 0.5, partial(gathered, "grpc", large)),
        Kind(
            "asyncio, shared memory, three in parallel",
            0.5,
            partial(gathered, "grpc", large, memory="system"),
        ),
        Kind("batch of 8 with a bad image, HTTP", 0.25, partial(batch, "http", small)),
        Kind("batch of 8 with a bad image, gRPC", 0.25, partial(batch, "grpc", small)),
        Kind("opened anew, gRPC, shared memory", 0.5, partial(anew, "grpc", large)),
        Kind("opened anew, HTTP, shared memory", 0.5, partial(anew, "http", small)),
        Kind("gateway, small", 3, partial(through_gateway, small)),
        Kind("gateway, large", 1, partial(through_gateway, large)),
        Kind("gateway, batch of 4", 0.5, partial(batch_through_gateway, small)),
    ]


@contextmanager
def single(
    protocol: ProtocolName,
    photo: Photo,
    target: Target,
    memory: Memory | None = None,
    route_key: str = "",
) -> Iterator[Send]:
    """Send requests over one connection; with a route key, the key must decide the variant."""
    with Classifier(target.url(protocol), protocol, shared_memory=memory) as classifier:

        def send() -> str:
            prediction = classifier.classify(photo.file, route_key=route_key)
            is_kept = not route_key or prediction.reason == "route-key"
            return (
                photo.fault(prediction)
                if is_kept
                else f"expected the reason route-key, got {prediction.reason}"
            )

        yield send


@contextmanager
def of_version(protocol: ProtocolName, photo: Photo, version: str, target: Target) -> Iterator[Send]:
    """Request a version; the response of any other version is wrong."""
    with Classifier(target.url(protocol), protocol) as classifier:

        def send() -> str:
            prediction = classifier.classify(photo.file, version=version)
            is_it = prediction.version == version
            return (
                photo.fault(prediction) if is_it else f"expected version {version}, got {prediction.version}"
            )

        yield send


@contextmanager
def anew(protocol: ProtocolName, photo: Photo, target: Target) -> Iterator[Send]:
    """Open a connection with shared memory for each request, and close it."""

    def send() -> str:
        with Classifier(target.url(protocol), protocol, shared_memory="system") as classifier:
            return photo.fault(classifier.classify(photo.file))

    yield send


@contextmanager
def gathered(
    protocol: ProtocolName, photo: Photo, target: Target, memory: Memory | None = None
) -> Iterator[Send]:
    """Send parallel requests from asyncio."""
    with opened_async(target, protocol, memory) as (runner, classifier):

        async def send() -> str:
            found = await asyncio.gather(*(classifier.classify(photo.file) for _ in range(TOGETHER)))
            return "; ".join(filter(None, map(photo.fault, found)))

        yield lambda: runner.run(send())


@contextmanager
def opened_async(
    target: Target, protocol: ProtocolName, memory: Memory | None = None
) -> Iterator[tuple[asyncio.Runner, AsyncClassifier]]:
    """Open a classifier for asyncio; gives it with the runner of its event loop."""
    with asyncio.Runner() as runner:
        classifier = AsyncClassifier(target.url(protocol), protocol, shared_memory=memory)
        try:
            yield runner, classifier
        finally:
            runner.run(classifier.close())


@contextmanager
def batch(protocol: ProtocolName, photo: Photo, target: Target) -> Iterator[Send]:
    """Send several images, one of them invalid; only that one may be rejected."""
    files = [photo.file] * 8
    files[BAD_PLACE] = NOT_AN_IMAGE
    with Classifier(target.url(protocol), protocol) as classifier:

        def send() -> str:
            outcomes = classifier.classify_many(files, batch_size=4)
            return "; ".join(
                filter(None, (outcome_fault(place, one, photo) for place, one in enumerate(outcomes)))
            )

        yield send


def outcome_fault(place: int, outcome: Prediction | Exception, photo: Photo) -> str:
    """Return the fault of one outcome in a batch, empty for a correct one."""
    if place == BAD_PLACE:
        return (
            "" if type(outcome) is RequestRefused else f"image {place}: expected a rejection, got {outcome}"
        )
    if isinstance(outcome, Exception):
        return f"image {place}: {type(outcome).__name__}: {outcome}"
    return photo.fault(outcome)


def connected(address: str) -> AbstractContextManager[http.client.HTTPConnection]:
    """Open a lazy connection to HOST:PORT for the duration of the context."""
    return closing(http.client.HTTPConnection(address, timeout=TIMEOUT_S))


def post(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: Headers
) -> tuple[int, dict[str, Any]]:
    """Send a POST over a kept connection; returns status and document."""
    connection.request("POST", path, body, dict(headers))
    with connection.getresponse() as response:
        return response.status, json.loads(response.read())


@contextmanager
def through_gateway(photo: Photo, target: Target) -> Iterator[Send]:
    """Send single images to the gateway."""
    with connected(target.gateway) as connection:

        def send() -> str:
            status, document = post(connection, "/predict", photo.file, JPEG)
            return (
                photo.fault(as_prediction(document))
                if status == http.HTTPStatus.OK
                else f"{status} {document}"
            )

        yield send


@contextmanager
def batch_through_gateway(photo: Photo, target: Target) -> Iterator[Send]:
    """Send several images to the gateway in one request."""
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%s\r\n' % photo.file
    body, headers = part * 4 + b"--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}
    with connected(target.gateway) as connection:

        def send() -> str:
            status, document = post(connection, "/v1/classify", body, headers)
            found = document.get("results", [])
            if status != http.HTTPStatus.OK or len(found) != 4 or any("error" in each for each in found):
                return f"{status} {document}"
            return "; ".join(filter(None, (photo.fault(as_prediction(each)) for each in found)))

        yield send


def as_prediction(document: Mapping[str, Any]) -> Prediction:
    """Convert a response of the gateway to a prediction."""
    labels = tuple(Label(each["index"], each["label"], each["score"]) for each in document["predictions"])
    model, version, variant, reason = (document[name] for name in ("model", "version", "variant", "reason"))
    return Prediction(labels, model, version, variant, reason, "", Timings(0, 0))
