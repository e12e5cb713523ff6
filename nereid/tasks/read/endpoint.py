"""`POST /v1/read` and `POST /v1/waybill`: the text of an image, and the fields of a document."""

import asyncio
from typing import Annotated, Any

from msgspec import Meta, Struct

from nereid.gateway.answers import TimingsMs
from nereid.gateway.failures import Failure, invalid_request
from nereid.gateway.gateway_task import READ, WAYBILL, GatewayTask
from nereid.gateway.http.http_request import JSON, GatewayRequest, GatewayResponse, json_response
from nereid.gateway.predict import ROUTE_PARAMETERS, answer_one
from nereid.gateway.state import Gateway
from nereid.tasks.read.result import Corners, Field, Reading
from nereid.tasks.read.text_encoding import NotInEncoding, encode_gbk

PARAMETERS = (*ROUTE_PARAMETERS, "encoding")
UTF_8, _ = ENCODINGS = "utf-8", "gbk"
# A point (x, y) and the four corners of a box.
Point = Annotated[list[float], Meta(min_length=2, max_length=2)]
Box = Annotated[list[Point], Meta(min_length=4, max_length=4)]


class TextLineAnswer(Struct):
    """One line: text, confidence in 0..1, and corners in pixels of the upright image from its top left."""

    text: str
    confidence: float
    box: Box


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


class BarcodeAnswer(Struct):
    """One barcode: text, symbology, corners, and GS1's values by their application identifiers."""

    text: str
    symbology: str
    box: Box
    elements: dict[str, str]


class ReadAnswer(Struct):
    """The lines of text in an image, in reading order, its barcodes, and the variant that answered."""

    request_id: str
    model: str
    variant: str
    version: str
    reason: str
    lines: list[TextLineAnswer]
    barcodes: list[BarcodeAnswer]
    timings_ms: TimingsMs


class WaybillAnswer(Struct):
    """The fields of a document, its lines of text, and the variant that answered."""

    request_id: str
    model: str
    variant: str
    version: str
    reason: str
    fields: list[FieldAnswer]
    lines: list[TextLineAnswer]
    barcodes: list[BarcodeAnswer]
    timings_ms: TimingsMs


async def read(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Read the text of one image."""
    found, timings, encoding = await _found(gateway, request, READ)
    return _encoded(ReadAnswer(*_source(request, found), _lines(found), _barcodes(found), timings), encoding)


async def waybill(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Read the fields of one document."""
    found, timings, encoding = await _found(gateway, request, WAYBILL)
    fields = [_field(each) for each in found.fields]
    answer = WaybillAnswer(*_source(request, found), fields, _lines(found), _barcodes(found), timings)
    return _encoded(answer, encoding)


async def fields(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """List the fields that a model finds, and the carriers whose numbers it knows."""
    found = await asyncio.to_thread(gateway.models.fields, request.model.name)
    if found is None:
        raise Failure("not_found", f"this gateway does not know the fields of '{request.model.name}'")
    return json_response(found)


async def _found(
    gateway: Gateway, request: GatewayRequest, task: GatewayTask
) -> tuple[Reading, TimingsMs, str]:
    given = request.query(PARAMETERS)
    encoding = given.get("encoding", UTF_8).lower()
    if encoding not in ENCODINGS:
        raise invalid_request(f"encoding must be one of {', '.join(ENCODINGS)}, got {encoding[:32]!r}")
    found, timings = await answer_one(gateway, request, task, given)
    return found, timings, encoding


def _source(request: GatewayRequest, found: Reading) -> tuple[str, str, str, str, str]:
    return request.request_id, found.model, found.variant, found.version, found.reason


def _lines(found: Reading) -> list[TextLineAnswer]:
    return [TextLineAnswer(line.text, line.confidence, _box(line.box)) for line in found.lines]


def _barcodes(found: Reading) -> list[BarcodeAnswer]:
    return [
        BarcodeAnswer(each.text, each.symbology, _box(each.box), each.elements) for each in found.barcodes
    ]


def _field(field: Field) -> FieldAnswer:
    corrected = [CorrectionAnswer(each.position, each.read, each.value) for each in field.corrected]
    box = None if field.box is None else _box(field.box)
    known = field.proof, field.carrier, field.certain, [*field.candidates]
    return FieldAnswer(field.name, field.value, field.confidence, box, field.valid, corrected, *known)


def _box(corners: Corners) -> list[list[float]]:
    return [[*point] for point in corners]


def _encoded(answer: Any, encoding: str) -> GatewayResponse:
    """Return an answer as JSON in an encoding.

    Raises:
        Failure: the encoding has no form for a character of the text.
    """
    response = json_response(answer)
    if encoding == UTF_8:
        return response
    try:
        body = encode_gbk(response.body.decode())
    except NotInEncoding as error:
        raise Failure("unencodable_text", str(error)) from None
    return GatewayResponse(body, JSON + b"; charset=gbk", headers=[(b"cache-control", b"no-store")])
