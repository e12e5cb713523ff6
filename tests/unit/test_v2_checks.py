"""Properties of the checks of v2 requests: what they let through is exactly what was checked."""

import asyncio
import copy
import gzip
import json
import re
from contextlib import nullcontext
from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as v2

from nereid.base.contract import DTYPES
from nereid.gateway.failures import Failure
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.v2 import inference_body
from nereid.gateway.v2.http_operations import unpack
from nereid.gateway.v2.message import CONTENTS, MAX_NUMBERS, read_request
from tests.gateways import asynchronous
from tests.tables import cases, rows

SETTINGS = GatewaySettings()
# Values that Triton 24.10 ends or blocks on, among harmless ones.
NAMES = st.sampled_from(["x", "image", "scores", "", "a" * 2000, "\0", "shared_memory_region", "é"])
DATATYPES = st.sampled_from([*inference_body.ELEMENT_BYTES, "BYTES", "", "FP8"])
SIZES = st.sampled_from([1, 2, 3, 0, -1, 2**31, 2**32 + 1, 2**62, 2**63 - 1, -(2**63)])
SHAPES = st.lists(SIZES, max_size=4)
UNUSUAL = st.one_of(
    NAMES,
    DATATYPES,
    SIZES,
    SHAPES,
    st.sampled_from([True, None, {}, 1e308, 2**64, {"shared_memory_region": "x"}, {"a": [[]]}, [[1], []]]),
)


