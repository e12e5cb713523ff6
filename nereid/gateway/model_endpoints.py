"""Endpoints other than inference: image preview and network upload."""

import asyncio
import contextlib
import math
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from nereid.base import files
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.base.units import format_bytes, parse_share
from nereid.gateway.failures import Failure, invalid_request
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, json_response
from nereid.gateway.http.upload import RAW, ClientClosed, body_format_of, check_size
from nereid.gateway.models import PublishCommand
from nereid.gateway.state import Gateway
from nereid.gateway.task_endpoint import WORD_SCHEMA, Parameter, run_in_limited_thread
from nereid.vision.imaging.formats.image_header import estimate_header_cost, read_header


async def preview(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return a picture (PNG) of an image as the network sees it."""
    settings = gateway.settings
    remaining_s = request.start_timeout(settings.default_timeout_s, settings.max_timeout_s)
    image = await gateway.uploads.read_image(request, remaining_s)
    image_header = read_header(image)
    check_size(image_header, settings)
    cost = estimate_header_cost(image_header, settings.max_pixels)
    gateway.quotas.take(request.key, cost - 1, is_debt=True)

    def prepare() -> bytes | None:
        return gateway.models.source.preview(request.model.name, bytes(image))

    png = await run_in_limited_thread(gateway, request, cost, prepare)
    if png is None:
        raise Failure("not_found", f"no preview for '{request.model.name}': its preprocessing is unknown")
    return GatewayResponse(png, b"image/png", headers=[(b"cache-control", b"no-store")])


# Query parameters that set limits for the examination, and the names it uses for them.
LIMITS = {"tolerance": "tolerance", "max_slowdown": "max_slowdown", "max_memory": "max_memory_ratio"}
PUBLISH_PARAMETERS: dict[str, Parameter] = {
    "share": ("Initial share of the traffic, such as 10%; 0 without it.", WORD_SCHEMA),
    "accept_change": (
        "Publish although the results differ from the current version's.",
        {"type": "string", "enum": ["true"]},
    ),
    "tolerance": ("Maximum difference of scores from the current version.", WORD_SCHEMA),
    "max_slowdown": ("Maximum time per image, as a multiple of the current version's.", WORD_SCHEMA),
    "max_memory": ("Maximum memory, as a multiple of the current version's.", WORD_SCHEMA),
}
# Size limit of a network in one file. Source: protobuf's message size limit.
MAX_BYTES = 2 * 2**30
# Time limits in seconds for each piece of the body and for the whole body.
PIECE_TIMEOUT_S, BODY_TIMEOUT_S = 30.0, 900.0
NO_PUBLISHER_MESSAGE = (
    "a gateway with --url cannot publish: it has no repository; fix: nereid publish, beside the server"
)


async def publish(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Publish the body, an ONNX file, as the next version of a model; respond once it is served."""
    source, parameters = gateway.models.source, request.query(PUBLISH_PARAMETERS)
    if source.repository is None:
        raise Failure("not_found", NO_PUBLISHER_MESSAGE)
    body_format_of(request, (RAW,))
    if (accepts := parameters.get("accept_change", "true")) != "true":
        raise invalid_request(f"accept_change: expected true or no parameter, got {accepts[:64]!r}")
    share, limits = _number(parameters, "share"), [name for name in LIMITS if name in parameters]
    async with _upload_folder(source.repository) as folder:
        command = PublishCommand(
            source.repository,
            request.model.name,
            folder / f"{request.model.name}.onnx",
            share,
            "accept_change" in parameters,
            {LIMITS[name]: _number(parameters, name) for name in limits},
        )
        await _receive(request, command.source)
        try:
            return json_response(await source.publish(command))
        except OperationFailed as error:
            reason = str(error).replace(f"{folder}/", "")
            is_invalid = isinstance(error, WrongUsage)
            raise invalid_request(reason) if is_invalid else Failure("conflict", reason) from None


def _number(parameters: Mapping[str, str], name: str) -> float:
    """Return a query parameter as a number; 0 if it is absent."""
    text = parameters.get(name, "0")
    with contextlib.suppress(ValueError):
        value = parse_share(text) if name == "share" else float(text)
        if math.isfinite(value) and value >= 0:
            return value
    expected = "a share such as 10% or 0.1" if name == "share" else "a number of at least 0"
    raise invalid_request(f"{name}: expected {expected}, got {text[:64]!r}")


@contextlib.asynccontextmanager
async def _upload_folder(repository: Path) -> AsyncIterator[Path]:
    """Provide a repository's single upload folder, which may contain leftovers of a killed process."""
    state = files.state_folder(repository)
    folder = state / "upload"
    try:
        state.mkdir(exist_ok=True)
        with files.locked_file(state / "upload.lock", "POST /v1/publish", 0):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            try:
                yield folder
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    except files.LockTimeout:
        raise Failure("conflict", "another network is being published; retry later") from None
    except OSError as error:
        raise Failure("unavailable", f"not possible now: {error.strerror}", 1.0) from error


async def _receive(request: GatewayRequest, target: Path) -> None:
    """Write the body to a file piece by piece.

    Raises:
        Failure: the body is empty, too large or late.
        ClientClosed: the client disconnected before sending the whole body.
    """
    expected = f"expected an ONNX file of at most {format_bytes(MAX_BYTES)}"
    declared, size_bytes, is_complete = request.header(b"content-length"), 0, False
    if declared.isdecimal() and int(declared) > MAX_BYTES:
        raise Failure("too_large", f"{expected}, got {format_bytes(int(declared))}")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            with target.open("wb") as file:
                while not is_complete:
                    async with asyncio.timeout(PIECE_TIMEOUT_S):
                        message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientClosed
                    piece, is_complete = message.get("body", b""), not message.get("more_body", False)
                    size_bytes += len(piece)
                    if size_bytes > MAX_BYTES:
                        raise Failure("too_large", f"{expected}, got more")
                    await asyncio.to_thread(file.write, piece)
    except TimeoutError:
        limits = f"each piece within {PIECE_TIMEOUT_S:g} s, and the whole body within {BODY_TIMEOUT_S:g} s"
        raise Failure("body_timeout", f"expected {limits}") from None
    if not size_bytes:
        raise invalid_request(f"{expected}, got an empty body")
