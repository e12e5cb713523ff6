"""`POST /v1/read` and `POST /v1/waybill`: the text of an image, and the fields of a document."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta, Struct

from nereid.base.assets import PARCEL_LABEL
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InferenceFailed, InvalidConfig, InvalidImage
from nereid.gateway.failures import Failure, invalid_request
from nereid.gateway.http.http_request import JSON, GatewayRequest, GatewayResponse, json_response
from nereid.gateway.state import Gateway
from nereid.gateway.task_endpoint import (
    IMAGE_MEDIA_TYPES,
    ROUTE_PARAMETERS,
    Answered,
    Endpoint,
    Operation,
    TimingsMs,
    run_in_limited_thread,
)
from nereid.tasks.read import pdf
from nereid.tasks.read.fields.specification import read_specification
from nereid.tasks.read.reading_settings import ReadingSettings, fields_path

UTF_8, _ = ENCODINGS = "utf-8", "gbk"
# A point (x, y) and the four corners of a box.
Point = Annotated[list[float], Meta(min_length=2, max_length=2)]
Box = Annotated[list[Point], Meta(min_length=4, max_length=4)]


class TextLineAnswer(Struct):
    """One line: text, confidence in 0..1, and corners in pixels of the upright image from its top left."""

    text: str
    confidence: float
    box: Box
    page: int


class CorrectionAnswer(Struct, rename={"read": "from", "value": "to"}):
    """A character that the checksum of a field corrected, and its position from 0."""

    position: int
    read: str
    value: str


class FieldAnswer(Struct):
    """One field; `value`, `box` and `proof` are null if it was not found, `valid` is null without a checksum.

    If `certain` is true, a checksum proves the value, and no other value is about as likely.
    """

    name: str
    value: str | None
    confidence: float
    box: Box | None
    valid: bool | None
    corrected: list[CorrectionAnswer]
    proof: str | None
    carrier: str | None
    certain: bool
    candidates: list[str]
    page: int


class BarcodeAnswer(Struct):
    """One barcode: text, symbology, corners, and GS1's values by their application identifiers."""

    text: str
    symbology: str
    box: Box
    elements: dict[str, str]
    page: int


class PageAnswer(Struct):
    """The size of a page in pixels; boxes are in these."""

    width: int
    height: int


class ReadAnswer(Answered):
    """The lines of text in an image, in reading order, its barcodes, and the variant that answered."""

    lines: list[TextLineAnswer]
    barcodes: list[BarcodeAnswer]
    pages: list[PageAnswer]
    timings_ms: TimingsMs


class WaybillAnswer(Answered):
    """The fields of a document, its lines of text, and the variant that answered."""

    fields: list[FieldAnswer]
    lines: list[TextLineAnswer]
    barcodes: list[BarcodeAnswer]
    pages: list[PageAnswer]
    timings_ms: TimingsMs


class DocumentField(Struct):
    """A field that a reader of documents finds, and the carriers whose formats it knows."""

    name: str
    required: bool
    carriers: list[str]


async def fields(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """List the fields that a model finds, and the carriers whose numbers it knows."""
    config = await asyncio.to_thread(gateway.models.source.config, request.model.name)
    entries = await asyncio.to_thread(fields_of, config) if config else []
    if not entries:
        raise Failure("not_found", f"this gateway does not know the fields of '{request.model.name}'")
    return json_response(entries)


def fields_of(config: ModelConfig) -> list[DocumentField]:
    """Return the fields that a model finds; none if its file cannot be read, or it reads no documents."""
    try:
        path = fields_path(config, config.settings(ReadingSettings))
        specified = read_specification(path).fields if path else ()
    except (InvalidConfig, OSError):
        return []
    return [
        DocumentField(field.name, field.required, [carrier.name for carrier in field.carriers])
        for field in specified
    ]


async def _respond(
    gateway: Gateway,
    request: GatewayRequest,
    answer: Any,
    parameters: Mapping[str, str],
    image: memoryview,
    cost: int,
) -> GatewayResponse:
    """Return an answer as JSON in the given encoding, or as a searchable PDF.

    Raises:
        Failure: the encoding cannot represent a character of the text, or the PDF cannot be created.
    """
    if parameters.get("format") == "pdf":
        return await _searchable(gateway, request, answer, image, cost)
    response = json_response(answer)
    if parameters.get("encoding", UTF_8) == UTF_8:
        return response
    text = response.body.decode()
    try:
        body = text.encode("gbk")  # the encoding of older Chinese systems
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise Failure(
            "unencodable_text",
            f"GBK has no {ascii(character)[1:-1] if not character.isprintable() else character} "
            f"(U+{ord(character):04X}) at character {error.start}; fix: use encoding=utf-8",
        ) from None
    return GatewayResponse(body, JSON + b"; charset=gbk", headers=[(b"cache-control", b"no-store")])


async def _searchable(
    gateway: Gateway, request: GatewayRequest, answer: Any, image: memoryview, cost: int
) -> GatewayResponse:
    try:
        body = await run_in_limited_thread(
            gateway, request, cost, lambda: pdf.searchable(bytes(image), answer)
        )
    except InvalidImage as error:
        raise invalid_request(f"format=pdf: {error.args[0]}") from None
    except InferenceFailed as error:
        raise Failure("inference_failed", str(error)) from None
    return GatewayResponse(body, PDF.encode(), headers=[(b"cache-control", b"no-store")])


PDF = "application/pdf"
READ = Endpoint(
    "Read the text of one image or document.",
    ReadAnswer,
    parameters={
        **ROUTE_PARAMETERS,
        "encoding": (
            "Encoding of the JSON: utf-8, or gbk, which cannot represent every character.",
            {"type": "string", "enum": list(ENCODINGS)},
        ),
        "format": (
            "Format of the response: json, or pdf, the image or document with text that can be searched.",
            {"type": "string", "enum": ["json", "pdf"]},
        ),
    },
    errors=("unencodable_text",),
    photos={PARCEL_LABEL: "rendered for Nereid"},
    media_types=(*IMAGE_MEDIA_TYPES, PDF),
    respond=_respond,
    other_media_type=PDF,
)
_FIELDS = Operation(
    *("GET", "/v1/fields", fields, "infer", list[DocumentField]), errors=("not_found",), is_of_model=True
)
WAYBILL = replace(
    READ, summary="Read the fields of one document.", response_class=WaybillAnswer, operations=(_FIELDS,)
)
