"""Gateways for tests: an upstream with a given outcome, and requests without a network."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from nereid.application.repository_publisher import publish
from nereid.base.assets import TEXT_REPOSITORY
from nereid.base.config.model_config import ModelConfig
from nereid.base.contract import BARCODE_OUTPUTS, ROUTE_OUTPUTS
from nereid.base.http_connection import HttpResponse
from nereid.client import client_errors as errors
from nereid.client.result_kind import Timings
from nereid.gateway.failures import Failure, invalid_request
from nereid.gateway.http.app import create_app
from nereid.gateway.keys import SCOPES, Key, Scope
from nereid.gateway.models import Models
from nereid.gateway.route_control import RolloutChange, RouteState, VariantState, Weights
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.state import Gateway
from nereid.tasks.classify.result import Label, Prediction
from nereid.tasks.detect.result import DETECTIONS, Detection
from nereid.tasks.embed.result import Embedding
from nereid.tasks.read.result import READINGS, Field, Reading
from tests.classifiers import tensor_body
from tests.commands import captured
from tests.proof import REQUESTS

WATCHDOG_S = 60
LOCAL = "http://127.0.0.1"
IMAGE = b"an image of some kind"
LABELS = (Label(967, "espresso", 0.9), Label(968, "cup", 0.1))
PREDICTION = Prediction(LABELS, "classify", "1", "v1", "weight", "id", Timings(0, 1))
ROUTE = RouteState(
    "classify", 3, "v1", True, "", [VariantState("v1", "classify_v1", "1", 1.0, 1.0, "closed")]
)
# Below the sizes of the sample photos, so that tests reach the limits.
SOURCE = ("variant", "version", "reason")
SMALL = GatewaySettings(
    max_body_bytes=1000, max_buffered_bytes=3000, max_pixels=10_000, max_side_px=500, max_images=3
)


class Upstream:
    """Triton's HTTP port, which returns or raises `outcome`; requests wait while `gate` is closed.

    It keeps the image, the JSON and the headers of each inference.
    """

    def __init__(self, outcome: Any = PREDICTION) -> None:
        self.outcome = outcome
        self.received: list[tuple[bytes, Any, dict[str, str]]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.cancelled = 0

    async def request(
        self, method: str, path: str, headers: Any = (), body: Any = (), timeout_s: float = 0
    ) -> HttpResponse:
        try:
            if method == "GET":
                described = [{"name": name} for name in outputs_of(self.outcome)]
                return HttpResponse(200, {}, json.dumps({"name": "", "outputs": described}).encode())
            fields = {name.decode(): value.decode() for name, value in headers}
            return response_of(await self.infer(body[2], json.loads(body[0]), fields))
        except errors.NereidError as error:
            if type(error) in (errors.TimedOut, errors.Unreachable):
                raise TimeoutError if isinstance(error, errors.TimedOut) else ConnectionResetError from None
            status = {errors.RequestRefused: 400, errors.Overloaded: 429}.get(type(error), 500)
            return HttpResponse(status, {}, json.dumps({"error": str(error)}).encode())

    async def infer(self, image: bytes, document: Any, headers: dict[str, str]) -> Any:
        self.received.append((image, document, headers))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Upstreams(dict[str, Upstream]):
    async def request(self, method: str, path: str, *more: Any) -> HttpResponse:
        return await self[path.split("/")[3]].request(method, path, *more)


def outputs_of(result: Any) -> dict[str, Any]:
    outputs = {name: [getattr(result, of, "")] for name, of in zip(ROUTE_OUTPUTS, SOURCE, strict=True)}
    match result:
        case Reading():
            outputs |= {name: [getattr(line, name) for line in result.lines] for name in READINGS.outputs}
            for name, of in zip(BARCODE_OUTPUTS, ("text", "symbology", "box"), strict=True):
                outputs[name] = [getattr(barcode, of) for barcode in result.barcodes]
            if result.pages:
                outputs |= {"page": [line.page for line in result.lines]}
                outputs |= {"barcode_page": [barcode.page for barcode in result.barcodes]}
                outputs |= {"page_size": [[size.width, size.height] for size in result.pages]}
            return outputs | {"field": [json.dumps(_field(field)) for field in result.fields]}
        case Detection():
            return outputs | {
                name: [getattr(detected, name) for detected in result.objects] for name in DETECTIONS.outputs
            }
        case Embedding():
            return outputs | {"embedding": result.vector}
    labels = getattr(result, "labels", ())
    return outputs | {"scores": [f"{label.score}:{label.index}:{label.name}" for label in labels]}


def _field(field: Field) -> dict[str, Any]:
    corrected = [{"position": edit.position, "from": edit.read, "to": edit.value} for edit in field.corrected]
    return {**asdict(field), "corrected": corrected}


def response_of(result: Any) -> HttpResponse:
    arrays = {}
    for name, row in outputs_of(result).items():
        is_text = any(isinstance(value, str) for value in row)
        arrays[name] = np.array([[text.encode() for text in row]], object) if is_text else np.array([row])
    body, json_bytes = tensor_body({}, arrays)
    return HttpResponse(200, {b"inference-header-content-length": b"%d" % json_bytes}, body)


class Control:
    def show(self) -> RouteState:
        return ROUTE

    def set_weights(self, wanted: Weights, author: str) -> RouteState:
        if wanted.generation == 1:
            raise Failure("conflict", "the route has generation 3, got 1")
        if wanted.generation == 0:
            raise Failure("unavailable", "the server does not accept it")
        assert author
        if "v9" in wanted.weights:
            raise invalid_request("no variant 'v9'")
        return ROUTE

    def order_rollout(self, wanted: RolloutChange, author: str) -> RouteState:
        assert author
        if wanted.candidate == "v9":
            raise invalid_request("unknown candidate 'v9'")
        if wanted.order == "start" and wanted.steps:
            raise Failure("conflict", "cannot start a rollout of 'v1'")
        return ROUTE


class Source:
    """The model `classify`, with a route if one is given, and another model."""

    publish = staticmethod(publish)

    def __init__(self, route: Any = None, other: str = "dogs", repository: Path | None = None) -> None:
        self._route, self._other, self.repository = route, other, repository

    def names(self) -> list[str]:
        return ["classify", self._other]

    def outputs(self, name: str) -> list[str]:
        return ["scores"]

    def route(self, name: str) -> Any:
        return self._route if name == "classify" else None

    def preview(self, name: str, image: bytes) -> bytes | None:
        if image != IMAGE:
            raise Failure("invalid_image", "expected an image file")
        return b"picture" if name == "classify" else None

    def config(self, name: str) -> ModelConfig | None:
        folder = TEXT_REPOSITORY / "read_waybill_v1"
        return ModelConfig.from_file(folder, 1) if name == "read_waybill" else None


class Ring(dict[str, Key]):
    def find(self, secret: str) -> Key | None:
        return self.get(secret)


class Caller:
    def __init__(self, made: Any, body: bytes = IMAGE, is_complete: bool = True, headers: Any = ()) -> None:
        self.app, self.sent = create_app(made), list[Any]()
        self.messages: asyncio.Queue = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": not is_complete})
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/predict",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), *headers],
        }

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> Any:
        """Return the next message; refers to the request, as in uvicorn."""
        return await self.messages.get()

    def start(self) -> asyncio.Future:
        return asyncio.ensure_future(self.app(self.scope, self.receive, self.send))

    def disconnect(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})


def key(name: str, *scopes: Scope, rate_per_s: float | None = None) -> Key:
    return Key(f"id-{name}", name, "", frozenset(scopes), datetime(2026, 1, 1, tzinfo=UTC), rate_per_s)


RING, NO_KEYS = Ring({scope: key(scope, scope) for scope in SCOPES}), Ring()


def gateway(upstream: Any, settings: GatewaySettings = SMALL, keys: Any = NO_KEYS, route: Any = None) -> Any:
    return Gateway(settings, keys, Models("classify", Source(route), upstream))


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own, within the watchdog's time."""

    async def limited(*args: Any, **fixtures: Any) -> None:
        async with asyncio.timeout(WATCHDOG_S) as limit:
            await test(*args, **fixtures)
        assert not limit.expired()  # the test may have gone on after its cancellation

    return wraps(test)(lambda *args, **fixtures: asyncio.run(limited(*args, **fixtures)))


async def until(is_true: Callable[[], Any]) -> None:
    """Wait until a condition holds, at most until the watchdog of the test."""
    while not is_true():
        await asyncio.sleep(0.001)


def send(made: Any, method: str, path: str, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(made))
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def check_schema(address: str, folder: Path, *words: str) -> None:
    """Let schemathesis compare the responses of a gateway with its own description."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json", "--checks", checks]
    # A millisecond would be a 504, and rightly.
    command += ["-H", "X-Request-Timeout-Ms: 30000", "--phases", "examples,coverage,fuzzing"]
    command += ["--max-examples", str(max(10, REQUESTS // 100)), "--seed", "1", *words]

    done = captured(command, cwd=folder, timeout=300)

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
