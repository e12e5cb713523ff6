"""An inference request as Triton receives it over HTTP: checked JSON, then the binary data of its inputs.

The JSON is re-encoded from the checked values, so nothing unchecked reaches Triton. Each check protects
Triton 24.10 from requests that would crash or block it; docs/security.md lists them.
Source: docs/protocol of triton-inference-server/server, "binary tensor data extension".
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Annotated, Any

import msgspec

from nereid.base.contract import DTYPES, IMAGE, RESERVED_PARAMETERS, SCORES
from nereid.base.units import format_bytes
from nereid.gateway.failures import Failure, invalid_request
from nereid.gateway.http.upload import check_size
from nereid.gateway.settings import GatewaySettings
from nereid.vision.imaging.formats.image_header import estimate_header_cost, read_header

# Bytes per element; BYTES has no size.
ELEMENT_BYTES = {"BF16": 2} | {name: int(dtype[-1]) for name, dtype in DTYPES.items()}
BYTES = "BYTES"
MAX_TENSORS, MAX_PARAMETERS, MAX_DIMENSIONS = 64, 64, 16
MAX_TEXT = 1024
MAX_ELEMENTS = 2**31
# Maximum BYTES elements, such as words, and images per batch. Each costs up to 1 µs of event loop time.
MAX_STRINGS, MAX_IMAGES = 8192, 64
LENGTH_BYTES = 4
# Bytes of a numeric tensor that cost about as much as a small photo.
BYTES_PER_UNIT = 2**20
_SHARED_MEMORY = "shared_memory_"
# Parameters read by Triton. Source: docs/protocol of triton-inference-server/server, the extensions
# classification, binary tensor data, schedule policy and sequence.
_NUMBERS = frozenset({"classification", "priority", "timeout"})
_SEQUENCE = "sequence_id"
MAX_NUMBER = 2**63 - 1
_FLAGS = frozenset({"binary_data", "binary_data_output", "sequence_start", "sequence_end"})

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Value = bool | Integer | float | str


class Input(msgspec.Struct, omit_defaults=True):
    """An input tensor; its data is in the JSON or follows it."""

    name: str
    shape: list[Integer]
    datatype: str
    parameters: dict[str, Value] = {}
    data: msgspec.Raw = msgspec.Raw(b"")


class Output(msgspec.Struct, omit_defaults=True):
    """A requested output tensor."""

    name: str
    parameters: dict[str, Value] = {}


class InferenceRequest(msgspec.Struct, omit_defaults=True):
    """An inference request."""

    inputs: list[Input]
    id: str = ""
    outputs: list[Output] = []
    parameters: dict[str, Value] = {}


def invalid_input(tensor: Any, problem: str) -> Failure:
    """Return the error response for an input tensor, in JSON or a message."""
    return invalid_request(f"input '{tensor.name[:128]}': {problem}")


def check_count(items: str, count: int, max_count: int) -> None:
    """Reject too many tensors or parameters.

    Raises:
        Failure: there are more than `max_count`.
    """
    if count > max_count:
        raise invalid_request(f"expected at most {max_count} {items}, got {count}")


def check_text(subject: str, text: str) -> None:
    """Reject a name or id that is too long.

    Raises:
        Failure: it has more than `MAX_TEXT` characters or contains a null character.
    """
    if len(text) > MAX_TEXT or "\0" in text:
        raise invalid_request(f"{subject}: expected at most {MAX_TEXT} characters, and none of them null")


def check_parameters(subject: str, parameters: Mapping[str, Any]) -> None:
    """Reject invalid parameters, and shared memory, because a caller could name the server's regions.

    Raises:
        Failure: a parameter is not allowed.
    """
    check_count(f"parameters of {subject}", len(parameters), MAX_PARAMETERS)
    for name, value in parameters.items():
        check_text("the name of a parameter", name)
        check_text(f"parameter '{name[:128]}'", str(value))
        if name.lower() in RESERVED_PARAMETERS:
            raise invalid_request(f"parameter '{name}' is reserved; send a trace in the header traceparent")
        if name.startswith(_SHARED_MEMORY):
            raise invalid_request(
                f"{subject}: shared memory cannot be used through the gateway; send the data"
            )
        is_number = type(value) is int and 0 <= value <= MAX_NUMBER
        if name in _NUMBERS and not is_number:
            raise invalid_request(
                f"parameter '{name}': expected a whole number from 0 to {MAX_NUMBER}, got {value!r}"
            )
        if name == _SEQUENCE and not is_number and type(value) is not str:
            expected = f"a text, or a whole number from 0 to {MAX_NUMBER}"
            raise invalid_request(f"parameter '{name}': expected {expected}, got {value!r}")
        if type(value) is float and not isfinite(value):
            raise invalid_request(f"parameter '{name[:128]}': expected a finite number, got {value!r}")
        if name in _FLAGS and type(value) is not bool:
            raise invalid_request(f"parameter '{name}': expected true or false, got {value!r}")


def element_count(tensor: Input) -> int:
    """Return the number of elements of an input.

    Raises:
        Failure: the datatype is unknown or the shape is impossible.
    """
    datatype, shape = tensor.datatype, tensor.shape
    if datatype not in ELEMENT_BYTES and datatype != BYTES:
        raise invalid_input(tensor, f"expected a datatype such as FP32 or BYTES, got {datatype[:32]!r}")
    if len(shape) > MAX_DIMENSIONS or any(size < 1 for size in shape):
        expected = f"expected a shape of at most {MAX_DIMENSIONS} dimensions of 1 or more"
        raise invalid_input(tensor, f"{expected}, got {_listed(shape)}")
    count, max_count = prod(shape), MAX_ELEMENTS
    if datatype == BYTES:
        max_count = MAX_IMAGES if tensor.name == IMAGE else MAX_STRINGS
    if count > max_count:
        raise invalid_input(tensor, f"expected at most {max_count} elements, got the shape {_listed(shape)}")
    return count


def check_elements(tensor: Input, count: int, sent: int) -> None:
    """Reject data that does not match its shape.

    Raises:
        Failure: the shape has `count` elements, but `sent` were received.
    """
    if count != sent:
        raise invalid_input(
            tensor, f"the shape {_listed(tensor.shape)} has {count} elements, the data have {sent}"
        )


def tensor_costs(settings: GatewaySettings, tensor: Input, data: memoryview) -> list[int]:
    """Check an input's binary data, and return the cost of each image or of the whole tensor.

    Raises:
        Failure: data and shape disagree, or an image is empty or too large.
    """
    count = element_count(tensor)
    if tensor.datatype != BYTES:
        expected = count * ELEMENT_BYTES[tensor.datatype]
        if len(data) != expected:
            declared = f"{tensor.datatype} {_listed(tensor.shape)}"
            raise invalid_input(tensor, f"expected {expected} bytes for {declared}, got {len(data)}")
        return [1 + expected // BYTES_PER_UNIT]
    elements = _split(tensor, count, data)
    if tensor.name != IMAGE:
        return [1 + sum(map(len, elements)) // BYTES_PER_UNIT]
    if not all(map(len, elements)):
        raise Failure("invalid_image", "the image is empty")
    return [image_cost(settings, element) for element in elements]


def image_cost(settings: GatewaySettings, image: memoryview) -> int:
    """Return the cost of an encoded image in units of a small photo.

    Raises:
        Failure: the image is too large.
    """
    image_header = read_header(image)
    check_size(image_header, settings)
    return estimate_header_cost(image_header, settings.max_pixels)


def _split(tensor: Input, count: int, data: memoryview) -> list[memoryview]:
    """Return the elements of a BYTES tensor; each is preceded by its length in four bytes."""
    elements, at = list[memoryview](), 0
    for _ in range(count):
        begin = at + LENGTH_BYTES
        at = begin + int.from_bytes(data[at:begin], "little")
        if begin > len(data) or at > len(data):
            raise invalid_input(
                tensor, f"the data end within element {len(elements)} of {_listed(tensor.shape)}"
            )
        elements.append(data[begin:at])
    if at != len(data):
        raise invalid_input(tensor, f"{len(data) - at} bytes follow the last element")
    return elements


def check_classification(metadata: Any, outputs: Sequence[str]) -> None:
    """Reject classification of outputs that are not numeric or may be empty, which crashes Triton 24.10.

    Args:
        metadata: the model's metadata, with `outputs` that have `name`, `datatype` and `shape`.
        outputs: the outputs whose classes are requested.

    Raises:
        Failure: an output is unknown, has type BYTES, or has variable length, such as lines of text.
    """
    described = {output["name"]: output for output in metadata.get("outputs", ())}
    for name in outputs:
        about = described.get(name, {})
        if (datatype := about.get("datatype")) not in ELEMENT_BYTES:
            got = datatype or "no such output"
            raise invalid_request(f"output '{name[:128]}': classification needs numbers, got {got}")
        # The first dimension is the batch. Scores have one value per class, even if their number is open.
        shape = about.get("shape", ())
        if name != SCORES and -1 in (shape[1:] or shape):
            raise invalid_request(
                f"output '{name[:128]}': classification needs a fixed length, got {_listed(shape)}"
            )


def _listed(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape[:MAX_DIMENSIONS]))}{',…' if len(shape) > MAX_DIMENSIONS else ''}]"


# A JSON tensor for one network input, [3,224,224], takes about 2 MB.
MAX_JSON_BYTES = 8 * 2**20
# Strings cost more to parse; they are texts, never images.
MAX_STRINGS_BYTES, MAX_QUOTES = 2**20, 4 * MAX_STRINGS
BINARY_SIZE, CLASSIFICATION = "binary_data_size", "classification"
# Larger JSON takes milliseconds, so a thread checks it, in pieces that do not hold Python's lock for long.
APART_BYTES = PIECE_BYTES = 2**16
INTEGER_RANGES = {f"INT{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)} | {
    f"UINT{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)
}
# Source: IEEE 754, the largest finite number.
_LIMITS: dict[str, tuple[float, float]] = {
    **INTEGER_RANGES,
    "FP32": (-3.4028234663852886e38, 3.4028234663852886e38),
}
_OF_BOOL, _OF_INTEGERS, _OF_NUMBERS = (msgspec.json.Decoder(list[kind]) for kind in (bool, int, float))  # type: ignore[valid-type]
_SPACES, _NO_NUMBERS = b" \t\r\n", b"[] \t\r\n"
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]")


@dataclass(frozen=True, slots=True)
class CheckedBody:
    """A request that may be sent to Triton.

    Attributes:
        json_bytes: length of its JSON; None if nothing follows it.
        costs: cost of each image or other tensor.
        classified: outputs whose classes are requested.
    """

    parts: Sequence[bytes | memoryview]
    json_bytes: int | None
    costs: list[int]
    classified: list[str]


async def check_body_apart(
    settings: GatewaySettings, body: bytes | memoryview, json_bytes: int | None
) -> CheckedBody:
    """Check a request body as `check_body` does, without delaying other requests."""
    if (len(body) if json_bytes is None else json_bytes) <= APART_BYTES:
        return check_body(settings, body, json_bytes)
    return await asyncio.to_thread(check_body, settings, body, json_bytes)


def check_body(settings: GatewaySettings, body: bytes | memoryview, json_bytes: int | None) -> CheckedBody:
    """Check the body of a request.

    Args:
        json_bytes: declared length of its JSON; 0 if the body is the only input, None if all of it is JSON.

    Raises:
        Failure: the request is invalid.
    """
    if json_bytes == 0:
        image = memoryview(body)
        return CheckedBody([body], 0, [image_cost(settings, image)], [])
    size = len(body) if json_bytes is None else json_bytes
    if size > len(body):
        raise invalid_request(f"expected {size} bytes of JSON, got a body of {len(body)} bytes")
    if size > MAX_JSON_BYTES:
        raise invalid_request(
            f"expected at most {format_bytes(MAX_JSON_BYTES)} of JSON, got {format_bytes(size)}; "
            "send the data of the inputs as binary data"
        )
    inference = _read(bytes(body[:size]))
    binary, at = memoryview(body)[size:], 0
    data: list[memoryview | None] = []
    for tensor in inference.inputs:
        if (length := tensor.parameters.get(BINARY_SIZE)) is None:
            data.append(None)
            continue
        if tensor.data or type(length) is not int or not 0 <= length <= len(binary) - at:
            expected = f"expected {length} binary bytes and no JSON data"
            raise invalid_input(tensor, f"{expected}, {len(binary) - at} bytes are left")
        data.append(binary[at : at + length])
        at += length
    if at != len(binary):
        raise invalid_request(f"{len(binary) - at} bytes follow the data of the last input")
    return check(settings, inference, data)


def check(
    settings: GatewaySettings, inference: InferenceRequest, data: Sequence[memoryview | None]
) -> CheckedBody:
    """Check a request, given the binary data of each input, or None if the data is JSON.

    Raises:
        Failure: the request is invalid.
    """
    if not inference.inputs:
        raise invalid_request("expected at least one input, got none")
    check_text("the id", inference.id)
    check_parameters("the request", inference.parameters)
    for items, listed in ("inputs", inference.inputs), ("outputs", inference.outputs):
        check_count(items, len(listed), MAX_TENSORS)
        for tensor in listed:
            check_text("the name of a tensor", tensor.name)
            check_parameters(f"'{tensor.name[:128]}'", tensor.parameters)
    costs: list[int] = []
    for input_tensor, sent in zip(inference.inputs, data, strict=True):
        if sent is None:
            _check_json_data(input_tensor)
            costs.append(1)
        else:
            costs += tensor_costs(settings, input_tensor, sent)
    binary = [sent for sent in data if sent is not None]
    classified = [output.name for output in inference.outputs if CLASSIFICATION in output.parameters]
    head = msgspec.json.encode(inference)
    return CheckedBody([head, *binary], len(head) if binary else None, costs, classified)


def _read(text: bytes) -> InferenceRequest:
    if text.count(b'"') > MAX_QUOTES:
        raise invalid_request(f"expected at most {MAX_QUOTES} quotation marks in the JSON, got more")
    try:
        return msgspec.json.decode(text, type=InferenceRequest)
    except (ValueError, RecursionError) as error:  # msgspec's own, or text that is not UTF-8
        raise invalid_request(
            f"invalid JSON: {error}; for a body that is the only input, such as an image, send the header "
            "Inference-Header-Content-Length: 0"
        ) from None


def _check_json_data(tensor: Input) -> None:
    """Check the number of elements in JSON, and that each one fits the datatype.

    Exactly one comma separates two elements of nested lists, unless a list is empty.
    """
    data, count = bytes(tensor.data), element_count(tensor)
    if not data.lstrip().startswith(b"["):
        raise invalid_input(tensor, "expected `data`, a list, or `binary_data_size`")
    if tensor.datatype == BYTES:
        _check_strings(tensor, count, data)
        return
    if b'"' in data or b"{" in data or b"null" in data:
        raise invalid_input(tensor, "expected numbers, got other values")
    brackets = _without(_ALL_BUT_BRACKETS, data)
    for _ in range(MAX_DIMENSIONS):
        brackets = brackets.replace(b"[]", b"")
    if brackets or b"[]" in _without(_SPACES, data):
        raise invalid_input(tensor, "the lists are empty or nested too deeply")
    check_elements(tensor, count, data.count(b",") + 1)
    _check_numbers(tensor, _without(_NO_NUMBERS, data))


def _without(unwanted: bytes, data: bytes) -> bytes:
    pieces = range(0, len(data), PIECE_BYTES)
    return b"".join([data[at : at + PIECE_BYTES].translate(None, unwanted) for at in pieces])


def _check_numbers(tensor: Input, values: bytes) -> None:
    """Check comma-separated numbers; Triton reports wrong ones as its own fault, or alters them."""
    datatype = tensor.datatype
    decoder: msgspec.json.Decoder[Any] = _OF_INTEGERS if datatype in INTEGER_RANGES else _OF_NUMBERS
    low, high = _LIMITS.get(datatype, (-math.inf, math.inf))
    expected = f"numbers from {low:g} to {high:g}" if datatype in _LIMITS else "finite numbers"
    if datatype in INTEGER_RANGES:
        expected = f"whole numbers from {low} to {high}"
    elif datatype == "BOOL":
        decoder, expected = _OF_BOOL, "true or false"
    end = -1
    while end < len(values):
        begin, end = end + 1, values.find(b",", end + PIECE_BYTES)
        end = len(values) if end < 0 else end
        try:
            numbers = decoder.decode(b"[%b]" % values[begin:end])
        except ValueError as error:
            text = str(error).partition(" - at ")[0]
            got = text.partition(", got ")[2] or text
            raise invalid_input(tensor, f"expected {expected} for {datatype}, got {got}") from None
        check_range(tensor, numbers, low, high, expected)


def check_range(tensor: Any, numbers: Sequence[float], low: float, high: float, expected: str) -> None:
    """Check that a tensor's numbers are from `low` to `high`."""
    if not low <= (wrong := min(numbers)) or not (wrong := max(numbers)) <= high:
        raise invalid_input(tensor, f"expected {expected} for {tensor.datatype}, got {wrong}")


def _check_strings(tensor: Input, count: int, data: bytes) -> None:
    if len(data) > MAX_STRINGS_BYTES:
        expected = f"expected at most {format_bytes(MAX_STRINGS_BYTES)} of text"
        raise invalid_input(tensor, f"{expected}, got {format_bytes(len(data))}; send it as binary data")
    try:
        left, texts = [msgspec.json.decode(data)], 0
    except ValueError as error:  # text that is not UTF-8
        raise invalid_input(tensor, str(error)) from None
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, str):
            texts += 1
        else:
            raise invalid_input(tensor, f"expected texts, got {type(value).__name__}")
    check_elements(tensor, count, texts)
