"""Requests that must be rejected with their own errors, and callers that disconnect."""

import asyncio
import http.client
import itertools
import json
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc

from loadtest.soak.traffic import Kind, Target, compared, outcome, rejection
from loadtest.soak.valid_requests import (
    JPEG,
    NOT_AN_IMAGE,
    AsyncClient,
    Headers,
    Memory,
    addressed,
    connected,
    gateway,
    opened_async,
    post,
)
from nereid.assets import COFFEE
from nereid.client.classifier import Classifier
from nereid.client.classifier_errors import RequestRefused
from nereid.client.prediction import Prediction
from nereid.client.request import Options, ProtocolName

ROUTE = "classify"
INFER = f"/v2/models/{ROUTE}/infer"
RAW = {"Inference-Header-Content-Length": "0"}
GOOD = COFFEE.read_bytes()
TRUNCATED, TOO_LARGE = GOOD[:20_000], 32 * 2**20 + 1
# Less time than a photo of 1080p needs, and the timeout of requests that are rejected immediately.
TOO_SHORT_S, WATCHDOG_S = 0.004, 30.0
Ways = tuple[tuple[ProtocolName, Memory | None], ...]
HTTP_WAYS: Ways = (("http", None), ("http", "system"))
WAYS: Ways = (*HTTP_WAYS, ("grpc", None), ("grpc", "system"))
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


# Gives the next client of a cycle.
Following = Callable[[], Any]


def kinds(large: bytes) -> list[Kind]:
    """Return all kinds, together about ten requests per second; `large` is a photo of 1080p."""
    half = partial(cut_off, GOOD, 0.5)
    whole = partial(cut_off, large, 1.0)
    return [
        _rejected("truncated JPEG", 0.5, TRUNCATED, "invalid image: "),
        _rejected("text instead of an image", 0.5, NOT_AN_IMAGE, "invalid image: "),
        _rejected("empty image", 0.5, b"", "invalid image: "),
        # The memory of allocators settles only after each of many threads has handled such an image.
        _rejected("image of more than 32 MiB", 0.1, bytes(TOO_LARGE), "invalid image: expected at most", 1.0),
        _rejected("unknown variant", 0.5, GOOD, "unknown x-variant", options={"variant": "nobody"}),
        _rejected("unknown version", 0.5, GOOD, "unknown x-model-version", options={"version": "1000000"}),
        _rejected("unknown model", 0.5, GOOD, "unknown model", model="nobody"),
        # Over HTTP only: a cancellation over gRPC can end Triton 24.10, see docs/security.md.
        _bad("too little time, HTTP", 1, partial(classifiers, ROUTE, HTTP_WAYS), partial(time_out, large)),
        _bad("wrong tensors, gRPC", 0.5, triton_client, partial(send_tensor, itertools.cycle(TENSORS))),
        _bad("wrong tensors, HTTP", 0.5, server, partial(send_document, itertools.cycle(TENSORS))),
        _bad("half a request, HTTP", 0.5, addressed, partial(half, "http", INFER, RAW)),
        _bad("left before the answer, HTTP", 0.5, addressed, partial(whole, "http", INFER, RAW)),
        _bad("cancelled, asyncio, HTTP", 0.5, async_classifiers, partial(cancel_task, large)),
        _bad("no HTTP", 0.5, addressed, partial(send_noise, "http")),
        _bad("no gRPC", 0.5, addressed, partial(send_noise, "grpc")),
        _bad("gateway: bad requests", 1, gateway, partial(post_invalid, itertools.cycle(GATEWAY_REQUESTS))),
        _bad("gateway: too little time", 0.5, gateway, partial(post_late, large)),
        _bad("gateway: more than 32 MiB", 0.5, addressed, announce_too_large),
        _bad("gateway: half a request", 0.5, addressed, partial(half, "gateway", "/predict", JPEG)),
        _bad("gateway: left before the answer", 0.5, addressed, partial(whole, "gateway", "/predict", JPEG)),
    ]


_bad = partial(Kind, is_good=False)


def _rejected(
    name: str,
    per_s: float,
    file: bytes,
    words: str,
    warming_per_s: float = 0.0,
    options: Options | None = None,
    model: str = ROUTE,
) -> Kind:
    send = partial(reject, file, words, options or {})
    return _bad(name, per_s, partial(classifiers, model, WAYS), send, warming_per_s=warming_per_s)


