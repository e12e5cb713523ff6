"""The kinds of requests: some need a right answer, the others must be refused with their own error."""

import asyncio
import http.client
import itertools
import json
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from loadtest.torture.changes import ROUTE, Photo
from loadtest.torture.traffic import Failed, Kind, Target
from nereid.base.assets import COFFEE
from nereid.client.client_errors import RequestRefused, TimedOut
from nereid.client.result_kind import Timings
from nereid.tasks.classify.client import AsyncClassifier, Classifier
from nereid.tasks.classify.result import Label, Prediction

INFER, RAW = f"/v2/models/{ROUTE}/infer", {"Inference-Header-Content-Length": "0"}
JPEG = {"Content-Type": "image/jpeg"}
NOT_AN_IMAGE, GOOD = b"this is not an image", COFFEE.read_bytes()
TRUNCATED = GOOD[:20_000]
# Parallel requests of an asyncio caller, and the place of the invalid image in a batch.
TOGETHER, BAD_PLACE = 3, 3
# The timeout of all requests, and less time than a photo of 1080p needs.
TIMEOUT_S, TOO_SHORT_S = 10.0, 0.004
LATE = ("504 deadline_exceeded", "429 overloaded", "408 body_timeout")
# Image, options, and words of the refusal.
REFUSED: tuple[tuple[bytes, dict[str, str], str], ...] = (
    (TRUNCATED, {}, "invalid image: "),
    (NOT_AN_IMAGE, {}, "invalid image: "),
    (b"", {}, "invalid image: "),
    (bytes(32 * 2**20 + 1), {}, "invalid image: expected at most"),
    (GOOD, {"variant": "nobody"}, "unknown x-variant"),
    (GOOD, {"version": "1000000"}, "unknown x-model-version"),
)
# Path, body, headers, and the statuses and codes of the gateway's response.
GATEWAY_REQUESTS = (
    ("/predict", NOT_AN_IMAGE, JPEG, "400 invalid_image"),
    ("/predict", TRUNCATED, JPEG, "400 invalid_image"),
    ("/predict", b"", JPEG, "400 invalid_image"),
    ("/predict?variant=nobody", GOOD, JPEG, "400 invalid_request"),
    ("/predict?colour=blue", GOOD, JPEG, "400 invalid_request"),
    ("/predict", GOOD, {"Content-Type": "text/html"}, "415 unsupported_media_type"),
    ("/predictions", GOOD, JPEG, "404 not_found"),
)
# Address, path, headers, and the sent share of the body.
CUT_OFF = tuple(
    (*where, share) for where in (("http", INFER, RAW), ("gateway", "/predict", JPEG)) for share in (0.5, 1.0)
)

Connection = http.client.HTTPConnection
Following = Callable[[], Any]
# Protocol, and whether images pass in shared memory.
Ways = Sequence[tuple[Any, Any]]
HTTP: Ways = (("http", None), ("http", "system"))
WAYS: Ways = (*HTTP, ("grpc", None), ("grpc", "system"))


def kinds(small: Photo, large: Photo) -> list[Kind]:
    """Return all kinds: about 30 images and 9 bad requests per second."""
    ways, cycle = partial(_in_turn, _open, WAYS), itertools.cycle
    late = ("/predict", large.file, {**JPEG, "X-Request-Timeout-Ms": f"{TOO_SHORT_S * 1e3:.0f}"}, *LATE)
    return [
        *[Kind(f"small photo {number}", 3, ways, partial(_classify, small, {})) for number in (1, 2)],
        *[Kind(f"large photo {number}", 2.5, ways, partial(_classify, large, {})) for number in (1, 2)],
        Kind("a key", 1, ways, partial(_classify, small, {"route_key": "alice"})),
        Kind("a version", 1, ways, partial(_classify, small, {"version": "2"})),
        Kind("opened anew", 1, nullcontext, partial(_anew, cycle(WAYS), small)),
        Kind("asyncio", 2, partial(_in_turn, _open_async, WAYS), partial(_parallel, large)),
        Kind("batch with a bad image", 0.5, ways, partial(_batch, small)),
        Kind("gateway", 4, to_gateway, partial(_post_image, cycle([small, large]))),
        Kind("refused", 3, ways, partial(_reject, cycle(REFUSED))),
        # Over HTTP only: a cancellation over gRPC can end Triton 24.10, see docs/security.md.
        Kind("too little time", 1, partial(_in_turn, _open, HTTP), partial(_time_out, large)),
        Kind("cancelled", 0.5, partial(_in_turn, _open_async, HTTP), partial(_cancel, large)),
        Kind("cut off", 2, nullcontext, partial(_cut_off, cycle(CUT_OFF), large.file)),
        Kind("gateway, refused", 1.5, to_gateway, partial(_post_invalid, cycle([late, *GATEWAY_REQUESTS]))),
    ]


@contextmanager
def _in_turn(opened: Any, ways: Ways, target: Target) -> Iterator[Following]:
    """Open a client for each transport; gives them in turn."""
    with ExitStack() as stack:
        clients = [stack.enter_context(opened(target, *way)) for way in ways]
        yield partial(next, itertools.cycle(clients))


def _open(target: Target, protocol: Any, memory: Any) -> Classifier:
    return Classifier(getattr(target, protocol), protocol, ROUTE, TIMEOUT_S, shared_memory=memory)


