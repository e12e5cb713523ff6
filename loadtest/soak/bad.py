"""Requests that must be refused, each with its own error, and callers that leave: none may harm others."""

import asyncio
import http.client
import itertools
import json
import queue
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc

from loadtest.soak.good import JPEG, NOT_AN_IMAGE, Headers, Memory, asked, connected, opened_async
from loadtest.soak.traffic import Kind, Send, Target, compared, outcome, refusal
from nereid.assets import COFFEE
from nereid.client.classifier import Classifier
from nereid.client.errors import RequestRefused
from nereid.client.prediction import Prediction
from nereid.client.request import Options, ProtocolName

ROUTE = "classify"
INFER = f"/v2/models/{ROUTE}/infer"
RAW = {"Inference-Header-Content-Length": "0"}
GOOD = COFFEE.read_bytes()
TRUNCATED, TOO_LARGE = GOOD[:20_000], 32 * 2**20 + 1
# Less than a photo of 1080p takes, and a caller's patience with what should come at once.
TOO_SHORT_S, WATCHDOG_S = 0.004, 30.0
WAYS: tuple[tuple[ProtocolName, Memory | None], ...] = (
    ("http", None),
    ("grpc", None),
    ("http", "system"),
    ("grpc", "system"),
)
LATE = ("504 deadline_exceeded", "429 overloaded", "408 body_timeout")
INVALID = "InferenceServerException: [StatusCode.INVALID_ARGUMENT]"
# Datatype, shape, name of the input, and what Triton says of it.
TENSORS = (
    ("FP32", [1, 1], "image", "expects 'BYTES'"),
    ("BYTES", [1, 2], "image", "Expected [-1,1], got [1,2]"),
    ("BYTES", [1], "image", "Expected [-1,1], got [1]"),
    ("BYTES", [9, 1], "image", "batch-size must be <= 8"),
    ("BYTES", [1, 1], "picture", "unexpected inference input"),
)
# Path, body, headers, and the status and code of the gateway's answer.
ASKED_OF_GATEWAY: tuple[tuple[str, bytes, Headers, int, str], ...] = (
    ("/predict", NOT_AN_IMAGE, JPEG, 400, "invalid_image"),
    ("/predict", TRUNCATED, JPEG, 400, "invalid_image"),
    ("/predict", b"", JPEG, 400, "invalid_image"),
    ("/predict?variant=nobody", GOOD, JPEG, 400, "invalid_request"),
    ("/predict?colour=blue", GOOD, JPEG, 400, "invalid_request"),
    ("/predict", GOOD, {"Content-Type": "text/html"}, 415, "unsupported_media_type"),
    ("/predictions", GOOD, JPEG, 404, "not_found"),
)


def kinds(large: bytes) -> list[Kind]:
    """Return all kinds, together about ten requests a second; `large` is a photo of 1080p."""
    return [
        _refused("truncated JPEG", 0.5, TRUNCATED, "invalid image: "),
        _refused("text instead of an image", 0.5, NOT_AN_IMAGE, "invalid image: "),
        _refused("empty image", 0.5, b"", "invalid image: "),
        # What allocators keep of these is at its height only when each of many threads has met some.
        replace(
            _refused("image of more than 32 MiB", 0.1, bytes(TOO_LARGE), "invalid image: expected at most"),
            warming_per_s=1.0,
        ),
        _refused("unknown variant", 0.5, GOOD, "unknown x-variant", {"variant": "nobody"}),
        _refused("unknown version", 0.5, GOOD, "unknown x-model-version", {"version": "1000000"}),
        _refused("unknown model", 0.5, GOOD, "unknown model", model="nobody"),
        _bad("too little time", 1, partial(impatient, large)),
        _bad("wrong tensors, gRPC", 0.5, wrong_tensors),
        _bad("wrong tensors, HTTP", 0.5, wrong_documents),
        _bad("half a request, HTTP", 0.5, partial(left, "http", INFER, RAW, GOOD, share=0.5)),
        _bad("left before the answer, HTTP", 0.5, partial(left, "http", INFER, RAW, large)),
        _bad("cancelled, gRPC", 0.5, partial(cancelled, large)),
        _bad("cancelled, asyncio", 0.5, partial(cancelled_async, large)),
        _bad("no HTTP", 0.5, partial(noise, "http")),
        _bad("no gRPC", 0.5, partial(noise, "grpc")),
        _bad("gateway: bad requests", 1, refused_by_gateway),
        _bad("gateway: too little time", 0.5, partial(late_at_gateway, large)),
        _bad("gateway: more than 32 MiB", 0.5, too_large_for_gateway),
        _bad("gateway: half a request", 0.5, partial(left, "gateway", "/predict", JPEG, GOOD, share=0.5)),
        _bad("gateway: left before the answer", 0.5, partial(left, "gateway", "/predict", JPEG, large)),
    ]


