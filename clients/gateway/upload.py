"""The images in a request's body: raw, in a form, or as base64 in JSON; limits hold while it is read."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from clients.gateway.errors import Failure
from clients.gateway.exchange import Exchange
from clients.gateway.settings import Settings

Kind = Literal["raw", "multipart/form-data", "application/json"]
RAW: Kind = "raw"
FORM: Kind = "multipart/form-data"
JSON: Kind = "application/json"
# The last one is what `curl --data-binary` says unless told otherwise.
OCTETS = ("", "application/octet-stream", "application/x-www-form-urlencoded")
MOST_TOP_K = 1000
TopK = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOP_K)]


class ClientClosed(Exception):
    """The client has gone; nobody waits for an answer."""


class ImageBody(msgspec.Struct, forbid_unknown_fields=True):
    """One image, an encoded file as base64."""

    image: bytes


class BatchImage(msgspec.Struct, forbid_unknown_fields=True):
    """One image of several; its id is repeated with its result, and is its place if there is none."""

    image: bytes
    id: str | int | None = None


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """Several images and how all of them are classified."""

    images: Annotated[list[BatchImage], msgspec.Meta(min_length=1)]
    top_k: TopK | None = None
    variant: str = ""
    version: str = ""
    route_key: str = ""


class Buffers:
    """How much memory the bodies of all requests may take together."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes

    def take(self, size_bytes: int) -> None:
        """Count bytes that have come.

        Raises:
            Failure: `overloaded`, there is no room for them.
        """
        if size_bytes > self._left_bytes:
            raise Failure("overloaded", "too many bytes of other requests are here; come later", 1.0)
        self._left_bytes -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count bytes that are no longer kept."""
        self._left_bytes += size_bytes


class Uploads:
    """Reads bodies within the limits of the settings; `buffers` are given back when a request has ended."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.buffers = Buffers(settings.max_buffered_bytes)

    async def one(self, exchange: Exchange, remaining_s: float) -> bytes:
        """Read the body of a request for one image.

        Raises:
            Failure: the body is not as it should be, too large, or late.
            ClientClosed: it will never be complete.
        """
        kind = kind_of(exchange, (RAW, FORM, JSON))
        if kind == FORM:
            return (await self._form(exchange, remaining_s, 1))[0].image
        body = await self._whole(exchange, remaining_s)
        image = body if kind == RAW else _decode(ImageBody, body).image
        if not image:
            raise Failure("invalid_image", "there are no bytes in it")
        return image

    async def several(self, exchange: Exchange, remaining_s: float) -> BatchBody:
        """Read the body of a request for several images.

        Raises:
            Failure: the body is not as it should be, too large, or late.
            ClientClosed: it will never be complete.
        """
        most = self._settings.max_images
        if kind_of(exchange, (FORM, JSON)) == FORM:
            return BatchBody(await self._form(exchange, remaining_s, most))
        batch: BatchBody = _decode(BatchBody, await self._whole(exchange, remaining_s))
        if len(batch.images) > most:
            raise Failure("invalid_request", f"at most {most} images, got {len(batch.images)}")
        return batch

    async def json(self, exchange: Exchange, remaining_s: float, kind: Any) -> Any:
        """Read a JSON body of a kind.

        Raises:
            Failure: the body is not as it should be, too large, or late.
            ClientClosed: it will never be complete.
        """
        kind_of(exchange, (JSON,))
        return _decode(kind, await self._whole(exchange, remaining_s))

    async def _whole(self, exchange: Exchange, remaining_s: float) -> bytes:
        chunks: list[bytes] = []
        await self._read(exchange, remaining_s, chunks.append)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _form(self, exchange: Exchange, remaining_s: float, most: int) -> list[BatchImage]:
        form = Form(most)
        _, options = parse_options_header(exchange.headers[b"content-type"])
        try:
            parser = MultipartParser(options.get(b"boundary", b""), form.callbacks())  # type: ignore[arg-type]
            await self._read(exchange, remaining_s, parser.write)
            parser.finalize()
        except (FormParserError, ValueError) as error:
            raise Failure("invalid_request", f"the multipart body is damaged: {error}") from None
        if not (form.is_complete and form.images):
            raise Failure("invalid_request", "the multipart body ends early, or has no part 'file'")
        return form.images

    async def _read(self, exchange: Exchange, remaining_s: float, take: Callable[[bytes], Any]) -> None:
        most = self._settings.max_body_bytes
        declared = exchange.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > most:
            raise Failure("too_large", f"the body may have {most} bytes, it has {int(declared)}")
        try:
            async with asyncio.timeout(remaining_s):
                while True:
                    message = await exchange.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientClosed
                    chunk = message.get("body", b"")
                    if exchange.body_bytes + len(chunk) > most:
                        raise Failure("too_large", f"the body may have {most} bytes, it has more")
                    self.buffers.take(len(chunk))
                    exchange.body_bytes += len(chunk)
                    take(chunk)
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            raise Failure("body_timeout", f"the body did not come within {remaining_s:.3g} s") from None


class Form:
    """The parts of a multipart body: up to `most` files, all of them called `file`."""

    def __init__(self, most: int) -> None:
        self.images: list[BatchImage] = []
        self.is_complete = False
        self._most = most
        self._name = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._data = bytearray()

    def callbacks(self) -> dict[str, Callable[..., None]]:
        """Return what `MultipartParser` calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._check,
            "on_part_data": self._add_data,
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def _begin(self) -> None:
        self._headers, self._data = {}, bytearray()
        if len(self.images) == self._most:
            raise Failure("invalid_request", f"at most {self._most} parts, got more")

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _check(self) -> None:
        _, self._options = parse_options_header(self._headers.get(b"content-disposition"))
        name = self._options.get(b"name", b"").decode("utf-8", "replace")
        if name != "file":
            raise Failure("invalid_request", f"a part is called 'file', got {name[:64]!r}")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]

    def _end(self) -> None:
        filename = self._options.get(b"filename", b"").decode("utf-8", "replace")
        self.images.append(BatchImage(bytes(self._data), filename or None))

    def _complete(self) -> None:
        self.is_complete = True


def kind_of(exchange: Exchange, known: tuple[Kind, ...]) -> Kind:
    """Return what kind of body a request has.

    Raises:
        Failure: one that is not known here.
    """
    encoding = exchange.header(b"content-encoding").strip().lower()
    if encoding not in ("", "identity"):
        raise Failure("unsupported_media_type", f"the body must not be encoded, got {encoding[:64]!r}")
    media = exchange.header(b"content-type").partition(";")[0].strip().lower()
    kind = RAW if media.startswith("image/") or media in OCTETS else media
    for each in known:
        if kind == each:
            return each
    raw = "image/*, application/octet-stream, " if RAW in known else ""
    raise Failure(
        "unsupported_media_type", f"Content-Type must be {raw}{FORM} or {JSON}, got {media[:64] or 'none'!r}"
    )


def _decode(kind: Any, body: bytes) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Failure("invalid_request", f"the JSON is not as it should be: {error}") from None
