"""Random changes of real requests. A seed and a number give the same case again."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadtest.attack.attacks import INFER, MODEL, classified_text, image_input, in_shared_memory, message
from nereid.insight.tune import photos

Channel = Literal["HTTP", "JSON", "gRPC"]
MAX_CHANGES = 4
# Small, so that each case that remains valid costs the server little.
PHOTO = photos.jpeg((16, 16))
# Words that parsers treat specially.
TOKENS = (
    *b"0 -1 1e999 4294967297 9223372036854775808 -9223372036854775809 1.5 NaN null true".split(),
    *b'[ ] { } " , : \\ \\ud800 \\u0000 %00 .. / ?'.split(),
    *b"BYTES FP32 BOOL image variant classification binary_data_size shape shared_memory_region".split(),
    *b"binary_data sequence_id priority timeout outputs inputs".split(),
    *(b"[" * 2000, b"\r\n", b"\n", b"\0", b"\xff" * 4, b"\x80" * 9 + b"\x01"),
    *(f"{line}\r\n".encode() for line in ("transfer-encoding: chunked", "content-length: 5")),
    *(f"{line}\r\n".encode() for line in ("inference-header-content-length: 7", "content-encoding: gzip")),
    *(f"{line}\r\n".encode() for line in ("expect: 100-continue", "upgrade: h2c", "connection: close")),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One changed request: the bytes of a whole HTTP request, of a JSON body, or of a gRPC message."""

    channel: Channel
    content: bytes


def _documents() -> list[bytes]:
    numbers = {"name": "input", "shape": [1, 2], "datatype": "FP32", "data": [[1.5, -2]]}
    outputs = [{"name": "scores", "parameters": {"classification": 3, "binary_data": False}}]
    parameters = {"priority": 1, "timeout": 10_000_000, "mine": "text", "flag": True}
    return [
        json.dumps(document).encode()
        for document in (
            image_input(),
            {**image_input(), "id": "7", "outputs": outputs, "parameters": parameters},
            {"inputs": [numbers, *image_input()["inputs"]]},
        )
    ]


def as_request(document: bytes) -> bytes:
    """Return a whole HTTP request with a JSON body."""
    head = f"POST {INFER} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(document)}\r\n\r\n"
    return head.encode() + document


def _http_requests() -> list[bytes]:
    requests = [as_request(document) for document in _documents()]
    binary = json.dumps(image_input(data=None, parameters={"binary_data_size": 5})).encode()
    body = binary + b"\x01\0\0\0x"
    requests.append(
        f"POST /v2/models/{MODEL}/versions/1/infer HTTP/1.1\r\nhost: 127.0.0.1\r\nx-variant: v2\r\n"
        f"inference-header-content-length: {len(binary)}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    requests.append(
        f"POST {INFER} HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
        "inference-header-content-length: 0\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n".encode()
    )
    head = f"POST {INFER} HTTP/1.1\r\nhost: 127.0.0.1\r\ninference-header-content-length: 0\r\n"
    requests.append(f"{head}content-length: {len(PHOTO)}\r\n\r\n".encode() + PHOTO)
    return [*requests, f"GET /v2/models/{MODEL}/config HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()]


def _messages() -> list[bytes]:
    photo, short, typed = message(), message(), message()
    photo.raw_input_contents[0] = len(PHOTO).to_bytes(4, "little") + PHOTO
    short.raw_input_contents[0] = b"\x01\0\0\0x"
    del typed.raw_input_contents[:]
    typed.inputs[0].contents.bytes_contents.append(b"x")
    return [
        call.SerializeToString(deterministic=True)
        for call in (photo, short, typed, classified_text(), in_shared_memory())
    ]


class Mutations:
    """Draws cases; an equal seed gives the same cases again."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._bases: dict[Channel, Sequence[bytes]] = {
            "HTTP": _http_requests(),
            "JSON": _documents(),
            "gRPC": _messages(),
        }

    def next(self) -> Case:
        """Return the next case."""
        channel = self._draw.choice(tuple(self._bases))
        content = bytearray(self._draw.choice(self._bases[channel]))
        for _ in range(self._draw.randint(1, MAX_CHANGES)):
            self._change(content)
        return Case(channel, bytes(content))

    def _change(self, content: bytearray) -> None:
        draw, begin = self._draw, self._draw.randrange(len(content) + 1)
        span = slice(begin, begin + draw.choice((1, 2, 4, 16, 64)))
        match draw.choice(("flip", "delete", "repeat", "insert", "insert", "truncate")):
            case "flip" if content:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            case "delete":
                del content[span]
            case "repeat":
                content[begin:begin] = content[span] * draw.choice((1, 2, 50))
            case "insert":
                content[draw.choice((span, slice(begin, begin)))] = draw.choice(TOKENS)
            case "truncate" if draw.random() < 0.2:
                del content[begin:]
