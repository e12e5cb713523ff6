"""Checks of the tensors of a request, equal for HTTP and gRPC.

Each check protects Triton 24.10 from requests that end or block it; docs/security.md lists them.
"""

from collections.abc import Mapping, Sequence
from math import isfinite, prod
from typing import Any

from nereid.base.contract import IMAGE, RESERVED_PARAMETERS, SCORES
from nereid.gateway import image_size
from nereid.gateway.failures import Failure, invalid_request
from nereid.gateway.settings import Settings
from nereid.vision.imaging.formats.size import read_size, work_of

# Bytes of an element. Source: docs/protocol/README.md of triton-inference-server/server; BYTES has no size.
ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "UINT8", "INT8"), 1),
    **dict.fromkeys(("UINT16", "INT16", "FP16", "BF16"), 2),
    **dict.fromkeys(("UINT32", "INT32", "FP32"), 4),
    **dict.fromkeys(("UINT64", "INT64", "FP64"), 8),
}
BYTES = "BYTES"
MAX_TENSORS, MAX_PARAMETERS, MAX_DIMENSIONS = 64, 64, 16
MAX_TEXT = 1024
MAX_ELEMENTS = 2**31
# Elements of type BYTES, such as words, and images of a batch. Each takes up to 1 µs of the event loop.
MAX_STRINGS, MAX_IMAGES = 8192, 64
LENGTH_BYTES = 4
# Bytes of a numeric tensor that cost about as much as a small photo.
BYTES_PER_UNIT = 2**20
_SHARED_MEMORY = "shared_memory_"
# Parameters that Triton reads. Source: docs/protocol of triton-inference-server/server, the extensions
# classification, binary tensor data, schedule policy and sequence.
_NUMBERS = frozenset({"classification", "priority", "timeout"})
_SEQUENCE = "sequence_id"
MAX_NUMBER = 2**63 - 1
_FLAGS = frozenset({"binary_data", "binary_data_output", "sequence_start", "sequence_end"})


def check_count(what: str, count: int, max_count: int) -> None:
    """Reject too many tensors or parameters.

    Raises:
        Failure: there are more than `max_count`.
    """
    if count > max_count:
        raise invalid_request(f"expected at most {max_count} {what}, got {count}")


def check_text(what: str, text: str) -> None:
    """Reject a long name or id.

    Raises:
        Failure: it has more than `MAX_TEXT` characters, or a null character.
    """
    if len(text) > MAX_TEXT or "\0" in text:
        raise invalid_request(f"{what}: expected at most {MAX_TEXT} characters, and none of them null")


def check_parameters(what: str, parameters: Mapping[str, Any]) -> None:
    """Reject wrong parameters, and shared memory: a caller could name regions of the server.

    Raises:
        Failure: a parameter is not allowed.
    """
    check_count(f"parameters of {what}", len(parameters), MAX_PARAMETERS)
    for name, value in parameters.items():
        check_text("the name of a parameter", name)
        check_text(f"parameter '{name[:128]}'", str(value))
        if name.lower() in RESERVED_PARAMETERS:
            raise invalid_request(f"parameter '{name}' is reserved; a trace comes as the header traceparent")
        if name.startswith(_SHARED_MEMORY):
            raise invalid_request(f"{what}: shared memory cannot be used through the gateway; send the data")
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


def element_count(name: str, datatype: str, shape: Sequence[int]) -> int:
    """Return the number of elements of an input.

    Raises:
        Failure: the datatype is unknown, or the shape is not possible.
    """
    if datatype not in ELEMENT_BYTES and datatype != BYTES:
        raise invalid_request(
            f"input '{name[:128]}': expected a datatype such as FP32 or BYTES, got {datatype[:32]!r}"
        )
    if len(shape) > MAX_DIMENSIONS or any(size < 1 for size in shape):
        raise invalid_request(
            f"input '{name[:128]}': expected a shape of at most {MAX_DIMENSIONS} dimensions of 1 or more, "
            f"got {_listed(shape)}"
        )
    count, max_count = prod(shape), MAX_ELEMENTS
    if datatype == BYTES:
        max_count = MAX_IMAGES if name == IMAGE else MAX_STRINGS
    if count > max_count:
        raise invalid_request(
            f"input '{name[:128]}': expected at most {max_count} elements, got the shape {_listed(shape)}"
        )
    return count


