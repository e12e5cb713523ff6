"""Conversion of gRPC inferences to HTTP, so that both go through the same checks.

Going through Triton's HTTP port is also faster, because the asyncio gRPC client costs more than HTTP.
"""

import asyncio
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2 as v2

from nereid.base.contract import DTYPES
from nereid.gateway.failures import invalid_request
from nereid.gateway.inference import checked_path
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.v2 import inference_body
from nereid.gateway.v2.inference_body import (
    BINARY_SIZE,
    BYTES,
    INTEGER_RANGES,
    MAX_STRINGS,
    MAX_TENSORS,
    CheckedBody,
    InferenceRequest,
    Input,
    Output,
    Value,
    check_count,
    check_range,
    invalid_input,
)

# perf_analyzer sends it with every request. It applies to streams, and Triton's HTTP port rejects it.
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
# The InferTensorContents field of each datatype. Source: grpc_service.proto.
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
# Field numbers of ModelInferRequest, its inputs and their contents. Source: grpc_service.proto.
_INPUTS = 5
_RAW = 7
_CONTENTS = 5
_BYTES = 8
_NUMBER_BYTES = {6: 4, 7: 8}
# By wire type; group wire types do not occur.
_FIXED_BYTES = {1: 8, 5: 4}
# Maximum fields of a request, such as tensors; fields of an input, such as texts; numbers in typed contents.
MAX_FIELDS, MAX_TEXTS, MAX_NUMBERS = 512, 2 * MAX_STRINGS, 2**21
# Longer inputs are parsed in a thread, in pieces that do not hold Python's lock for long.
PIECE = 2**13


async def read_request(settings: GatewaySettings, message: memoryview) -> tuple[str, str, CheckedBody]:
    """Parse and check a request without delaying others; raw contents are not copied.

    Returns:
        The name of the model, Triton's path for it, and the request that may be sent there.

    Raises:
        Failure: the request is invalid.
    """
    raw, inputs, other_fields = list[memoryview](), list[memoryview](), list[memoryview]()
    for field_number, encoded, content in _fields(message, MAX_FIELDS):
        if field_number == _RAW:
            raw.append(content)
            continue
        other_fields.append(encoded)
        if field_number == _INPUTS:
            inputs.append(content)

    def checked() -> tuple[str, str, CheckedBody]:
        if sum(map(_count, inputs)) > MAX_NUMBERS:
            raise invalid_request(
                f"expected at most {MAX_NUMBERS} typed numbers, got more; send raw contents"
            )
        request = parse_message(v2.ModelInferRequest, b"".join(other_fields))
        path = checked_path(request.model_name, request.model_version)
        return request.model_name, path, check_message(settings, request, raw)

    if sum(map(len, inputs)) <= PIECE:
        return checked()
    parsing = asyncio.ensure_future(asyncio.to_thread(checked))
    try:
        return await asyncio.shield(parsing)
    finally:
        if not parsing.done():  # a cancelled call's bytes count until its thread has released them
            await asyncio.wait([parsing])


