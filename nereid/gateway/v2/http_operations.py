"""The v2 protocol over HTTP: health, metadata and inference."""

import asyncio
import re
import time
import zlib

from nereid.base.units import format_bytes
from nereid.gateway import inference
from nereid.gateway.failures import Failure, from_triton, invalid_request
from nereid.gateway.http.http_request import JSON, GatewayRequest, GatewayResponse
from nereid.gateway.http.upload import cancel_on_disconnect
from nereid.gateway.inference import JSON_LENGTH_HEADER
from nereid.gateway.state import Gateway
from nereid.gateway.task_endpoint import Operation
from nereid.gateway.v2.inference_body import check_body_apart

# zlib's value for detecting gzip or zlib by header.
_ANY_WINDOW = 47


async def infer(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Check an inference request and have Triton run it."""
    settings = gateway.settings
    remaining_s = request.start_timeout(settings.max_timeout_s, settings.max_timeout_s)
    path, headers = _path(request), request.forwarded()
    gateway.admission.check(remaining_s, request.key_id)
    body = memoryview(await gateway.uploads.read_body(request, remaining_s))
    request.end_stage("receive")
    if b"content-encoding" in request.headers:
        body = await _unpacked(gateway, request, body)
    checked = await check_body_apart(settings, body, _json_bytes(request))
    with cancel_on_disconnect(request):
        response = await inference.run_tensors(gateway, request, path, headers, checked)
    request.model_name = request.scope["path_params"]["model"]
    content_type, length = response.headers.get(b"content-type", JSON), JSON_LENGTH_HEADER
    head = [(length, response.headers[length])] if length in response.headers else []
    return GatewayResponse(response.body, content_type, 200, head)


async def read(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return health, metadata, config or statistics, as Triton reports them."""
    values = request.scope["path_params"]
    path = _path(request) if "model" in values else request.scope["path"]
    suffix = f"/{values['what']}" if "what" in values else ""
    response = await inference.get_from_triton(gateway, path + suffix)
    if response.status != 200:
        if not response.body:  # for example readiness
            return GatewayResponse(b"", JSON, response.status)
        raise from_triton(response)
    return GatewayResponse(response.body, response.headers.get(b"content-type", JSON))


def _path(request: GatewayRequest) -> str:
    """Return Triton's path for the model, including the version if the request has one."""
    values = request.scope["path_params"]
    return inference.checked_path(values["model"], values.get("version", ""))


def _json_bytes(request: GatewayRequest) -> int | None:
    if JSON_LENGTH_HEADER not in request.headers:
        return None
    text = request.header(JSON_LENGTH_HEADER)
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise invalid_request(f"Inference-Header-Content-Length must be a number of bytes, got {text[:32]!r}")
    return int(text)


async def _unpacked(gateway: Gateway, request: GatewayRequest, body: memoryview) -> memoryview:
    """Return the decompressed body; bodies are unpacked one at a time, scheduled fairly between keys.

    Raises:
        Failure: the encoding is unknown, or the body is damaged, too large or late.
    """
    encoding = request.header(b"content-encoding").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        expected = "Content-Encoding: expected gzip or deflate"
        raise Failure("unsupported_media_type", f"{expected}, got {encoding[:32]!r}")
    try:
        await gateway.decompressions.acquire(request.key_id, request.remaining_s())
    except TimeoutError:
        raise Failure(
            "deadline_exceeded", f"the body was not unpacked within {request.limit_s:.3g} s"
        ) from None
    started_at = time.monotonic()
    try:
        unpacked = await asyncio.to_thread(unpack, body, gateway.settings.max_body_bytes)
    finally:
        gateway.decompressions.release(request.key_id, time.monotonic() - started_at)
    gateway.uploads.buffers.acquire(request.key_id, len(unpacked))
    request.body_bytes += len(unpacked)
    return memoryview(unpacked)


def unpack(body: bytes | memoryview, max_bytes: int) -> bytes:
    """Decompress a gzip or zlib body, stopping at the limit.

    Raises:
        Failure: the body is damaged or too large.
    """
    unpacking = zlib.decompressobj(_ANY_WINDOW)
    try:
        unpacked = unpacking.decompress(body, max_bytes)
    except zlib.error as error:
        raise invalid_request(f"the compressed body is damaged: {error}") from None
    if unpacking.unconsumed_tail:
        raise Failure("too_large", f"expected at most {format_bytes(max_bytes)} after unpacking, got more")
    if not unpacking.eof or unpacking.unused_data:
        raise invalid_request("the compressed body ends early, or is followed by other data")
    return unpacked


INFER = Operation("POST", "/v2/models/{model}/infer", infer, "infer", None, is_limited=True)
HEALTH = Operation("GET", "/v2/health", read, "open", None)
METADATA = Operation("GET", "/v2/models", read, "infer", None)
OPERATIONS = (INFER, HEALTH, METADATA)
_PATH = re.compile(
    r"/v2(/health/(live|ready)|/models/stats"
    r"|/models/(?P<model>[^/]+)(/versions/(?P<version>[^/]+))?(/(?P<what>ready|config|stats|infer))?)?"
)


def find(method: str, path: str) -> tuple[Operation, dict[str, str]]:
    """Return the operation for a path, and the values in the path.

    Raises:
        Failure: there is no such operation.
    """
    if not (match := _PATH.fullmatch(path)):
        raise Failure("not_found", f"{path[:128]!r}: a gateway serves only health, metadata and inference")
    values = {name: value for name, value in match.groupdict().items() if value}
    operation = INFER if values.get("what") == "infer" else HEALTH if match[2] else METADATA
    if method != operation.method:
        raise Failure("method_not_allowed", f"{path[:128]!r}: expected {operation.method}, got {method[:16]}")
    return operation, values
