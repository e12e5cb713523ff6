"""An inference request as Triton receives it over HTTP: JSON, then the binary data of its inputs.

Triton receives JSON that is written again from the checked values, and nothing that was not checked.
Source: docs/protocol of triton-inference-server/server, "binary tensor data extension".
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from nereid.base.units import format_bytes
from nereid.gateway.failures import invalid_request
from nereid.gateway.settings import Settings
from nereid.gateway.v2 import tensor_checks as tensors

# A JSON tensor of one network input, [3,224,224], has about 2 MB.
MAX_JSON_BYTES = 8 * 2**20
# Strings cost more to read: texts, never images.
MAX_STRINGS_BYTES, MAX_QUOTES = 2**20, 4 * tensors.MAX_STRINGS
BINARY_SIZE, CLASSIFICATION = "binary_data_size", "classification"
# More JSON takes milliseconds, so it is checked in a thread, in pieces that Python's lock does not hold long.
APART_BYTES = PIECE_BYTES = 2**16
_INTEGERS = {f"INT{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)} | {
    f"UINT{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)
}
# Source: IEEE 754, the largest finite number.
_LIMITS: dict[str, tuple[float, float]] = {
    **_INTEGERS,
    "FP32": (-3.4028234663852886e38, 3.4028234663852886e38),
}
_OF_BOOL, _OF_INTEGERS, _OF_NUMBERS = (msgspec.json.Decoder(list[kind]) for kind in (bool, int, float))  # type: ignore[valid-type]
_SPACES, _NO_NUMBERS = b" \t\r\n", b"[] \t\r\n"
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]")

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Value = bool | Integer | float | str


class Input(msgspec.Struct, omit_defaults=True):
    """An input tensor; its data are JSON, or follow the JSON."""

    name: str
    shape: list[Integer]
    datatype: str
    parameters: dict[str, Value] = {}
    data: msgspec.Raw = msgspec.Raw(b"")


class Output(msgspec.Struct, omit_defaults=True):
    """A requested output tensor."""

    name: str
    parameters: dict[str, Value] = {}


class Inference(msgspec.Struct, omit_defaults=True):
    """An inference request."""

    inputs: list[Input]
    id: str = ""
    outputs: list[Output] = []
    parameters: dict[str, Value] = {}


@dataclass(frozen=True, slots=True)
class CheckedBody:
    """A request that may be sent to Triton.

    Attributes:
        parts: the body.
        json_bytes: length of its JSON; None if nothing follows.
        work: cost of each image, or of each other tensor.
        classified: outputs whose classes are wanted.
    """

    parts: Sequence[bytes | memoryview]
    json_bytes: int | None
    work: list[int]
    classified: list[str]


async def check_body_apart(
    settings: Settings, body: bytes | memoryview, json_bytes: int | None
) -> CheckedBody:
    """Check the body of a request as `check_body` does, without delaying other requests."""
    if (len(body) if json_bytes is None else json_bytes) <= APART_BYTES:
        return check_body(settings, body, json_bytes)
    return await asyncio.to_thread(check_body, settings, body, json_bytes)


def check_body(settings: Settings, body: bytes | memoryview, json_bytes: int | None) -> CheckedBody:
    """Check the body of a request.

    Args:
        settings: limits of images.
        body: the body as received.
        json_bytes: length of its JSON as declared; 0 if the body is the only input, None if all is JSON.

    Raises:
        Failure: the request is invalid.
    """
    if json_bytes == 0:
        image = memoryview(body)
        return CheckedBody([body], 0, [tensors.image_work(settings, image)], [])
    size = len(body) if json_bytes is None else json_bytes
    if size > len(body):
        raise invalid_request(f"expected {size} bytes of JSON, got a body of {len(body)} bytes")
    inference = _read(bytes(body[:size]))
    binary, at = memoryview(body)[size:], 0
    data: list[memoryview | None] = []
    for each in inference.inputs:
        if (length := each.parameters.get(BINARY_SIZE)) is None:
            data.append(None)
            continue
        if each.data or type(length) is not int or not 0 <= length <= len(binary) - at:
            raise invalid_request(
                f"input '{each.name[:128]}': expected {length} binary bytes and no JSON data, "
                f"{len(binary) - at} bytes are left"
            )
        data.append(binary[at : at + length])
        at += length
    if at != len(binary):
        raise invalid_request(f"{len(binary) - at} bytes follow the data of the last input")
    return check(settings, inference, data)


def check(settings: Settings, inference: Inference, data: Sequence[memoryview | None]) -> CheckedBody:
    """Check a request.

    Args:
        settings: limits of images.
        inference: the request.
        data: binary data of each input; None if the data are JSON.

    Raises:
        Failure: the request is invalid.
    """
    if not inference.inputs:
        raise invalid_request("expected at least one input, got none")
    tensors.check_text("the id", inference.id)
    tensors.check_parameters("the request", inference.parameters)
    for what, listed in ("inputs", inference.inputs), ("outputs", inference.outputs):
        tensors.check_count(what, len(listed), tensors.MAX_TENSORS)
        for each in listed:
            tensors.check_text("the name of a tensor", each.name)
            tensors.check_parameters(f"'{each.name[:128]}'", each.parameters)
    work: list[int] = []
    for given, sent in zip(inference.inputs, data, strict=True):
        if sent is None:
            _check_json_data(given)
            work.append(1)
        else:
            work += tensors.work(settings, given.name, given.datatype, given.shape, sent)
    binary = [sent for sent in data if sent is not None]
    classified = [each.name for each in inference.outputs if CLASSIFICATION in each.parameters]
    head = msgspec.json.encode(inference)
    return CheckedBody([head, *binary], len(head) if binary else None, work, classified)


def _read(text: bytes) -> Inference:
    if len(text) > MAX_JSON_BYTES:
        raise invalid_request(
            f"expected at most {format_bytes(MAX_JSON_BYTES)} of JSON, got {format_bytes(len(text))}; "
            "send the data of the inputs as binary data"
        )
    if text.count(b'"') > MAX_QUOTES:
        raise invalid_request(f"expected at most {MAX_QUOTES} quotation marks in the JSON, got more")
    try:
        inference = msgspec.json.decode(text, type=Inference)
    except (ValueError, RecursionError) as error:  # msgspec's own, or text that is not UTF-8
        raise invalid_request(
            f"invalid JSON: {error}; for a body that is the only input, such as an image, send the header "
            "Inference-Header-Content-Length: 0"
        ) from None
    return inference


def _check_json_data(given: Input) -> None:
    """Check the number of elements in JSON, and that each one fits the datatype.

    Between two elements of nested lists is exactly one comma, unless a list is empty.
    """
    name, shape, data = given.name, given.shape, bytes(given.data)
    count = tensors.element_count(name, given.datatype, shape)
    if not data.lstrip().startswith(b"["):
        raise invalid_request(f"input '{name[:128]}': expected `data`, a list, or `binary_data_size`")
    if given.datatype == tensors.BYTES:
        _check_strings(given, count, data)
        return
    if b'"' in data or b"{" in data or b"null" in data:
        raise invalid_request(f"input '{name[:128]}': expected numbers, got other values")
    brackets = _without(_ALL_BUT_BRACKETS, data)
    for _ in range(tensors.MAX_DIMENSIONS):
        brackets = brackets.replace(b"[]", b"")
    if brackets or b"[]" in _without(_SPACES, data):
        raise invalid_request(f"input '{name[:128]}': the lists are empty or nested too deeply")
    tensors.check_elements(name, shape, count, data.count(b",") + 1)
    _check_numbers(name, given.datatype, _without(_NO_NUMBERS, data))


def _without(unwanted: bytes, data: bytes) -> bytes:
    pieces = range(0, len(data), PIECE_BYTES)
    return b"".join([data[at : at + PIECE_BYTES].translate(None, unwanted) for at in pieces])


def _check_numbers(name: str, datatype: str, values: bytes) -> None:
    """Check numbers with commas between them; Triton answers wrong ones as its own fault, or changes them."""
    decoder: msgspec.json.Decoder[Any] = _OF_INTEGERS if datatype in _INTEGERS else _OF_NUMBERS
    low, high = _LIMITS.get(datatype, (-math.inf, math.inf))
    expected = f"numbers from {low:g} to {high:g}" if datatype in _LIMITS else "finite numbers"
    if datatype in _INTEGERS:
        expected = f"whole numbers from {low} to {high}"
    elif datatype == "BOOL":
        decoder, expected = _OF_BOOL, "true or false"
    end = -1
    while end < len(values):
        begin, end = end + 1, values.find(b",", end + PIECE_BYTES)
        end = len(values) if end < 0 else end
        try:
            found = decoder.decode(b"[%b]" % values[begin:end])
        except ValueError as error:
            text = str(error).partition(" - at ")[0]
            got = text.partition(", got ")[2] or text
            raise invalid_request(
                f"input '{name[:128]}': expected {expected} for {datatype}, got {got}"
            ) from None
        if not low <= (wrong := min(found)) or not (wrong := max(found)) <= high:
            raise invalid_request(f"input '{name[:128]}': expected {expected} for {datatype}, got {wrong}")


def _check_strings(given: Input, count: int, data: bytes) -> None:
    if len(data) > MAX_STRINGS_BYTES:
        raise invalid_request(
            f"input '{given.name[:128]}': expected at most {format_bytes(MAX_STRINGS_BYTES)} of text, "
            f"got {format_bytes(len(data))}; send it as binary data"
        )
    try:
        left, texts = [msgspec.json.decode(data)], 0
    except ValueError as error:  # text that is not UTF-8
        raise invalid_request(f"input '{given.name[:128]}': {error}") from None
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, str):
            texts += 1
        else:
            raise invalid_request(f"input '{given.name[:128]}': expected texts, got {type(value).__name__}")
    tensors.check_elements(given.name, given.shape, count, texts)