@contextmanager
def _open_async(
    target: Target, protocol: Any, memory: Any
) -> Iterator[tuple[asyncio.Runner, AsyncClassifier]]:
    with asyncio.Runner() as runner:
        address = getattr(target, protocol)
        classifier = AsyncClassifier(address, protocol, ROUTE, TIMEOUT_S, shared_memory=memory)
        try:
            yield runner, classifier
        finally:
            runner.run(classifier.close())


def to_gateway(target: Target) -> AbstractContextManager[Connection]:
    """Open a connection to the gateway."""
    return closing(Connection(target.gateway, timeout=TIMEOUT_S))


def _classify(photo: Photo, options: dict[str, Any], following: Following) -> str:
    prediction = following().classify(photo.file, **options)
    is_followed = "route_key" not in options or prediction.reason == "route-key"
    if is_followed and options.get("version", prediction.version) == prediction.version:
        return photo.fault(prediction)
    return f"expected {options}, got version {prediction.version} because of {prediction.reason}"


def _anew(ways: Iterator[Any], photo: Photo, target: Target) -> str:
    with _open(target, *next(ways)) as classifier:
        return photo.fault(classifier.classify(photo.file))


def _parallel(photo: Photo, following: Following) -> str:
    runner, classifier = following()

    async def send() -> str:
        predictions = await asyncio.gather(*(classifier.classify(photo.file) for _ in range(TOGETHER)))
        return _joined(map(photo.fault, predictions))

    return str(runner.run(send()))


def _batch(photo: Photo, following: Following) -> str:
    """Send several images, one of them invalid; only that one may be refused."""
    files = [photo.file] * 7
    outcomes = [
        *following().classify_many([*files[:BAD_PLACE], NOT_AN_IMAGE, *files[BAD_PLACE:]], batch_size=4)
    ]
    bad = refused(partial(_result, outcomes.pop(BAD_PLACE)), "invalid image: ")
    return _joined([bad, *(photo.fault(_result(outcome)) for outcome in outcomes)])


def _result(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _joined(faults: Iterable[str]) -> str:
    return "; ".join(filter(None, faults))


def refused(call: Callable[[], object], words: str) -> str:
    """Return the fault of a request that must be refused with these words, empty for none.

    Raises:
        Exception: the request failed for another reason, as a valid one can.
    """
    try:
        answer = call()
    except RequestRefused as error:
        return "" if words in str(error) else f"expected a refusal with '{words}', got '{error}'"
    return f"expected a refusal with '{words}', got {answer}"


def _reject(cases: Iterator[Any], following: Following) -> str:
    file, options, words = next(cases)
    return refused(partial(following().classify, file, **options), words)


def _time_out(photo: Photo, following: Following) -> str:
    with suppress(TimedOut):  # a busy machine may answer before it looks at the timeout
        return photo.fault(following().classify(photo.file, timeout_s=TOO_SHORT_S))
    return ""


def _cancel(photo: Photo, following: Following) -> str:
    runner, classifier = following()

    async def send() -> str:
        request = asyncio.create_task(classifier.classify(photo.file))
        await asyncio.sleep(TOO_SHORT_S)
        request.cancel()
        with suppress(asyncio.CancelledError):
            return photo.fault(await request)
        return ""

    return str(runner.run(send()))


def _cut_off(cases: Iterator[Any], body: bytes, target: Target) -> str:
    """Send a request with a share of its body, and break the connection."""
    where, path, headers, share = next(cases)
    with connect(getattr(target, where)) as connection:
        connection.sendall(head(path, len(body), headers) + body[: int(len(body) * share)])
        # A reset: data in flight is lost.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return ""


def _post_image(sent: Iterator[Photo], connection: Connection) -> str:
    photo = next(sent)
    status, document = response = post(connection, "/predict", photo.file, JPEG)
    return photo.fault(as_prediction(document)) if status == HTTPStatus.OK else _code(response)


def _post_invalid(cases: Iterator[Any], connection: Connection) -> str:
    path, body, headers, *expected = next(cases)
    code = _code(post(connection, path, body, headers, expected))
    return "" if code in expected else f"expected one of {expected}, got {code}"


def post(
    connection: Connection, path: str, body: bytes, headers: Mapping[str, str], allowed: Sequence[str] = ()
) -> tuple[int, dict[str, Any]]:
    """Send a POST; returns status and document.

    Raises:
        Failed: the server is late, busy or not there, which is not `allowed`.
    """
    connection.request("POST", path, body, dict(headers))
    with connection.getresponse() as response:
        answer = response.status, json.loads(response.read())
    if (answer[0] >= 500 or answer[0] in (408, 429)) and _code(answer) not in allowed:
        raise Failed(f"{answer[0]} {answer[1]}")
    return answer


def _code(response: tuple[int, Mapping[str, Any]]) -> str:
    status, document = response
    error = document.get("error", "")
    return f"{status} {error['code'] if isinstance(error, dict) else error}"


def as_prediction(document: Mapping[str, Any]) -> Prediction:
    """Convert a response of the gateway to a prediction."""
    labels = tuple(Label(label["index"], label["label"], label["score"]) for label in document["predictions"])
    model, version, variant, reason = (document[name] for name in ("model", "version", "variant", "reason"))
    return Prediction(labels, model, version, variant, reason, "", Timings(0, 0))


def head(path: str, body_bytes: int, headers: Mapping[str, str]) -> bytes:
    """Return the head of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {body_bytes}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "\r\n"]).encode()


def connect(address: str, timeout_s: float = TIMEOUT_S) -> socket.socket:
    """Open a plain connection to HOST:PORT."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout_s)
