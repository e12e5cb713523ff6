"""Requests that must be answered, and rightly: over every transport, alone and several, small and large."""

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
NOT_AN_IMAGE = b"this is no image"
JPEG = {"Content-Type": "image/jpeg"}
# Requests of an asyncio caller that are in flight together, and the place of what is bad in a batch.
TOGETHER, BAD_PLACE = 3, 3
TIMEOUT_S = 30.0

Headers = Mapping[str, str]
Memory = Literal["system"]


class Photo:
    """A photo, and what each version answers on it."""

    def __init__(self, file: bytes, references: References) -> None:
        self.file, self.references = file, references

    def wrong(self, prediction: Prediction) -> str:
        """Tell what is wrong with an answer, if anything."""
        return self.references.check(prediction)


def kinds(known: Mapping[str, Photo]) -> list[Kind]:
    """Return all kinds: together about 30 images a second."""
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
        Kind("asyncio, HTTP, small, three at once", 1, partial(gathered, "http", small)),
        Kind("asyncio, gRPC, large, three at once", 0.5, partial(gathered, "grpc", large)),
        Kind("asyncio, shared memory, three at once", 0.5, partial(gathered, "grpc", large, memory="system")),
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
    """Ask one after the other over one connection; with a key, every answer must have been chosen by it."""
    with Classifier(target.url(protocol), protocol, shared_memory=memory) as classifier:

        def send() -> str:
            prediction = classifier.classify(photo.file, route_key=route_key)
            is_kept = not route_key or prediction.reason == "route-key"
            return photo.wrong(prediction) if is_kept else f"asked with a key, got {prediction.reason}"

        yield send


@contextmanager
def of_version(protocol: ProtocolName, photo: Photo, version: str, target: Target) -> Iterator[Send]:
    """Ask for a version: an answer of another one is wrong, however right for that one."""
    with Classifier(target.url(protocol), protocol) as classifier:

        def send() -> str:
            prediction = classifier.classify(photo.file, version=version)
            is_it = prediction.version == version
            return photo.wrong(prediction) if is_it else f"asked for {version}, got {prediction.version}"

        yield send


@contextmanager
def anew(protocol: ProtocolName, photo: Photo, target: Target) -> Iterator[Send]:
    """Ask once over each connection, and leave its shared memory as a tidy caller does."""

    def send() -> str:
        with Classifier(target.url(protocol), protocol, shared_memory="system") as classifier:
            return photo.wrong(classifier.classify(photo.file))

    yield send


@contextmanager
def gathered(
    protocol: ProtocolName, photo: Photo, target: Target, memory: Memory | None = None
) -> Iterator[Send]:
    """Ask several times at once from asyncio."""
    with opened_async(target, protocol, memory) as (runner, classifier):

        async def ask() -> str:
            found = await asyncio.gather(*(classifier.classify(photo.file) for _ in range(TOGETHER)))
            return "; ".join(filter(None, map(photo.wrong, found)))

        yield lambda: runner.run(ask())


@contextmanager
def opened_async(
    target: Target, protocol: ProtocolName, memory: Memory | None = None
) -> Iterator[tuple[asyncio.Runner, AsyncClassifier]]:
    """Give a classifier for asyncio, and the loop that it belongs to."""
    with asyncio.Runner() as runner:
        classifier = AsyncClassifier(target.url(protocol), protocol, shared_memory=memory)
        try:
            yield runner, classifier
        finally:
            runner.run(classifier.close())


@contextmanager
def batch(protocol: ProtocolName, photo: Photo, target: Target) -> Iterator[Send]:
    """Ask for several images, of which one is bad: that one is refused, the others are answered."""
    files = [photo.file] * 8
    files[BAD_PLACE] = NOT_AN_IMAGE
    with Classifier(target.url(protocol), protocol) as classifier:

        def send() -> str:
            outcomes = classifier.classify_many(files, batch_size=4)
            return "; ".join(filter(None, (told(place, one, photo) for place, one in enumerate(outcomes))))

        yield send


def told(place: int, outcome: Prediction | Exception, photo: Photo) -> str:
    """Tell what is wrong with one outcome of a batch."""
    if place == BAD_PLACE:
        return "" if type(outcome) is RequestRefused else f"image {place}: expected a refusal, got {outcome}"
    if isinstance(outcome, Exception):
        return f"image {place}: {type(outcome).__name__}: {outcome}"
    return photo.wrong(outcome)


def connected(address: str) -> AbstractContextManager[http.client.HTTPConnection]:
    """Connect to HOST:PORT when it is first asked, for as long as the context lasts."""
    return closing(http.client.HTTPConnection(address, timeout=TIMEOUT_S))


def asked(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: Headers
) -> tuple[int, dict[str, Any]]:
    """Post something over a kept connection; returns status and document."""
    connection.request("POST", path, body, dict(headers))
    with connection.getresponse() as response:
        return response.status, json.loads(response.read())


@contextmanager
def through_gateway(photo: Photo, target: Target) -> Iterator[Send]:
    """Ask the gateway for one image after the other."""
    with connected(target.gateway) as connection:

        def send() -> str:
            status, answer = asked(connection, "/predict", photo.file, JPEG)
            return (
                photo.wrong(as_prediction(answer)) if status == http.HTTPStatus.OK else f"{status} {answer}"
            )

        yield send


@contextmanager
def batch_through_gateway(photo: Photo, target: Target) -> Iterator[Send]:
    """Ask the gateway for several images at once."""
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%s\r\n' % photo.file
    body, headers = part * 4 + b"--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}
    with connected(target.gateway) as connection:

        def send() -> str:
            status, answer = asked(connection, "/v1/classify", body, headers)
            found = answer.get("results", [])
            if status != http.HTTPStatus.OK or len(found) != 4 or any("error" in each for each in found):
                return f"{status} {answer}"
            return "; ".join(filter(None, (photo.wrong(as_prediction(each)) for each in found)))

        yield send


def as_prediction(answer: Mapping[str, Any]) -> Prediction:
    """Read what the gateway answers as what a classifier would."""
    labels = tuple(Label(each["index"], each["label"], each["score"]) for each in answer["predictions"])
    model, version, variant, reason = (answer[name] for name in ("model", "version", "variant", "reason"))
    return Prediction(labels, model, version, variant, reason, "", Timings(0, 0))
