"""What all classifiers share of a request: its options, and how tritonclient takes it. No I/O."""

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import tritonclient.grpc
import tritonclient.http

from nereid.client.errors import RequestRefused, Unreachable
from nereid.contract import GRPC_PORT, HTTP_PORT, IMAGE, OPTION_HEADERS, ROUTE_OUTPUTS, SCORES

ProtocolName = Literal["grpc", "http"]
DEFAULT_PORTS: dict[ProtocolName, int] = {"http": HTTP_PORT, "grpc": GRPC_PORT}
TENSORS: dict[ProtocolName, Any] = {"http": tritonclient.http, "grpc": tritonclient.grpc}
TIMEOUT_S = 30.0
CONCURRENCY = 8
# What frames a request is the transport's own; gRPC keeps `grpc-` to itself, and bytes in `-bin`.
HEADER = re.compile(r"(?!grpc-)[a-z0-9_.-]+(?<!-bin)")
FRAMING = (
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "expect",
    "inference-header-content-length",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
)
# Until the server says how many images a request may have.
NO_LIMIT = 2**31
# Triton takes a timeout in µs, as an integer; beyond this nobody waits.
MOST_TIMEOUT_S = 86_400.0
# A broken connection is tried again soon: by default gRPC waits a second, then longer and longer.
CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class Options(TypedDict, total=False):
    """How an image is classified; every one may be left out.

    Attributes:
        top_k: how many classes to return, best first; 5.
        variant: let this variant of the route answer.
        version: let the variant with this version of the network answer.
        route_key: sticky identity: the same key gets the same variant.
        timeout_s: how long the answer may take, all attempts together; what is left of it goes to the server.
        request_id: printable ASCII that the answer repeats; a random one.
        headers: further ones, such as `x-route-group` for a route's rules, or `traceparent`.
    """

    top_k: int
    variant: str
    version: str
    route_key: str
    timeout_s: float
    request_id: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of a model, whatever the image; `top_k` 0 is for the scores of all classes."""

    top_k: int
    headers: Mapping[str, str]
    request_id: str
    timeout_s: float

    def arguments(
        self, protocol: ProtocolName, tensor: Any, outputs: Sequence[str], remaining_s: float
    ) -> dict[str, Any]:
        """Return what `infer` of tritonclient takes beside the model and its own timeout."""
        requested = TENSORS[protocol].InferRequestedOutput
        return {
            "inputs": [tensor],
            "outputs": [requested(name, class_count=self.top_k if name == SCORES else 0) for name in outputs],
            "headers": dict(self.headers),
            "request_id": self.request_id,
            "timeout": max(1, int(remaining_s * 1e6)),
        }


def check(url: str, protocol: str, concurrency: int, shared_memory: str | None) -> None:
    """Refuse what a classifier cannot be made of.

    Raises:
        ValueError: with what was expected.
    """
    address = re.fullmatch(r"(?:\[[^\[\]/@]+\]|[^\[\]/@:\s]+):(\d{1,5})", url)
    if not address or not 0 < int(address[1]) < 2**16:
        raise ValueError(f"url must be HOST:PORT without a scheme, an IPv6 address in [], got '{url}'")
    if protocol not in DEFAULT_PORTS:
        raise ValueError(f"protocol must be one of {', '.join(DEFAULT_PORTS)}, got '{protocol}'")
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    if shared_memory not in (None, "system", "cuda"):
        raise ValueError(f"shared_memory must be None, 'system' or 'cuda', got '{shared_memory}'")


def ask(options: Options, timeout_s: float, is_for_scores: bool = False) -> Ask:
    """Read the options of one call; `timeout_s` is that of a call that says none.

    Raises:
        ValueError: one of them cannot be meant.
    """
    given: dict[str, Any] = {
        **{str(name).lower(): value for name, value in options.get("headers", {}).items()},
        **{header: options.get(name, "") for name, header in OPTION_HEADERS.items()},
    }
    headers = {name: value for name, value in given.items() if value or not isinstance(value, str)}
    request_id = options.get("request_id") or uuid.uuid4().hex
    for name in headers:
        if not HEADER.fullmatch(name) or name in FRAMING:
            raise ValueError(f"a header must not be named {name!r}")
    for name, value in {**headers, "request_id": request_id}.items():
        if not (isinstance(value, str) and value.isascii() and value.isprintable()):
            raise ValueError(f"{name} must be printable ASCII, got {value!r}")
    if (top_k := options.get("top_k", 5)) < 1 and not is_for_scores:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    timeout_s = options.get("timeout_s", timeout_s)
    if not 0 < timeout_s <= MOST_TIMEOUT_S:
        raise ValueError(f"timeout_s must be more than 0 and at most {MOST_TIMEOUT_S:g}, got {timeout_s}")
    return Ask(0 if is_for_scores else top_k, headers, request_id, timeout_s)


def image_tensor(protocol: ProtocolName, images: Sequence[bytes]) -> Any:
    """Return encoded images as the input `image`, BYTES [N, 1]."""
    tensor = TENSORS[protocol].InferInput(IMAGE, [len(images), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=object).reshape(-1, 1))
    return tensor


def metadata_options(protocol: ProtocolName) -> dict[str, Any]:
    """Return what has a model's metadata answered as a mapping."""
    return {"as_json": True} if protocol == "grpc" else {}


def wanted_outputs(metadata: Mapping[str, Any]) -> list[str]:
    """Return which of a model's outputs are asked for.

    Raises:
        RequestRefused: the model is none that classifies.
        Unreachable: these are no metadata.
    """
    if not isinstance(metadata, Mapping) or "outputs" not in metadata:
        raise Unreachable(
            f"what answers is no Triton: it has no metadata of a model, but {str(metadata)[:200]}"
        )
    names = {output["name"] for output in metadata["outputs"]}
    if SCORES not in names:
        raise RequestRefused(
            f"model '{metadata['name']}' has no output '{SCORES}', it has: {', '.join(sorted(names))}"
        )
    return sorted(names & {SCORES, *ROUTE_OUTPUTS})