def check_elements(name: str, shape: Sequence[int], count: int, sent: int) -> None:
    """Reject data that do not fit a shape.

    Raises:
        Failure: the shape has `count` elements, but `sent` came.
    """
    if count != sent:
        raise invalid_request(
            f"input '{name[:128]}': the shape {_listed(shape)} has {count} elements, the data have {sent}"
        )


def work(settings: Settings, name: str, datatype: str, shape: Sequence[int], data: memoryview) -> list[int]:
    """Check the binary data of an input; return the cost of each image, or of the whole tensor.

    Args:
        settings: limits of images.
        name, datatype, shape: the input as declared.
        data: its bytes; an element of type BYTES follows its length in four bytes.

    Raises:
        Failure: data and shape disagree, or an image is too large.
    """
    count = element_count(name, datatype, shape)
    if datatype != BYTES:
        expected = count * ELEMENT_BYTES[datatype]
        if len(data) != expected:
            raise invalid_request(
                f"input '{name[:128]}': expected {expected} bytes for {datatype} {_listed(shape)}, "
                f"got {len(data)}"
            )
        return [1 + expected // BYTES_PER_UNIT]
    return elements_work(settings, name, _split(name, shape, count, data))


def elements_work(settings: Settings, name: str, elements: Sequence[memoryview]) -> list[int]:
    """Return the cost of each image of an input `image`, or of another input of type BYTES.

    Raises:
        Failure: an image is too large.
    """
    if name != IMAGE:
        return [1 + sum(map(len, elements)) // BYTES_PER_UNIT]
    if not all(map(len, elements)):
        raise Failure("invalid_image", "the image is empty")
    return [image_work(settings, element) for element in elements]


def image_work(settings: Settings, image: memoryview) -> int:
    """Return the cost of an encoded image in units of a small photo.

    Raises:
        Failure: it is too large.
    """
    size = read_size(image)
    image_size.check(size, settings.max_pixels, settings.max_side_px)
    return work_of(size, settings.max_pixels)


def _split(name: str, shape: Sequence[int], count: int, data: memoryview) -> list[memoryview]:
    """Return the elements of a BYTES tensor; each follows its length."""
    elements, at = list[memoryview](), 0
    for _ in range(count):
        begin = at + LENGTH_BYTES
        at = begin + int.from_bytes(data[at:begin], "little")
        if begin > len(data) or at > len(data):
            raise invalid_request(
                f"input '{name[:128]}': the data end within element {len(elements)} of {_listed(shape)}"
            )
        elements.append(data[begin:at])
    if at != len(data):
        raise invalid_request(f"input '{name[:128]}': {len(data) - at} bytes follow the last element")
    return elements


def check_classification(metadata: Any, outputs: Sequence[str]) -> None:
    """Reject classes of outputs that are not numeric, or that may be empty: Triton 24.10 ends.

    Args:
        metadata: the model's metadata, with `outputs` that have `name`, `datatype` and `shape`.
        outputs: the outputs whose classes are wanted.

    Raises:
        Failure: an output is unknown, of type BYTES, or of variable length, such as lines of text.
    """
    described = {each["name"]: each for each in metadata.get("outputs", ())}
    for name in outputs:
        about = described.get(name, {})
        if (datatype := about.get("datatype")) not in ELEMENT_BYTES:
            found = datatype or "no such output"
            raise invalid_request(f"output '{name[:128]}': classification needs numbers, got {found}")
        # The first dimension is the batch. Scores have one value per class, even if their number is open.
        shape = about.get("shape", ())
        if name != SCORES and -1 in (shape[1:] or shape):
            raise invalid_request(
                f"output '{name[:128]}': classification needs a fixed length, got {_listed(shape)}"
            )


def _listed(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape[:MAX_DIMENSIONS]))}{',…' if len(shape) > MAX_DIMENSIONS else ''}]"
