"""Requests that must be rejected with their own errors, and callers that disconnect."""

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

from loadtest.soak.traffic import Kind, Send, Target, compared, outcome, rejection
from loadtest.soak.valid_requests import JPEG, NOT_AN_IMAGE, Headers, Memory, connected, opened_async, post
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
# Less time than a photo of 1080p needs, and the timeout of requests that are rejected immediately.
TOO_SHORT_S, WATCHDOG_S = 0.004, 30.0
WAYS: tuple[tuple[ProtocolName, Memory | None], ...] = (
    ("http", None),
    ("grpc", None),
    ("http", "system"),
    ("grpc", "system"),
)
LATE = ("504 deadline_exceeded", "429 overloaded", "408 body_timeout")
INVALID = "InferenceServerException: [StatusCode.INVALID_ARGUMENT]"
# Datatype, shape and name of the input, and Triton's error.
TENSORS = (
    ("FP32", [1, 1], "image", "expects 'BYTES'"),
    ("BYTES", [1, 2], "image", "Expected [-1,1], got [1,2]"),
    ("BYTES", [1], "image", "Expected [-1,1], got [1]"),
    ("BYTES", [9, 1], "image", "batch-size must be <= 8"),
    ("BYTES", [1, 1], "picture", "unexpected inference input"),
)
# Path, body, headers, and the status and code of the gateway's response.
GATEWAY_REQUESTS: tuple[tuple[str, bytes, Headers, int, str], ...] = (
    ("/predict", NOT_AN_IMAGE, JPEG, 400, "invalid_image"),
    ("/predict", TRUNCATED, JPEG, 400, "invalid_image"),
    ("/predict", b"", JPEG, 400, "invalid_image"),
    ("/predict?variant=nobody", GOOD, JPEG, 400, "invalid_request"),
    ("/predict?colour=blue", GOOD, JPEG, 400, "invalid_request"),
    ("/predict", GOOD, {"Content-Type": "text/html"}, 415, "unsupported_media_type"),
    ("/predictions", GOOD, JPEG, 404, "not_found"),
)


def kinds(large: bytes) -> list[Kind]:
    """Return all kinds, together about ten requests per second; `large` is a photo of 1080p."""
    return [
        _rejected("truncated JPEG", 0.5, TRUNCATED, "invalid image: "),
        _rejected("text instead of an image", 0.5, NOT_AN_IMAGE, "invalid image: "),
        _rejected("empty image", 0.5, b"", "invalid image: "),
        # The memory of allocators settles only after each of many threads has handled such an image.
        replace(
            _rejected("image of more than 32 MiB", 0.1, bytes(TOO_LARGE), "invalid image: expected at most"),
            warming_per_s=1.0,
        ),
        _rejected("unknown variant", 0.5, GOOD, "unknown x-variant", {"variant": "nobody"}),
        _rejected("unknown version", 0.5, GOOD, "unknown x-model-version", {"version": "1000000"}),
        _rejected("unknown model", 0.5, GOOD, "unknown model", model="nobody"),
        _bad("too little time", 1, partial(impatient, large)),
        _bad("wrong tensors, gRPC", 0.5, wrong_tensors),
        _bad("wrong tensors, HTTP", 0.5, wrong_documents),
        _bad("half a request, HTTP", 0.5, partial(cut_off, "http", INFER, RAW, GOOD, share=0.5)),
        _bad("left before the answer, HTTP", 0.5, partial(cut_off, "http", INFER, RAW, large)),
        _bad("cancelled, gRPC", 0.5, partial(cancelled, large)),
        _bad("cancelled, asyncio", 0.5, partial(cancelled_async, large)),
        _bad("no HTTP", 0.5, partial(noise, "http")),
        _bad("no gRPC", 0.5, partial(noise, "grpc")),
        _bad("gateway: bad requests", 1, rejected_by_gateway),
        _bad("gateway: too little time", 0.5, partial(late_at_gateway, large)),
        _bad("gateway: more than 32 MiB", 0.5, too_large_for_gateway),
        _bad(
            "gateway: half a request",
            0.5,
            partial(cut_off, "gateway", "/predict", JPEG, GOOD, share=0.5),
        ),
        _bad("gateway: left before the answer", 0.5, partial(cut_off, "gateway", "/predict", JPEG, large)),
    ]


_bad = partial(Kind, is_good=False)


def _rejected(
    name: str, per_s: float, file: bytes, words: str, options: Options | None = None, model: str = ROUTE
) -> Kind:
    return _bad(name, per_s, partial(rejected, file, words, options or {}, model))


@contextmanager
def rejected(file: bytes, words: str, options: Options, model: str, target: Target) -> Iterator[Send]:
    """Send a request that is rejected with these words, over each transport in turn."""
    with _by_all_ways(target, model) as following:
        yield lambda: rejection(partial(following().classify, file, **options), RequestRefused, words)


