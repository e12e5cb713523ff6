"""Requests that end or block Triton 24.10, or take its service from others, and the right responses.

docs/security.md describes them. `python -m loadtest.attack` sends them while a steady client is served.
"""

import http.client
import json
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as v2

from loadtest.attack.costly import COSTLY
from nereid.base.assets import COFFEE

MODEL = "classify"
INFER = f"/v2/models/{MODEL}/infer"
SERVICE = "/inference.GRPCInferenceService/"
TIMEOUT_S = 60.0
CLOSED = "closed"
BAD = frozenset({"400"})
INVALID = frozenset({"INVALID_ARGUMENT"})
UNKNOWN = frozenset({"404"})
NOT_OFFERED = frozenset({"UNIMPLEMENTED"})
# A WebP of 34 bytes that claims 8000 × 8000 pixels.
TINY_WEBP = b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f" + (7999 | 7999 << 14).to_bytes(4, "little") + bytes(9)


@dataclass(frozen=True, slots=True)
class Front:
    """The ports of a guarded server, and the key of the attacker."""

    http_port: int
    grpc_port: int
    key: str


@dataclass(frozen=True, slots=True)
class Attack:
    """A request with the statuses that are right; `send` returns the one that came."""

    name: str
    send: Callable[[Front], str]
    expected: frozenset[str]


def post(front: Front, path: str, body: bytes, headers: Mapping[str, str] = {}) -> str:
    """Send a request; return the status, or `CLOSED` if the connection was closed instead."""
    connection = http.client.HTTPConnection("127.0.0.1", front.http_port, timeout=TIMEOUT_S)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # the response may be there all the same
            connection.request("POST", path, body, {"X-API-Key": front.key, **headers})
        response = connection.getresponse()
        response.read()
        return str(response.status)
    except (ConnectionError, http.client.HTTPException):
        return CLOSED
    finally:
        connection.close()


def infer(front: Front, document: Any, binary: bytes = b"", length: int | None = None) -> str:
    """Send a document as JSON, with binary data behind it."""
    head = document if isinstance(document, bytes) else json.dumps(document).encode()
    sent = {"Inference-Header-Content-Length": str(len(head) if length is None else length)}
    return post(front, INFER, head + binary, sent if binary or length is not None else {})


def send_image(front: Front, make: Callable[[], bytes]) -> str:
    """Send an image without JSON around it."""
    return post(front, INFER, make(), _RAW)


def raw(front: Front, head: bytes, *pieces: bytes) -> str:
    """Send bytes as they are; return the status of the response, or `CLOSED`."""
    key = b"x-api-key: %b\r\n" % front.key.encode()
    with socket.create_connection(("127.0.0.1", front.http_port), TIMEOUT_S) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head.replace(b"\r\n", b"\r\nhost: 127.0.0.1\r\n" + key, 1))
            for piece in pieces:
                connection.sendall(piece)
        try:
            words = connection.recv(4096).split(b" ", 2)
        except ConnectionResetError:
            return CLOSED
    return words[1].decode() if len(words) > 1 else CLOSED


def call(front: Front, name: str, message: bytes, compression: Any = None) -> str:
    """Call a method with the bytes of a message; return the status."""
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}", options) as channel:
        method = channel.unary_unary(name if name.startswith("/") else SERVICE + name)
        try:
            method(message, timeout=TIMEOUT_S, metadata=[("x-api-key", front.key)], compression=compression)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def call_infer(front: Front, request: v2.ModelInferRequest) -> str:
    """Run a request over gRPC."""
    return call(front, "ModelInfer", request.SerializeToString())


def image_input(**changed: Any) -> dict[str, Any]:
    """Return an inference request with changes to its only input."""
    fields = {"name": "image", "shape": [1, 1], "datatype": "BYTES", "data": ["x"], **changed}
    return {"inputs": [{name: value for name, value in fields.items() if value is not None}]}


def message(**changed: Any) -> v2.ModelInferRequest:
    """Return a request over gRPC with changes to its only input."""
    fields = {"name": "image", "shape": [1, 1], "datatype": "BYTES", **changed}
    image = COFFEE.read_bytes()
    contents = [len(image).to_bytes(4, "little") + image]
    inputs = [v2.ModelInferRequest.InferInputTensor(**fields)]
    return v2.ModelInferRequest(model_name=MODEL, inputs=inputs, raw_input_contents=contents)