_bad = partial(Kind, is_good=False)


def _refused(
    name: str, per_s: float, file: bytes, words: str, options: Options | None = None, model: str = ROUTE
) -> Kind:
    return _bad(name, per_s, partial(refused, file, words, options or {}, model))


@contextmanager
def refused(file: bytes, words: str, options: Options, model: str, target: Target) -> Iterator[Send]:
    """Ask over one transport after the other for what is refused with these words."""
    with _by_all_ways(target, model) as following:
        yield lambda: refusal(partial(following().classify, file, **options), RequestRefused, words)


@contextmanager
def impatient(file: bytes, target: Target) -> Iterator[Send]:
    """Wait for less time than an answer takes."""
    with _by_all_ways(target, ROUTE) as following:

        def send() -> str:
            came = outcome(partial(following().classify, file, timeout_s=TOO_SHORT_S))
            # A machine that is busy may have it answered before it looks at the clock.
            return "" if came.startswith("Prediction(") else compared(came, "TimedOut: ", "")

        yield send


@contextmanager
def _by_all_ways(target: Target, model: str) -> Iterator[Callable[[], Classifier]]:
    with ExitStack() as stack:
        classifiers = [
            stack.enter_context(Classifier(target.url(protocol), protocol, model, shared_memory=memory))
            for protocol, memory in WAYS
        ]
        yield partial(next, itertools.cycle(classifiers))


@contextmanager
def wrong_tensors(target: Target) -> Iterator[Send]:
    """Send what the model does not take, over gRPC."""
    following = itertools.cycle(TENSORS)
    with tritonclient.grpc.InferenceServerClient(target.grpc) as client:

        def send() -> str:
            datatype, shape, name, words = next(following)
            tensor = tritonclient.grpc.InferInput(name, shape, datatype)
            is_bytes = datatype == "BYTES"
            tensor.set_data_from_numpy(
                np.full(shape, b"a" if is_bytes else 1, object if is_bytes else np.float32)
            )
            return compared(outcome(lambda: client.infer(ROUTE, [tensor])), INVALID, words)

        yield send


@contextmanager
def wrong_documents(target: Target) -> Iterator[Send]:
    """Send what the model does not take, over HTTP."""
    following = itertools.cycle(TENSORS)
    with connected(target.http) as connection:

        def send() -> str:
            datatype, shape, name, words = next(following)
            data = ["a" if datatype == "BYTES" else 1] * int(np.prod(shape))
            entry = {"name": name, "datatype": datatype, "shape": shape, "data": data}
            body = json.dumps({"inputs": [entry]}).encode()
            status, document = asked(connection, INFER, body, {"Content-Type": "application/json"})
            return compared(f"{status} {document.get('error')}", "400 ", words)

        yield send


@contextmanager
def left(
    where: str, path: str, headers: Headers, body: bytes, target: Target, share: float = 1.0
) -> Iterator[Send]:
    """Send a request, or a share of its body, and break the connection."""

    def send() -> str:
        with _dialled(getattr(target, where)) as dialled:
            dialled.sendall(head(path, len(body), headers) + body[: int(len(body) * share)])
            # Closed without a farewell: what is in flight is lost.
            dialled.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return ""

    yield send