@st.composite
def requests(draw) -> tuple[dict[str, Any], bytes]:
    inputs, binary = [], b""
    for number in range(draw(st.integers(1, 3))):
        datatype = draw(st.sampled_from([*inference_body.ELEMENT_BYTES, "BYTES"]))
        shape = draw(st.lists(st.integers(1, 3), max_size=3))
        count = prod(shape)
        tensor: dict[str, Any] = {"name": f"x{number}", "shape": shape, "datatype": datatype}
        if draw(st.booleans()):
            element = {"BYTES": ["ab", "", "é"][number], "BOOL": bool(number)}.get(datatype, number)
            tensor["data"] = [element] * count
        else:
            text = datatype == "BYTES"
            sent = b"\1\0\0\0x" * count if text else bytes(count * inference_body.ELEMENT_BYTES[datatype])
            tensor["parameters"] = {"binary_data_size": len(sent)}
            binary += sent
        inputs.append(tensor)
    outputs = [{"name": "scores", "parameters": {"classification": 3, "binary_data": True}}]
    return {"id": "1", "parameters": {"timeout": 5}, "inputs": inputs, "outputs": outputs}, binary


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every list or mapping inside a value, with each of its keys."""
    keys = [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [entry for key in keys for entry in places(value[key])]


def checked_or_none(check, *arguments) -> inference_body.CheckedBody | None:
    """Return the result of a check; None for a rejection, which is the only error that it may raise."""
    try:
        return check(SETTINGS, *arguments)
    except Failure:
        return None


def check_message(
    settings: GatewaySettings, message: v2.ModelInferRequest | bytes
) -> inference_body.CheckedBody:
    encoded = message if isinstance(message, bytes) else message.SerializeToString()
    return asyncio.run(read_request(settings, memoryview(encoded)))[-1]


def check_request(tensor: dict[str, Any], binary: bytes = b"", **more: Any) -> inference_body.CheckedBody:
    """Check a request with one input, followed by its binary data."""
    text = json.dumps({"inputs": [{"name": "x", **tensor}], **more}).encode()
    return inference_body.check_body(SETTINGS, text + binary, len(text))


def check_data(datatype: str, data: str) -> inference_body.CheckedBody:
    """Check a request whose numbers are the text `data`."""
    shape = [data.count(",") + 1]
    text = f'{{"inputs": [{{"name": "x", "shape": {shape}, "datatype": "{datatype}", "data": {data}}}]}}'
    return inference_body.check_body(SETTINGS, text.encode(), None)


def check_is_safe(checked: inference_body.CheckedBody) -> None:
    """Check that a body has only what Triton may receive, and that a second check changes nothing."""
    body = b"".join(checked.parts)
    assert b"".join(inference_body.check_body(SETTINGS, body, checked.json_bytes).parts) == body
    if checked.json_bytes == 0:
        return
    at = checked.json_bytes or len(body)
    for tensor in msgspec.json.decode(body[: checked.json_bytes])["inputs"]:
        assert all(size >= 1 for size in tensor["shape"])
        assert prod(tensor["shape"]) <= 2**31
        assert not any(name.startswith("shared_memory") for name in tensor.get("parameters", {}))
        size = tensor.get("parameters", {}).get("binary_data_size")
        if size is None:
            assert tensor["data"]
            continue
        at += size
        if tensor["datatype"] != "BYTES":
            assert size == prod(tensor["shape"]) * inference_body.ELEMENT_BYTES[tensor["datatype"]]
    assert at == len(body)


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(0, 200)))
def test_any_body_is_checked_or_rejected(body, json_bytes):
    if checked := checked_or_none(inference_body.check_body, body, json_bytes):
        check_is_safe(checked)


@cases(
    flag=("FP32", "[true]", "expected numbers from -3.40282e+38 to 3.40282e+38 for FP32, got `bool`"),
    flag_among_integers=("INT8", "[1, true]", "from -128 to 127 for INT8, got `bool`"),
    number_for_a_flag=("BOOL", "[1]", "expected true or false for BOOL, got `int`"),
    not_a_number=("FP32", "[NaN]", "invalid JSON"),
    infinity=("FP64", "[-Infinity]", "invalid JSON"),
    beyond_FP64=("FP64", "[1e999]", "expected finite numbers for FP64, got Number out of range"),
    beyond_FP32=("FP32", "[[1], [1e39]]", "for FP32, got 1e+39"),
    beyond_INT8=("INT8", "[-129]", "from -128 to 127 for INT8, got -129"),
    below_0=("UINT16", "[-1]", "whole numbers from 0 to 65535 for UINT16, got -1"),
    beyond_UINT64=("UINT64", "[18446744073709551616]", "for UINT64, got 18446744073709551616"),
    fraction=("INT32", "[1.5]", "for INT32, got `float`"),
    text=("FP32", '["1"]', "expected numbers, got other values"),
    null=("INT64", "[null]", "expected numbers, got other values"),
    number_for_a_text=("BYTES", "[1]", "expected texts, got int"),
    late=("UINT8", str([1] * 70_000 + [256]), "from 0 to 255 for UINT8, got 256"),
)
def test_value_of_another_type_is_refused(datatype, data, reason):
    """Triton 24.10 takes some for its own fault, and stores others as another number."""
    with pytest.raises(Failure, match=re.escape(reason)) as raised:
        check_data(datatype, data)

    assert raised.value.status == 400


@cases(
    limits=("INT8", "[-128, 127]"),
    large=("UINT64", "[18446744073709551615]"),
    integer_for_FP32=("FP32", "[1, 3.4e38, -0.0]"),
    flags=("BOOL", "[[true], [false]]"),
    spaces=("INT32", "[ [1 , 2],\n[3,\t4]]"),
)
def test_value_of_the_type_is_sent(datatype, data):
    assert data in b"".join(check_data(datatype, data).parts).decode()


@cases(
    fraction=("sequence_id", 1e308),
    below_0=("sequence_id", -1),
    flag=("sequence_id", True),
    priority=("priority", 1.0),
    classes=("classification", "3"),
    start=("sequence_start", 1),
    not_finite=("other", float("inf")),
    not_a_number=("other", float("nan")),
)
def test_parameter_of_another_type_is_refused(name, value):
    with pytest.raises(Failure, match=f"^parameter '{name}': expected ") as raised:
        inference_body.check_parameters("the request", {name: value})

    assert raised.value.status == 400


def words(name: str, count: int, size: int) -> tuple[dict[str, Any], bytes]:
    data = (size.to_bytes(4, "little") + b"x" * size) * (count - 1) + bytes(4)
    parameters = {"binary_data_size": len(data)}
    return {"name": name, "shape": [count], "datatype": "BYTES", "parameters": parameters}, data


def two_numbers(size: int) -> tuple[dict[str, Any], bytes]:
    return {"shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": size}}, bytes(size)


@cases(
    # Elements that only take time.
    empty_image=(words("image", 1, 0), "the image is empty"),
    empty_among_images=(words("image", 2, 0), "the image is empty"),
    many_images=(words("image", 65, 1), "expected at most 64 elements, got the shape [65]"),
    many_empty_images=(words("image", 65_536, 0), "expected at most 64 elements"),
    many_words=(words("words", 8193, 0), "expected at most 8192 elements"),
    too_few_bytes=(two_numbers(7), "expected 8 bytes for FP32 [2], got 7"),
    too_many_bytes=(two_numbers(9), "expected 8 bytes for FP32 [2], got 9"),
    empty_dimension=(({"shape": [0], "datatype": "FP32", "data": []}, b""), "shape"),
)
def test_tensor_that_triton_must_not_get_is_refused(tensor, reason):
    with pytest.raises(Failure, match=re.escape(reason)) as raised:
        check_request(*tensor)

    assert raised.value.status == 400


@asynchronous
async def test_long_check_leaves_the_event_loop():
    """A megabyte of numbers takes some ms: other callbacks run meanwhile."""
    tensor = {"name": "x", "shape": [300_000], "datatype": "FP32", "data": [1] * 300_000}
    text = json.dumps({"inputs": [tensor]})
    checking, turns = asyncio.create_task(inference_body.check_body_apart(SETTINGS, text.encode(), None)), 0
    while not checking.done():
        await asyncio.sleep(0)
        turns += 1

    assert (turns > 2, checking.result().costs) == (True, [1])


@given(requests(), st.data())
def test_any_request_is_checked_or_rejected(request, data):
    content, binary = request
    text = json.dumps(content).encode()
    check_is_safe(inference_body.check_body(SETTINGS, text + binary, len(text)))

    for _ in range(data.draw(st.integers(1, 2))):
        holder, key = data.draw(st.sampled_from(places(content)))
        holder[key] = copy.deepcopy(data.draw(UNUSUAL))
    text = json.dumps(content).encode()
    if checked := checked_or_none(inference_body.check_body, text + binary, len(text)):
        check_is_safe(checked)


@given(st.data(), st.lists(st.integers(1, 4), max_size=4), st.lists(st.integers(1, 4), max_size=4))
def test_json_data_fit_their_shape(data, sent, declared):
    flat = data.draw(st.lists(st.integers(-5, 5), min_size=prod(sent), max_size=prod(sent)))
    values = np.array(flat).reshape(sent or [1]).tolist()
    request = {"inputs": [{"name": "x", "shape": declared, "datatype": "FP32", "data": values}]}

    checked = checked_or_none(inference_body.check_body, json.dumps(request).encode(), None)

    assert (checked is not None) == (prod(sent) == prod(declared))


@given(st.data())
def test_any_message_is_checked_or_rejected(data):
    message = v2.ModelInferRequest(model_name="m")
    for _ in range(data.draw(st.integers(0, 3))):
        datatype, shape = data.draw(DATATYPES), data.draw(SHAPES)
        tensor = message.inputs.add(name=data.draw(NAMES), datatype=datatype, shape=shape)
        count = data.draw(st.sampled_from([0, 1, prod(shape) if 0 < prod(shape) < 100 else 3]))
        field = CONTENTS.get(datatype, "fp32_contents")
        if data.draw(st.booleans()):
            tensor.contents.SetInParent()
            getattr(tensor.contents, field).extend([b"x" if field == "bytes_contents" else 1] * count)
        if data.draw(st.booleans()):
            message.raw_input_contents.append(bytes(count * inference_body.ELEMENT_BYTES.get(datatype, 4)))

    if checked := checked_or_none(check_message, message):
        check_is_safe(checked)


@given(st.data())
def test_damaged_message_is_checked_or_rejected(data):
    message = v2.ModelInferRequest(model_name="m", id="1", raw_input_contents=[b"\x08\x01" * 8])
    message.inputs.add(name="x", datatype="FP32", shape=[2**40, 4])
    message.inputs.add(name="y", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    encoded = bytearray(message.SerializeToString())
    del encoded[data.draw(st.integers(1, len(encoded))) :]
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))

    if checked := checked_or_none(check_message, bytes(encoded)):
        check_is_safe(checked)


def typed_message(count, field="int_contents", datatype="INT8", value=1) -> v2.ModelInferRequest:
    message = v2.ModelInferRequest(model_name="m")
    contents = message.inputs.add(name="x", datatype=datatype, shape=[count]).contents
    getattr(contents, field).extend([b"" if field == "bytes_contents" else value] * count)
    return message


@cases(
    numbers=(typed_message(MAX_NUMBERS + 1), f"at most {MAX_NUMBERS} typed numbers"),
    too_large=(typed_message(1, value=300), "expected whole numbers from -128 to 127 for INT8, got 300"),
    texts=(typed_message(20_000, "bytes_contents", "BYTES"), "at most 16384 fields"),
    raw_contents=(v2.ModelInferRequest(model_name="m", raw_input_contents=[b""] * 600), "at most 512 fields"),
    inputs=(
        v2.ModelInferRequest(model_name="m", inputs=[v2.ModelInferRequest.InferInputTensor()] * 600),
        "at most 512 fields",
    ),
    damaged=(b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "expected a message of"),
)
def test_message_that_is_slow_to_parse_is_refused_before(message, reason):
    """A message of 32 MiB with ten million texts took three seconds of the event loop."""
    with pytest.raises(Failure, match=re.escape(reason)):
        check_message(SETTINGS, message)


@cases(
    a_few_numbers=(typed_message(1000), ["message", "other"]),
    many_numbers=(typed_message(100_000), ["other", "message"]),
    many_texts=(typed_message(8000, "bytes_contents", "BYTES"), ["other", "message"]),
    numbers_of_ten_bytes=(typed_message(210_000, value=-1), ["other", "message"]),
)
@asynchronous
async def test_long_message_does_not_delay_others(message, expected):
    order = []

    async def other() -> None:
        order.append("other")

    async def read() -> None:
        *_, checked = await read_request(SETTINGS, memoryview(message.SerializeToString()))
        order.append("message")
        assert checked.costs == [1]

    await asyncio.gather(read(), other())

    assert order == expected


@pytest.mark.parametrize("datatype", [*CONTENTS])
def test_both_protocols_become_the_same_request(datatype):
    field, values, raw = CONTENTS[datatype], [b"ab", b""], b"\2\0\0\0ab\0\0\0\0"
    if datatype != "BYTES":
        raw = np.array(values := [1, 0], DTYPES[datatype]).tobytes()
    typed, message = (v2.ModelInferRequest(model_name="m") for _ in range(2))
    getattr(typed.inputs.add(name="x", datatype=datatype, shape=[2]).contents, field).extend(values)
    message.inputs.add(name="x", datatype=datatype, shape=[2])
    message.raw_input_contents.append(raw)
    tensor = {"shape": [2], "datatype": datatype, "parameters": {"binary_data_size": len(raw)}}

    checked = [check_message(SETTINGS, request) for request in (typed, message)]
    checked.append(check_request(tensor, raw, parameters={"binary_data_output": True}))

    assert len({b"".join(request.parts) for request in checked}) == 1


@rows(
    ("scores", "FP32", [-1, 1000], ""),
    ("scores", "FP32", [-1, -1], ""),
    ("quality", "FP32", [-1, 1], ""),
    ("confidence", "FP32", [-1, -1], "needs a fixed length, got [-1,-1]"),
    ("confidence", "FP32", [-1], "needs a fixed length, got [-1]"),
    ("box", "FP32", [-1, -1, 4, 2], "needs a fixed length"),
    ("text", "BYTES", [-1, -1], "needs numbers, got BYTES"),
    ("other", "FP32", [-1, 1], "needs numbers, got no such output"),
)
def test_classes_of_what_may_be_empty_are_refused(name, datatype, shape, reason):
    """Triton 24.10 ends if it sorts texts, or nothing."""
    named = "another" if name == "other" else name
    metadata = {"outputs": [{"name": named, "datatype": datatype, "shape": shape}]}

    with pytest.raises(Failure, match=re.escape(reason)) if reason else nullcontext():
        inference_body.check_classification(metadata, [name])


@cases(
    too_large=(gzip.compress(bytes(1001)), "after unpacking, got more"),
    cut=(gzip.compress(bytes(900))[:-1], "ends early"),
    more=(gzip.compress(bytes(900)) + b"x", "followed by other data"),
    damaged=(b"x" * 20, "is damaged"),
)
def test_unpacking_stops_at_the_limit(body, reason):
    assert len(unpack(gzip.compress(bytes(1000)), 1000)) == 1000
    with pytest.raises(Failure, match=reason):
        unpack(body, 1000)