def nested(front: Front, at: tuple[bytes, bytes]) -> str:
    """Send JSON that is nested 100,000 times between the begin and the end of a request."""
    (begin, end), depth = at, 100_000
    return infer(front, begin + b"[" * depth + b"1" + b"]" * depth + end)


def many_chunks(front: Front) -> str:
    """Send a body of a million chunks of one byte."""
    head = f"POST {INFER} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return raw(front, head, *[b"1\r\n[\r\n" * 10_000] * 100, b"0\r\n\r\n")


def compressed(front: Front) -> str:
    """Send 1 MB that becomes 1 GB."""
    return post(front, INFER, _packed_zeros(), {"Content-Encoding": "gzip"})


@cache
def _packed_zeros() -> bytes:
    packing = zlib.compressobj(9, wbits=31)
    zeros = bytes(2**24)
    return b"".join(packing.compress(zeros) for _ in range(2**30 // len(zeros))) + packing.flush()


def field(number: int, content: bytes) -> bytes:
    """Return an encoded field of a message."""
    size, length = len(content), b""
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def many_texts(front: Front) -> str:
    """Send ten million empty texts as the contents of an input over gRPC."""
    tensor = field(1, b"x") + field(5, field(8, b"") * 10_000_000)
    return call(front, "ModelInfer", field(1, MODEL.encode()) + field(5, tensor))


def many_raw_contents(front: Front) -> str:
    """Send ten million empty raw contents over gRPC."""
    return call(front, "ModelInfer", field(7, b"") * 10_000_000)


def base64_zeros(front: Front) -> str:
    """Send 30 MB of base64 as an image by REST."""
    body = b'{"image":"%b"}' % (b"AAAA" * 7_500_000)
    return post(front, "/predict", body, {"Content-Type": "application/json"})


def classified_text() -> v2.ModelInferRequest:
    """Return a request for the classes of an output of type BYTES."""
    request = message()
    output = request.outputs.add(name="variant")
    output.parameters["classification"].int64_param = 1
    return request


def in_shared_memory() -> v2.ModelInferRequest:
    """Return a request whose input is in a region of shared memory."""
    request = message()
    request.inputs[0].parameters["shared_memory_region"].string_param = "region"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 64
    del request.raw_input_contents[:]
    return request


_POST = f"POST {INFER} HTTP/1.1\r\n".encode()
_INPUT = b'{"inputs":[{"name":"image","shape":[1,1],"datatype":"BYTES","data":'
_CLASSIFIED = {"outputs": [{"name": "variant", "parameters": {"classification": 1}}]}
_REGION = {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 64}}
_SIZED = image_input(data=None, parameters={"binary_data_size": 8})
_NUMBER = _INPUT.replace(b"image", b"x").replace(b"BYTES", b"FP32") + b"[1e999]}]}"
_SHAPES: Sequence[Sequence[int]] = ([0, 1], [2**32 + 1, 1], [-1, 1], [2**63, 2**63], [], [1] * 1000, [2, 1])
_PARAMETERS = (("timeout", 1.5), ("timeout", -1), ("priority", "x"), ("binary_data_output", 1))
_DOCUMENTS = {
    "classes of a text": {**image_input(), **_CLASSIFIED},
    **{f"shape {shape}": image_input(shape=shape) for shape in _SHAPES},
    **{
        f"empty batch of {datatype}": image_input(datatype=datatype, shape=[0, 1], data=[])
        for datatype in ("FP32", "UINT8")
    },
    **{
        f"the parameter {name} = {value!r}": {**image_input(), "parameters": {name: value}}
        for name, value in _PARAMETERS
    },
    "an unknown datatype": image_input(datatype="FP99"),
    "shared memory": image_input(data=None, **_REGION),
    "many inputs": {"inputs": image_input()["inputs"] * 1000},
}
_NESTED = {
    "as a body": (b"", b""),
    "in the data": (_INPUT, b"}]}"),
    "in a parameter": (b'{"inputs":[],"parameters":{"a":', b"}}"),
    "in an unknown field": (b'{"inputs":[],"a":', b"}"),
}
_PATHS = (
    "/v2/repository/index",
    f"/v2/repository/models/{MODEL}/unload",
    "/v2/systemsharedmemory/region/a/register",
    "/v2/cudasharedmemory/region/a/register",
    "/v2/logging",
    "/v2/trace/setting",
    f"/v2/models/{MODEL}/generate",
    f"/v2/models/..%2f{MODEL}/infer",
    f"/v2/models/{MODEL}/versions/1%20/infer",
    f"/v2//models/{MODEL}/infer",
)
_HUGE = b"content-length: 1000000000000000\r\n\r\n"
_MISSING = b"x-request-timeout-ms: 300\r\ncontent-length: 1000\r\n\r\n"
_RAW = {"Inference-Header-Content-Length": "0"}
_BOMB = partial(post, path=INFER, body=TINY_WEBP, headers=_RAW)
HTTP_ATTACKS = (
    *(Attack(f"nested JSON {where}", partial(nested, at=at), BAD) for where, at in _NESTED.items()),
    *(Attack(name, partial(infer, document=document), BAD) for name, document in _DOCUMENTS.items()),
    *(Attack(path, partial(post, path=path, body=b"{}"), UNKNOWN) for path in _PATHS),
    Attack("a million chunks", many_chunks, frozenset({"400", CLOSED})),
    Attack("1 MB that unpacks to 1 GB", compressed, frozenset({"400", "413"})),
    Attack("a length of 1e15", partial(raw, head=_POST + _HUGE), frozenset({"413"})),
    Attack("a body that does not come", partial(raw, head=_POST + _MISSING), frozenset({"408"})),
    Attack("a number that is too large", partial(post, path=INFER, body=_NUMBER), BAD),
    Attack("binary data with a wrong size", partial(infer, document=_SIZED, binary=b"x" * 7), BAD),
    Attack(
        "an element longer than the data", partial(infer, document=_SIZED, binary=b"\xff" * 4 + b"1234"), BAD
    ),
    Attack("more JSON than body", partial(infer, document=image_input(), length=10**9), BAD),
    Attack("30 MB of base64", base64_zeros, frozenset({"400", "429"})),
    Attack("a 34-byte image of 64 megapixels", _BOMB, BAD),
)
_MESSAGES = {
    "classes of a text": classified_text(),
    "shape [0,1]": message(shape=[0, 1]),
    "shape [2^32+1,1]": message(shape=[2**32 + 1, 1]),
    "shape [-1,1]": message(shape=[-1, 1]),
    "an empty batch of FP32": message(shape=[0, 1], datatype="FP32"),
    "an unknown datatype": message(datatype="FP99"),
    "a wrong datatype": message(datatype="FP32"),
    "shared memory": in_shared_memory(),
    "no input": v2.ModelInferRequest(model_name=MODEL),
}
_METHODS = (
    *("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister"),
    *("CudaSharedMemoryRegister", "TraceSetting", "LogSettings", "ModelStreamInfer"),
)
_LONG = partial(call, name="ModelInfer", message=bytes(64 * 2**20))
GRPC_ATTACKS = (
    *(
        Attack(f"gRPC: {name}", partial(call_infer, request=made), INVALID)
        for name, made in _MESSAGES.items()
    ),
    *(Attack(f"gRPC: {name}", partial(call, name=name, message=b""), NOT_OFFERED) for name in _METHODS),
    Attack("gRPC: ten million texts", many_texts, INVALID),
    Attack("gRPC: ten million raw contents", many_raw_contents, INVALID),
    Attack("gRPC: garbage", partial(call, name="ModelInfer", message=b"\xff" * 1000), INVALID),
    Attack("gRPC: a long message", _LONG, INVALID),
    Attack(
        "gRPC: a compressed message",
        partial(_LONG, compression=grpc.Compression.Gzip),
        NOT_OFFERED,
    ),
)
COSTLY_ATTACKS = tuple(
    Attack(name, partial(send_image, make=make), frozenset({"200", "429"})) for name, make in COSTLY.items()
)
ATTACKS = (*HTTP_ATTACKS, *GRPC_ATTACKS, *COSTLY_ATTACKS)
