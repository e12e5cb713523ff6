"""Images in a request body: raw, in a form, or as base64 in JSON; limits are enforced while reading."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from python_multipart.multipart import parse_options_header

from nereid.base.units import format_bytes
from nereid.gateway.failures import Failure, invalid_request
from nereid.gateway.http.http_request import GatewayRequest
from nereid.gateway.settings import GatewaySettings
from nereid.vision.imaging.formats.image_header import ImageHeader

BodyFormat = Literal["raw", "multipart/form-data", "application/json"]
RAW: BodyFormat = "raw"
FORM: BodyFormat = "multipart/form-data"
JSON: BodyFormat = "application/json"
# The last one is the default for `curl --data-binary`.
RAW_MEDIA_TYPES = ("", "application/octet-stream", "application/pdf", "application/x-www-form-urlencoded")
MAX_TOP_K = 1000
MAX_PART_HEAD_BYTES = 8192
# Smaller bodies are decoded without counting quotation marks first.
MAX_UNCOUNTED_BYTES = 2**20
MAX_QUOTES_PER_IMAGE = 1000
# Longer work is split into pieces of this size, so that other requests run in between; whole base64 groups.
PIECE_BYTES = 2**17
_Body = TypeVar("_Body")
TopK = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOP_K)]


class ClientClosed(Exception):
    """The client disconnected."""


@contextlib.contextmanager
def cancel_on_disconnect(request: GatewayRequest) -> Iterator[None]:
    """Cancel the current task if the client disconnects while the context is open.

    Raises:
        ClientClosed: the client disconnected.
    """
    task = asyncio.current_task()
    assert task
    watching = asyncio.create_task(_cancel_on_disconnect(request, task))
    try:
        yield
    finally:
        if watching.done():
            task.uncancel()
            raise ClientClosed from None
        watching.cancel()


async def _cancel_on_disconnect(request: GatewayRequest, task: "asyncio.Task[object]") -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    task.cancel()


class ImageBody(msgspec.Struct, forbid_unknown_fields=True):
    """One image: an encoded file as base64."""

    image: memoryview


class BatchImage(msgspec.Struct, forbid_unknown_fields=True):
    """One image of a batch; the result repeats its id, which defaults to its position."""

    image: memoryview
    id: str | int | None = None


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """Several images with common options."""

    images: Annotated[list[BatchImage], msgspec.Meta(min_length=1)]
    top_k: TopK | None = None
    variant: str = ""
    version: str = ""
    route_key: str = ""


# The same, with the images still as received text.
class _Image(msgspec.Struct, forbid_unknown_fields=True):
    image: msgspec.Raw


class _NamedImage(_Image):
    id: str | int | None = None


class _Batch(BatchBody):
    images: Annotated[list[_NamedImage], msgspec.Meta(min_length=1)]  # type: ignore[assignment]


class UploadBuffers:
    """Memory limits for request bodies: of all requests, and of one key's requests.

    Args:
        max_bytes: limit for all requests.
        share_bytes: limit per key; callers without a key share one limit.
    """

    def __init__(self, max_bytes: int, share_bytes: int) -> None:
        self._left_bytes, self._share_bytes = max_bytes, share_bytes
        self._held_bytes: dict[str, int] = {}

    def acquire(self, key_id: str, size_bytes: int) -> None:
        """Count received bytes of a request.

        Raises:
            Failure: `overloaded`, because the limit has been reached.
        """
        held_bytes = self._held_bytes.get(key_id, 0) + size_bytes
        if size_bytes > self._left_bytes or held_bytes > self._share_bytes:
            raise Failure("overloaded", "too many bytes of other requests are buffered; retry later", 1.0)
        self._left_bytes -= size_bytes
        self._held_bytes[key_id] = held_bytes

    def release(self, key_id: str, size_bytes: int) -> None:
        """Count released bytes of a request."""
        self._left_bytes += size_bytes
        if left_bytes := self._held_bytes.get(key_id, 0) - size_bytes:
            self._held_bytes[key_id] = left_bytes
        else:
            self._held_bytes.pop(key_id, None)


class Uploads:
    """Read bodies within the configured limits; `buffers` are released after each request."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        max_bytes = settings.max_buffered_bytes
        self.buffers = UploadBuffers(max_bytes, max(max_bytes // 4, settings.max_body_bytes))

    async def read_image(self, request: GatewayRequest, remaining_s: float) -> memoryview:
        """Read the body of a request with one image.

        Raises:
            Failure: the body is invalid, too large or late.
            ClientClosed: the client disconnected before sending the whole body.
        """
        body_format = body_format_of(request, (RAW, FORM, JSON))
        if body_format == FORM:
            return (await self._form(request, remaining_s, 1))[0].image
        body = await self.read_body(request, remaining_s)
        image = memoryview(body) if body_format == RAW else await _decode_image(body)
        if not image:
            raise Failure("invalid_image", "the image is empty")
        return image

    async def read_batch(self, request: GatewayRequest, remaining_s: float) -> BatchBody:
        """Read the body of a request with several images.

        Raises:
            Failure: the body is invalid, too large or late.
            ClientClosed: the client disconnected before sending the whole body.
        """
        max_images = self._settings.max_images
        if body_format_of(request, (FORM, JSON)) == FORM:
            return BatchBody(await self._form(request, remaining_s, max_images))
        batch = await _decode_batch(await self.read_body(request, remaining_s), max_images)
        if len(batch.images) > max_images:
            raise invalid_request(f"at most {max_images} images, got {len(batch.images)}")
        return batch

    async def read_json(self, request: GatewayRequest, body_type: Any) -> Any:
        """Read a JSON body as an instance of a class.

        Raises:
            Failure: the body is invalid, too large or late.
            ClientClosed: the client disconnected before sending the whole body.
        """
        body_format_of(request, (JSON,))
        remaining_s = self._settings.default_timeout_s
        return _decode(body_type, await self.read_body(request, remaining_s, MAX_UNCOUNTED_BYTES))

    async def read_body(
        self, request: GatewayRequest, remaining_s: float, max_bytes: int | None = None
    ) -> bytes | bytearray:
        """Read a body of at most the configured limit, and of at most `max_bytes`.

        Raises:
            Failure: the body is too large or late.
            ClientClosed: the client disconnected before sending the whole body.
        """
        max_bytes = min(max_bytes or self._settings.max_body_bytes, self._settings.max_body_bytes)
        declared = request.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(max_bytes, format_bytes(int(declared)))
        body: bytes | bytearray = b""
        try:
            async with asyncio.timeout(remaining_s):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientClosed
                    chunk = message.get("body", b"")
                    if request.body_bytes + len(chunk) > max_bytes:
                        raise _too_large(max_bytes, "more")
                    self.buffers.acquire(request.key_id, len(chunk))
                    request.body_bytes += len(chunk)
                    if not body:
                        body = chunk
                    else:  # grows without copying, unlike concatenating all pieces
                        body = bytearray(body) if isinstance(body, bytes) else body
                        body += chunk
                    if not message.get("more_body", False):
                        return body
        except TimeoutError:
            raise Failure("body_timeout", f"the body did not arrive within {remaining_s:.3g} s") from None

    async def _form(self, request: GatewayRequest, remaining_s: float, max_images: int) -> list[BatchImage]:
        _, options = parse_options_header(request.headers[b"content-type"])
        boundary = options.get(b"boundary", b"")
        if not 1 <= len(boundary) <= 70:
            raise _damaged("its boundary must have 1 to 70 characters")
        return read_form(await self.read_body(request, remaining_s), boundary, max_images)


def check_size(header: ImageHeader | None, settings: GatewaySettings) -> None:
    """Reject an image whose structure declares too large a size.

    Raises:
        Failure: `invalid_image`, with the limit and the actual size.
    """
    if header is None or header.size_wh is None:
        return
    (width, height), max_pixels, max_side_px = header.size_wh, settings.max_pixels, settings.max_side_px
    if width * height > max_pixels or max(width, height) > max_side_px:
        raise Failure(
            "invalid_image",
            f"{width}×{height} pixels; at most {max_pixels} pixels and {max_side_px} a side are allowed",
        )


def read_form(body: bytes | bytearray, boundary: bytes, max_images: int) -> list[BatchImage]:
    """Return the parts of a multipart body: 1 to `max_images` files, all named `file`.

    Raises:
        Failure: the body is invalid.
    """
    delimiter = b"\r\n--" + boundary
    images, whole = list[BatchImage](), memoryview(body)
    # If the body starts with a delimiter, no line break precedes it.
    at = -2 if body.startswith(delimiter[2:]) else _find(body, delimiter, 0)
    while not body.startswith(b"--", at := at + len(delimiter)):
        if not body.startswith(b"\r\n", at):
            raise _damaged("a boundary has no line of its own")
        if len(images) == max_images:
            raise invalid_request(f"at most {max_images} parts, got more")
        head_end = _find(body, b"\r\n\r\n", at, at + MAX_PART_HEAD_BYTES)
        filename = _filename(bytes(body[at:head_end]))
        at = _find(body, delimiter, head_end + 4)
        images.append(BatchImage(whole[head_end + 4 : at], filename))
    if not images:
        raise _damaged("it has no part 'file'")
    return images


def _find(body: bytes | bytearray, mark: bytes, start: int, end: int | None = None) -> int:
    if (at := body.find(mark, start, end)) == -1:
        raise _damaged("it ends early")
    return at


def _filename(head: bytes) -> str | None:
    fields = (line.partition(b":") for line in head.split(b"\r\n"))
    values = {name.strip().lower(): value for name, _, value in fields}
    _, options = parse_options_header(values.get(b"content-disposition"))
    name = options.get(b"name", b"").decode("utf-8", "replace")
    if name != "file":
        raise invalid_request(f"expected parts with the name 'file', got {name[:64]!r}")
    return options.get(b"filename", b"").decode("utf-8", "replace") or None


def _too_large(max_bytes: int, got: str) -> Failure:
    return Failure("too_large", f"expected a body of at most {format_bytes(max_bytes)}, got {got}")


def _damaged(how: str) -> Failure:
    return invalid_request(f"the multipart body is damaged: {how}")


def body_format_of(request: GatewayRequest, accepted: tuple[BodyFormat, ...]) -> BodyFormat:
    """Return the format of a request's body.

    Raises:
        Failure: the operation does not accept it.
    """
    encoding = request.headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
    if encoding not in ("", "identity"):
        raise Failure("unsupported_media_type", f"Content-Encoding: expected none, got {encoding[:64]!r}")
    content_type = request.headers.get(b"content-type", b"").decode("latin-1")
    media = content_type.partition(";")[0].strip().lower()
    body_format = RAW if media.startswith("image/") or media in RAW_MEDIA_TYPES else media
    for choice in accepted:
        if body_format == choice:
            return choice
    expected = " or ".join(
        "image/* or application/octet-stream" if name == RAW else name for name in accepted
    )
    raise Failure("unsupported_media_type", f"Content-Type must be {expected}, got {media[:64] or 'none'!r}")


async def _decode_image(body: bytes | bytearray) -> memoryview:
    if len(body) > MAX_UNCOUNTED_BYTES:
        await _count_quotes(body, MAX_QUOTES_PER_IMAGE)
        if image := await _from_base64(_decode(_Image, body)):
            return image
    return _decode(ImageBody, body).image


async def _decode_batch(body: bytes | bytearray, max_images: int) -> BatchBody:
    if len(body) <= MAX_UNCOUNTED_BYTES:
        return _decode(BatchBody, body)
    await _count_quotes(body, max_images * MAX_QUOTES_PER_IMAGE)
    batch = _decode(_Batch, body)
    pairs = [(await _from_base64(entry), entry.id) for entry in batch.images]
    if not all(image for image, _ in pairs):
        return _decode(BatchBody, body)
    images = [BatchImage(image, name) for image, name in pairs if image]
    return BatchBody(images, batch.top_k, batch.variant, batch.version, batch.route_key)


async def _from_base64(entry: _Image) -> memoryview | None:
    """Decode an image from a JSON string in pieces; None if it is not base64 or contains escapes."""
    text, image = memoryview(entry.image), bytearray()
    if bytes(text[:1]) != b'"':
        return None
    for at in range(1, len(text) - 1, PIECE_BYTES):
        piece = text[at : min(at + PIECE_BYTES, len(text) - 1)]
        if 4 * len(image) != 3 * (at - 1):  # padding before the end
            return None
        try:
            image += msgspec.json.decode(b'"%b"' % bytes(piece), type=bytes)
        except ValueError:
            return None
        await asyncio.sleep(0)
    return memoryview(image)


async def _count_quotes(body: bytes | bytearray, max_quotes: int) -> None:
    """Reject JSON with too many values, which would cost time and memory."""
    quotes = 0
    for at in range(0, len(body), 8 * PIECE_BYTES):
        quotes += body.count(b'"', at, at + 8 * PIECE_BYTES)
        if quotes > max_quotes:
            raise invalid_request(f"the JSON has more than {max_quotes} quotation marks")
        await asyncio.sleep(0)


def _decode(body_type: type[_Body], body: bytes | bytearray) -> _Body:
    try:
        return msgspec.json.decode(body, type=body_type)
    except (ValueError, RecursionError) as error:  # msgspec's own, or text that is not UTF-8
        raise invalid_request(f"invalid JSON: {error}") from None
