"""An inference over gRPC as the same inference over HTTP, so that both have the same checks.

The way through Triton's HTTP port is also the faster one: asyncio's gRPC client costs more than HTTP.
"""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from tritonclient.grpc import service_pb2 as v2

from nereid.gateway.failures import invalid_request
from nereid.gateway.settings import Settings
from nereid.gateway.v2 import tensor_checks as tensors
from nereid.gateway.v2.inference_body import (
    BINARY_SIZE,
    CheckedBody,
    Inference,
    Input,
    Output,
    Value,
    check,
)

# perf_analyzer sends it with every request. It is for streams, and Triton's HTTP port rejects it.
EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
# The field of InferTensorContents, and NumPy's type, for each datatype. Source: grpc_service.proto.
CONTENTS = {
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "i1"),
    "INT16": ("int_contents", "<i2"),
    "INT32": ("int_contents", "<i4"),
    "INT64": ("int64_contents", "<i8"),
    "UINT8": ("uint_contents", "u1"),
    "UINT16": ("uint_contents", "<u2"),
    "UINT32": ("uint_contents", "<u4"),
    "UINT64": ("uint64_contents", "<u8"),
    "FP32": ("fp32_contents", "<f4"),
    "FP64": ("fp64_contents", "<f8"),
    tensors.BYTES: ("bytes_contents", ""),
}


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}


class _Answer(msgspec.Struct):
    model_name: str
    model_version: str
    outputs: list[_Output]
    id: str = ""
    parameters: dict[str, Any] = {}


def check_message(settings: Settings, given: v2.ModelInferRequest) -> CheckedBody:
    """Check a request.

    Raises:
        Failure: the request is invalid.
    """
    for what, listed in ("inputs", given.inputs), ("outputs", given.outputs):
        tensors.check_count(what, len(listed), tensors.MAX_TENSORS)
    data = [memoryview(each) for each in _contents(given)]
    inputs = [
        Input(each.name, list(each.shape), each.datatype, {**_values(each), BINARY_SIZE: len(sent)})
        for each, sent in zip(given.inputs, data, strict=True)
    ]
    outputs = [Output(each.name, {**_values(each), "binary_data": True}) for each in given.outputs]
    parameters = {**_values(given), "binary_data_output": True}
    parameters.pop(EMPTY_FINAL_RESPONSE, None)
    return check(settings, Inference(inputs, given.id, outputs, parameters), data)


def to_message(body: bytes, json_bytes: int) -> v2.ModelInferResponse:
    """Return Triton's HTTP response as a message.

    Args:
        body: JSON, and the binary data of the outputs.
        json_bytes: length of the JSON.
    """
    answer = msgspec.json.decode(body[:json_bytes], type=_Answer)
    message = v2.ModelInferResponse(
        model_name=answer.model_name, model_version=answer.model_version, id=answer.id
    )
    at = json_bytes
    for each in answer.outputs:
        message.outputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        end = at + int(each.parameters.get(BINARY_SIZE, 0))
        message.raw_output_contents.append(body[at:end])
        at = end
    return message


def _values(given: Any) -> dict[str, Value]:
    """Return the parameters of a request or tensor."""
    found = {name: (value.WhichOneof("parameter_choice"), value) for name, value in given.parameters.items()}
    return {name: getattr(value, kind) for name, (kind, value) in found.items() if kind}


def _contents(given: v2.ModelInferRequest) -> Sequence[bytes]:
    """Return the binary data of the inputs."""
    typed = [each for each in given.inputs if each.HasField("contents")]
    raw = given.raw_input_contents
    if len(typed) == len(given.inputs) and not raw:
        return [_typed_contents(each) for each in typed]
    if typed or len(raw) != len(given.inputs):
        raise invalid_request(
            f"expected {len(given.inputs)} raw contents or {len(given.inputs)} typed contents, "
            f"got {len(raw)} and {len(typed)}"
        )
    return list(raw)


def _typed_contents(given: Any) -> bytes:
    if given.datatype not in CONTENTS:
        raise invalid_request(
            f"input '{given.name[:128]}': expected raw contents for {given.datatype[:32]!r}, got typed ones"
        )
    field, dtype = CONTENTS[given.datatype]
    filled = {each.name: value for each, value in given.contents.ListFields()}
    if filled.keys() - {field}:
        raise invalid_request(
            f"input '{given.name[:128]}': expected {given.datatype[:32]} in {field}, got {', '.join(filled)}"
        )
    values = filled.get(field, ())
    if given.datatype == tensors.BYTES:
        return b"".join(struct.pack("<I", len(each)) + each for each in values)
    try:
        return np.array(values, dtype).tobytes()
    except OverflowError as error:
        raise invalid_request(f"input '{given.name[:128]}': {error}") from None