@contextmanager
def noise(protocol: ProtocolName, target: Target) -> Iterator[Send]:
    """Say what is no request; whatever is answered, no answer of a model is among it."""

    def send() -> str:
        with _dialled(target.url(protocol)) as dialled:
            dialled.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 what a strange client\r\n\r\n")
            dialled.shutdown(socket.SHUT_WR)
            answer = _all_of(dialled)
        return f"answered {answer[:80]!r}" if b"200 OK" in answer else ""

    yield send


@contextmanager
def cancelled(file: bytes, target: Target) -> Iterator[Send]:
    """Take back a request before its answer, over gRPC."""
    tensor = tritonclient.grpc.InferInput("image", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[file]], dtype=object))
    with tritonclient.grpc.InferenceServerClient(target.grpc) as client:

        def send() -> str:
            came: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
            client.async_infer(ROUTE, [tensor], lambda result, error: came.put((result, error))).cancel()
            result, error = came.get(timeout=WATCHDOG_S)
            # A machine that is busy may have it answered first.
            return "" if result else compared(f"{error}", "", "CANCELLED")

        yield send


@contextmanager
def cancelled_async(file: bytes, target: Target) -> Iterator[Send]:
    """Cancel the task that waits for an answer, now with shared memory and now without."""
    with (
        opened_async(target, "grpc") as (runner, plain),
        opened_async(target, "grpc", "system") as (other, shared),
    ):
        following = itertools.cycle([(runner, plain), (other, shared)])

        def send() -> str:
            runner, classifier = next(following)

            async def ask() -> str:
                asking = asyncio.create_task(classifier.classify(file))
                await asyncio.sleep(TOO_SHORT_S)
                asking.cancel()
                (result,) = await asyncio.gather(asking, return_exceptions=True)
                is_over = isinstance(result, (asyncio.CancelledError, Prediction))
                return "" if is_over else f"{type(result).__name__}: {result}"

            return runner.run(ask())

        yield send


@contextmanager
def refused_by_gateway(target: Target) -> Iterator[Send]:
    """Ask the gateway for one thing after the other that it refuses."""
    following = itertools.cycle(ASKED_OF_GATEWAY)
    with connected(target.gateway) as connection:

        def send() -> str:
            path, body, headers, status, code = next(following)
            return compared(_told(asked(connection, path, body, headers)), f"{status} {code}", "")

        yield send


@contextmanager
def late_at_gateway(file: bytes, target: Target) -> Iterator[Send]:
    """Give the gateway less time than an answer takes: it is late, be it with the body."""
    headers = {**JPEG, "X-Request-Timeout-Ms": f"{TOO_SHORT_S * 1e3:.0f}"}
    with connected(target.gateway) as connection:

        def send() -> str:
            told = _told(asked(connection, "/predict", file, headers))
            return "" if told in LATE else f"expected one of {LATE}, got '{told}'"

        yield send


@contextmanager
def too_large_for_gateway(target: Target) -> Iterator[Send]:
    """Announce a body of more than the gateway takes."""

    def send() -> str:
        with _dialled(target.gateway) as dialled:
            dialled.sendall(head("/predict", TOO_LARGE, JPEG))
            with http.client.HTTPResponse(dialled) as response:
                response.begin()
                return compared(_told((response.status, json.loads(response.read()))), "413 too_large", "")

    yield send


def head(path: str, body_bytes: int, headers: Headers) -> bytes:
    """Return the head of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {body_bytes}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "\r\n"]).encode()


def _told(answer: tuple[int, Mapping[str, Any]]) -> str:
    status, document = answer
    return f"{status} {document.get('error', {}).get('code', document)}"


def _dialled(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), WATCHDOG_S)


def _all_of(dialled: socket.socket) -> bytes:
    came = b""
    with suppress(ConnectionError):  # it was broken instead of closed
        while part := dialled.recv(2**16):
            came += part
    return came