@contextmanager
def impatient(file: bytes, target: Target) -> Iterator[Send]:
    """Send requests with a timeout below the time of a response."""
    with _by_all_ways(target, ROUTE) as following:

        def send() -> str:
            got = outcome(partial(following().classify, file, timeout_s=TOO_SHORT_S))
            # A busy machine may respond before the timeout is checked.
            return "" if got.startswith("Prediction(") else compared(got, "TimedOut: ", "")

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
    """Send tensors that the model rejects, over gRPC."""
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
    """Send tensors that the model rejects, over HTTP."""
    following = itertools.cycle(TENSORS)
    with connected(target.http) as connection:

        def send() -> str:
            datatype, shape, name, words = next(following)
            data = ["a" if datatype == "BYTES" else 1] * int(np.prod(shape))
            entry = {"name": name, "datatype": datatype, "shape": shape, "data": data}
            body = json.dumps({"inputs": [entry]}).encode()
            status, document = post(connection, INFER, body, {"Content-Type": "application/json"})
            return compared(f"{status} {document.get('error')}", "400 ", words)

        yield send


@contextmanager
def cut_off(
    where: str, path: str, headers: Headers, body: bytes, target: Target, share: float = 1.0
) -> Iterator[Send]:
    """Send a request, or a share of its body, and break the connection."""

    def send() -> str:
        with _connect(getattr(target, where)) as connection:
            connection.sendall(head(path, len(body), headers) + body[: int(len(body) * share)])
            # A reset: data in flight is lost.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return ""

    yield send


@contextmanager
def noise(protocol: ProtocolName, target: Target) -> Iterator[Send]:
    """Send bytes that are not a request; no model may respond."""

    def send() -> str:
        with _connect(target.url(protocol)) as connection:
            connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not a request\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            received = _read_all(connection)
        return f"unexpected response {received[:80]!r}" if b"200 OK" in received else ""

    yield send


@contextmanager
def cancelled(file: bytes, target: Target) -> Iterator[Send]:
    """Cancel a request before its response, over gRPC."""
    tensor = tritonclient.grpc.InferInput("image", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[file]], dtype=object))
    with tritonclient.grpc.InferenceServerClient(target.grpc) as client:

        def send() -> str:
            responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
            client.async_infer(ROUTE, [tensor], lambda result, error: responses.put((result, error))).cancel()
            result, error = responses.get(timeout=WATCHDOG_S)
            # A busy machine may respond first.
            return "" if result else compared(f"{error}", "", "CANCELLED")

        yield send


@contextmanager
def cancelled_async(file: bytes, target: Target) -> Iterator[Send]:
    """Cancel the task of a request, alternately with shared memory and without."""
    with (
        opened_async(target, "grpc") as (runner, plain),
        opened_async(target, "grpc", "system") as (other, shared),
    ):
        following = itertools.cycle([(runner, plain), (other, shared)])

        def send() -> str:
            runner, classifier = next(following)

            async def cancel() -> str:
                request = asyncio.create_task(classifier.classify(file))
                await asyncio.sleep(TOO_SHORT_S)
                request.cancel()
                (result,) = await asyncio.gather(request, return_exceptions=True)
                is_over = isinstance(result, (asyncio.CancelledError, Prediction))
                return "" if is_over else f"{type(result).__name__}: {result}"

            return runner.run(cancel())

        yield send


@contextmanager
def rejected_by_gateway(target: Target) -> Iterator[Send]:
    """Send requests that the gateway rejects, in turn."""
    following = itertools.cycle(GATEWAY_REQUESTS)
    with connected(target.gateway) as connection:

        def send() -> str:
            path, body, headers, status, code = next(following)
            return compared(_code(post(connection, path, body, headers)), f"{status} {code}", "")

        yield send


@contextmanager
def late_at_gateway(file: bytes, target: Target) -> Iterator[Send]:
    """Send the gateway requests with a timeout below the time of a response."""
    headers = {**JPEG, "X-Request-Timeout-Ms": f"{TOO_SHORT_S * 1e3:.0f}"}
    with connected(target.gateway) as connection:

        def send() -> str:
            got = _code(post(connection, "/predict", file, headers))
            return "" if got in LATE else f"expected one of {LATE}, got '{got}'"

        yield send


@contextmanager
def too_large_for_gateway(target: Target) -> Iterator[Send]:
    """Announce a body that is larger than the gateway's limit."""

    def send() -> str:
        with _connect(target.gateway) as connection:
            connection.sendall(head("/predict", TOO_LARGE, JPEG))
            with http.client.HTTPResponse(connection) as response:
                response.begin()
                return compared(_code((response.status, json.loads(response.read()))), "413 too_large", "")

    yield send


def head(path: str, body_bytes: int, headers: Headers) -> bytes:
    """Return the head of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {body_bytes}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "\r\n"]).encode()


def _code(answer: tuple[int, Mapping[str, Any]]) -> str:
    status, document = answer
    return f"{status} {document.get('error', {}).get('code', document)}"


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), WATCHDOG_S)


def _read_all(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionError):  # a reset instead of a close
        while part := connection.recv(2**16):
            received += part
    return received