def _fields(message: memoryview, max_fields: int) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Yield each field's number, encoding and content. Source: protobuf.dev/programming-guides/encoding.

    Raises:
        Failure: the message is damaged or has too many fields, each of which costs time.
    """
    end = count = 0
    try:
        while end < len(message):
            begin, (tag, start) = end, _varint(message, end)
            match tag & 7:
                case 0:
                    _, end = _varint(message, start)
                case 2:
                    size, start = _varint(message, start)
                    end = start + size
                case kind:
                    end = start + _FIXED_BYTES[kind]
            count += 1
            if end > len(message) or count > max_fields:
                raise LookupError
            yield tag >> 3, message[begin:end], message[start:end]
    except LookupError:
        raise invalid_request(f"expected a message of at most {max_fields} fields") from None


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number and the offset where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise LookupError


def _count(encoded: memoryview) -> int:
    """Return the maximum number of values that an encoded input can hold, including its texts."""
    if len(encoded) <= PIECE:
        return len(encoded)
    count = 0
    for field_number, _, content in _fields(encoded, MAX_TEXTS):
        for kind, _, values in _fields(content, MAX_TEXTS) if field_number == _CONTENTS else ():
            count += 1
            if size := _NUMBER_BYTES.get(kind):
                count += len(values) // size
            elif kind != _BYTES:  # a varint's last byte is below 0x80
                count += int(np.count_nonzero(np.frombuffer(values, np.uint8) < 0x80))
    return count


def parse_message(kind: type[Message], message: bytes | memoryview) -> Any:
    """Parse a message.

    Raises:
        Failure: the message is damaged.
    """
    try:
        return kind.FromString(message)
    except DecodeError:
        raise invalid_request(f"expected a message {kind.DESCRIPTOR.name}") from None


def check_message(
    settings: GatewaySettings, request: v2.ModelInferRequest, raw: Sequence[bytes | memoryview]
) -> CheckedBody:
    """Check a request and its raw contents.

    Raises:
        Failure: the request is invalid.
    """
    for items, listed in ("inputs", request.inputs), ("outputs", request.outputs):
        check_count(items, len(listed), MAX_TENSORS)
    data = [memoryview(content) for content in _contents(request, raw)]
    inputs = [
        Input(tensor.name, list(tensor.shape), tensor.datatype, {**_values(tensor), BINARY_SIZE: len(sent)})
        for tensor, sent in zip(request.inputs, data, strict=True)
    ]
    outputs = [Output(output.name, {**_values(output), "binary_data": True}) for output in request.outputs]
    parameters = {**_values(request), "binary_data_output": True}
    parameters.pop(EMPTY_FINAL_RESPONSE, None)
    return inference_body.check(settings, InferenceRequest(inputs, request.id, outputs, parameters), data)


def to_message(body: bytes, json_bytes: int) -> v2.ModelInferResponse:
    """Return Triton's HTTP response as a message; binary data of the outputs follows the JSON."""
    answer = msgspec.json.decode(body[:json_bytes])
    message = v2.ModelInferResponse(
        model_name=answer["model_name"], model_version=answer["model_version"], id=answer.get("id", "")
    )
    at = json_bytes
    for output in answer["outputs"]:
        message.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        end = at + output.get("parameters", {}).get(BINARY_SIZE, 0)
        message.raw_output_contents.append(body[at:end])
        at = end
    return message


def _values(message: Any) -> dict[str, Value]:
    """Return the parameters of a request or tensor."""
    kinds = {
        name: (value.WhichOneof("parameter_choice"), value) for name, value in message.parameters.items()
    }
    return {name: getattr(value, kind) for name, (kind, value) in kinds.items() if kind}


def _contents(
    request: v2.ModelInferRequest, raw: Sequence[bytes | memoryview]
) -> Sequence[bytes | memoryview]:
    """Return the binary data of the inputs."""
    typed = [tensor for tensor in request.inputs if tensor.HasField("contents")]
    if len(typed) == len(request.inputs) and not raw:
        return [_typed_contents(tensor) for tensor in typed]
    if typed or len(raw) != len(request.inputs):
        raise invalid_request(
            f"expected {len(request.inputs)} raw contents or {len(request.inputs)} typed contents, "
            f"got {len(raw)} and {len(typed)}"
        )
    return raw


def _typed_contents(tensor: Any) -> bytes:
    if tensor.datatype not in CONTENTS:
        raise invalid_input(tensor, f"expected raw contents for {tensor.datatype[:32]!r}, got typed contents")
    field = CONTENTS[tensor.datatype]
    filled = {descriptor.name: value for descriptor, value in tensor.contents.ListFields()}
    if filled.keys() - {field}:
        raise invalid_input(tensor, f"expected {tensor.datatype[:32]} in {field}, got {', '.join(filled)}")
    values = filled.get(field, ())
    if tensor.datatype == BYTES:
        return b"".join(struct.pack("<I", len(element)) + element for element in values)
    packed = []
    for at in range(0, len(values), PIECE):  # in pieces, so that other threads can acquire Python's lock
        piece = values[at : at + PIECE]
        if tensor.datatype in INTEGER_RANGES:
            low, high = INTEGER_RANGES[tensor.datatype]
            check_range(tensor, piece, low, high, f"whole numbers from {low} to {high}")
        packed.append(np.array(piece, DTYPES[tensor.datatype]).tobytes())
    return b"".join(packed)