@contextmanager
def classifiers(model: str, ways: Ways, target: Target) -> Iterator[Following]:
    """Open a classifier for each transport; gives them in turn."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(Classifier(target.url(protocol), protocol, model, shared_memory=memory))
            for protocol, memory in ways
        ]
        yield partial(next, itertools.cycle(found))


@contextmanager
def async_classifiers(target: Target) -> Iterator[Following]:
    """Open classifiers for asyncio with shared memory and without; gives them in turn."""
    with opened_async("http", target) as plain, opened_async("http", target, "system") as shared:
        yield partial(next, itertools.cycle([plain, shared]))


def triton_client(target: Target) -> AbstractContextManager[Any]:
    """Open a plain client over gRPC."""
    client: AbstractContextManager[Any] = tritonclient.grpc.InferenceServerClient(target.grpc)
    return client


def server(target: Target) -> AbstractContextManager[http.client.HTTPConnection]:
    """Open a connection to the server over HTTP."""
    return connected(target.http)


def reject(file: bytes, words: str, options: Options, following: Following) -> str:
    """Send a request that is rejected with these words."""
    return rejection(partial(following().classify, file, **options), RequestRefused, words)


def time_out(file: bytes, following: Following) -> str:
    """Send a request with a timeout below the time of a response."""
    got = outcome(partial(following().classify, file, timeout_s=TOO_SHORT_S))
    # A busy machine may respond before the timeout is checked.
    return "" if got.startswith("Prediction(") else compared(got, "TimedOut: ", "")


def send_tensor(cases: Iterator[Any], client: Any) -> str:
    """Send a tensor that the model rejects, over gRPC."""
    datatype, shape, name, words = next(cases)
    tensor = tritonclient.grpc.InferInput(name, shape, datatype)
    value, dtype = (b"a", object) if datatype == "BYTES" else (1, np.float32)
    tensor.set_data_from_numpy(np.full(shape, value, dtype))
    return compared(outcome(lambda: client.infer(ROUTE, [tensor])), INVALID, words)


def send_document(cases: Iterator[Any], connection: http.client.HTTPConnection) -> str:
    """Send a tensor that the model rejects, over HTTP."""
    datatype, shape, name, words = next(cases)
    data = ["a" if datatype == "BYTES" else 1] * int(np.prod(shape))
    entry = {"name": name, "datatype": datatype, "shape": shape, "data": data}
    body = json.dumps({"inputs": [entry]}).encode()
    status, document = post(connection, INFER, body, {"Content-Type": "application/json"})
    return compared(f"{status} {document.get('error')}", "400 ", words)


def cut_off(body: bytes, share: float, where: str, path: str, headers: Headers, target: Target) -> str:
    """Send a request with a share of its body, and break the connection."""
    with _connect(getattr(target, where)) as connection:
        connection.sendall(head(path, len(body), headers) + body[: int(len(body) * share)])
        # A reset: data in flight is lost.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return ""


def send_noise(protocol: ProtocolName, target: Target) -> str:
    """Send bytes that are not a request; no model may respond."""
    with _connect(target.url(protocol)) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not a request\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        received = _read_all(connection)
    return f"unexpected response {received[:80]!r}" if b"200 OK" in received else ""


def cancel_task(file: bytes, following: Callable[[], AsyncClient]) -> str:
    """Cancel the task of a request from asyncio."""
    runner, classifier = following()

    async def send() -> str:
        request = asyncio.create_task(classifier.classify(file))
        await asyncio.sleep(TOO_SHORT_S)
        request.cancel()
        (result,) = await asyncio.gather(request, return_exceptions=True)
        is_over = isinstance(result, (asyncio.CancelledError, Prediction))
        return "" if is_over else f"{type(result).__name__}: {result}"

    return runner.run(send())


def post_invalid(cases: Iterator[Any], connection: http.client.HTTPConnection) -> str:
    """Send a request that the gateway rejects."""
    path, body, headers, status, code = next(cases)
    return compared(_code(post(connection, path, body, headers)), f"{status} {code}", "")


def post_late(file: bytes, connection: http.client.HTTPConnection) -> str:
    """Send the gateway a request with a timeout below the time of a response."""
    headers = {**JPEG, "X-Request-Timeout-Ms": f"{TOO_SHORT_S * 1e3:.0f}"}
    got = _code(post(connection, "/predict", file, headers))
    return "" if got in LATE else f"expected one of {LATE}, got '{got}'"


def announce_too_large(target: Target) -> str:
    """Announce a body that is larger than the gateway's limit."""
    with _connect(target.gateway) as connection:
        connection.sendall(head("/predict", TOO_LARGE, JPEG))
        with http.client.HTTPResponse(connection) as response:
            response.begin()
            return compared(_code((response.status, json.loads(response.read()))), "413 too_large", "")


def head(path: str, body_bytes: int, headers: Headers) -> bytes:
    """Return the head of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {body_bytes}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "\r\n"]).encode()


def _code(response: tuple[int, Mapping[str, Any]]) -> str:
    status, document = response
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
