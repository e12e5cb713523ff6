"""Request options: their validation, and their conversion for tritonclient. No I/O."""

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import numpy as np
import tritonclient.grpc

from nereid.base.addresses import unix_path
from nereid.base.contract import GRPC_PORT, HTTP_PORT, IMAGE, KEY_HEADER, OPTION_HEADERS

ProtocolName = Literal["grpc", "http"]
MemoryKind = Literal["system", "cuda"]
Headers = Mapping[str, str]
NO_HEADERS: Headers = {}
DEFAULT_PORTS: dict[ProtocolName, int] = {"http": HTTP_PORT, "grpc": GRPC_PORT}
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_CONCURRENCY = 8
# The transport sets the framing headers; gRPC reserves the prefix `grpc-`, and the suffix `-bin` for bytes.
HEADER_NAME = re.compile(r"(?!grpc-)[a-z0-9_.-]+(?<!-bin)")
FRAMING_HEADER = re.compile(
    "accept-encoding|connection|content-encoding|content-length|expect|inference-header-content-length|te|"
    "trailer|transfer-encoding|upgrade"
)
# Images per request until the server reports its limit.
NO_LIMIT = 2**31
# One day; Triton expects an integer of µs.
MAX_TIMEOUT_S = 86_400.0
# Reconnect soon after a broken connection: gRPC's default starts at a second and grows.
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@dataclass(frozen=True, slots=True)
class HttpInput:
    """The input `image` of an HTTP request; tritonclient's own class would copy the images twice.

    `parts` is the binary data, `binary_data_size` bytes in total.
    """

    images: int
    parameters: Mapping[str, Any]
    parts: Sequence[bytes]

    def document(self) -> dict[str, Any]:
        """Return the tensor in the JSON of a request."""
        return {"name": IMAGE, "shape": [self.images, 1], "datatype": "BYTES", "parameters": self.parameters}


class RequestOptions(TypedDict, total=False):
    """Options of one request; each is optional.

    Attributes:
        variant: name of the route's variant that must respond.
        version: version of the network that must respond.
        route_key: sticky identity: the same key always gets the same variant.
        timeout_s: time limit for all attempts together, in seconds; the server is sent the time remaining.
        request_id: printable ASCII, repeated in the response; random by default.
        headers: additional headers, such as `x-route-group` for a route's rules, or `traceparent`.
    """

    variant: str
    version: str
    route_key: str
    timeout_s: float
    request_id: str
    headers: Mapping[str, str]


class Options(RequestOptions, total=False):
    """Options of one classification request: `RequestOptions` plus `top_k`.

    Attributes:
        top_k: number of classes to return, best first; default 5.
    """

    top_k: int


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """Valid options of a request; `top_k` 0 requests the scores of all classes."""

    top_k: int
    headers: Mapping[str, str]
    request_id: str
    timeout_s: float

    def infer_arguments(
        self, protocol: ProtocolName, tensor: Any, outputs: Sequence[str], ranked: str, remaining_s: float
    ) -> dict[str, Any]:
        """Return the arguments for tritonclient's `infer`, except the model and the client timeout.

        For the output `ranked`, the `top_k` best classes are requested.
        """
        requested: Any = _http_output if protocol == "http" else tritonclient.grpc.InferRequestedOutput
        return {
            "inputs": [tensor],
            "outputs": [requested(name, class_count=self.top_k if name == ranked else 0) for name in outputs],
            "headers": dict(self.headers),
            "request_id": self.request_id,
            "timeout": max(1, int(remaining_s * 1e6)),
        }


def _http_output(name: str, class_count: int) -> dict[str, Any]:
    classes = {"classification": class_count} if class_count else {}
    return {"name": name, "parameters": {**classes, "binary_data": True}}


def check_arguments(
    url: str, protocol: str, concurrency: int, shared_memory: str | None, api_key: str = ""
) -> None:
    """Check the arguments of a client.

    Raises:
        ValueError: an argument is invalid; the message states the expected form.
    """
    address = re.fullmatch(r"(?:\[[^\[\]/@]+\]|[^\[\]/@:\s]+):(\d{1,5})", url)
    if not unix_path(url) and not (address and 0 < int(address[1]) < 2**16):
        raise ValueError(f"url must be HOST:PORT without a scheme, an IPv6 address in [], got '{url}'")
    if protocol not in DEFAULT_PORTS:
        raise ValueError(f"protocol must be one of {', '.join(DEFAULT_PORTS)}, got '{protocol}'")
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    if shared_memory not in (None, "system", "cuda"):
        raise ValueError(f"shared_memory must be None, 'system' or 'cuda', got '{shared_memory}'")
    if not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key must be printable ASCII")


def key_header(api_key: str) -> Mapping[str, str]:
    """Return the header for an API key; no header for an empty key."""
    return {KEY_HEADER: api_key} if api_key else {}


def check_options(
    options: RequestOptions, timeout_s: float, is_for_scores: bool = False, options_type: type = Options
) -> CheckedOptions:
    """Check the options of one request.

    Args:
        timeout_s: default time limit in seconds.
        is_for_scores: whether the scores of all classes are requested.
        options_type: the options class for this kind of request.

    Raises:
        ValueError: an option is unknown or invalid.
    """
    names = options_type.__annotations__.keys()
    if unknown := sorted(options.keys() - names):
        raise ValueError(f"unknown option '{unknown[0]}', expected one of {', '.join(sorted(names))}")
    all_headers: dict[str, Any] = {
        **{str(name).lower(): value for name, value in options.get("headers", {}).items()},
        **{header: options.get(name, "") for name, header in OPTION_HEADERS.items()},
    }
    headers = {name: value for name, value in all_headers.items() if value or not isinstance(value, str)}
    request_id = options.get("request_id") or uuid.uuid4().hex
    for name in headers:
        if not HEADER_NAME.fullmatch(name) or FRAMING_HEADER.fullmatch(name):
            raise ValueError(f"a header must not be named {name!r}")
    for name, value in {**headers, "request_id": request_id}.items():
        if not (isinstance(value, str) and value.isascii() and value.isprintable()):
            raise ValueError(f"{name} must be printable ASCII, got {value!r}")
    if (top_k := cast(Options, options).get("top_k", 5)) < 1 and not is_for_scores:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    timeout_s = options.get("timeout_s", timeout_s)
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s must be more than 0 and at most {MAX_TIMEOUT_S:g}, got {timeout_s}")
    return CheckedOptions(0 if is_for_scores else top_k, headers, request_id, timeout_s)


def image_tensor(protocol: ProtocolName, images: Sequence[bytes]) -> Any:
    """Return encoded images as input `image`, BYTES [N, 1]."""
    if protocol == "http":
        parts = [part for image in images for part in (len(image).to_bytes(4, "little"), image)]
        return HttpInput(len(images), {"binary_data_size": sum(map(len, parts))}, parts)
    tensor = tritonclient.grpc.InferInput(IMAGE, [len(images), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=object).reshape(-1, 1))
    return tensor


def region_tensor(protocol: ProtocolName, count: int, region: str, byte_size: int) -> Any:
    """Return input `image`, BYTES [`count`, 1], stored at the start of a shared memory region."""
    if protocol == "http":
        return HttpInput(count, {"shared_memory_region": region, "shared_memory_byte_size": byte_size}, ())
    tensor = tritonclient.grpc.InferInput(IMAGE, [count, 1], "BYTES")
    tensor.set_shared_memory(region, byte_size)
    return tensor
