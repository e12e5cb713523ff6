"""The methods of tritonclient that a classifier needs, as HTTP requests and results. No I/O."""

import http.client
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import quote

from tritonclient.utils import InferenceServerException

from nereid.client.request import HttpInput, HttpOutput
from nereid.client.result_kind import HttpResult

LENGTH = "Inference-Header-Content-Length"
# Converts the body of a response, given the size of its JSON header if data follow it.
Read: TypeAlias = Callable[[bytes, int | None], Any]


def ignored(content: bytes, json_size: int | None) -> None:
    """Return None for any body."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request: its path is below `/v2/`, and its body the joined parts of `body`.

    `read` converts the body of a successful response.
    """

    method: str
    path: str
    timeout_s: float
    body: Sequence[bytes] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    read: Read = ignored


class RestMethods(ABC):
    """The methods of a client; a client for asyncio returns each result as an awaitable.

    `client_timeout` is the time limit of the request, in seconds; asyncio's timeouts replace it. All methods
    raise InferenceServerException with the server's message, or HTTPException for a malformed response.
    """

    @abstractmethod
    def _send(self, request: Request) -> Any:
        """Send a request, and return its result."""

    def infer(
        self,
        model: str,
        headers: Mapping[str, str],
        *,
        inputs: Sequence[HttpInput],
        outputs: Sequence[HttpOutput],
        request_id: str,
        timeout: int,
        client_timeout: float = 0.0,
    ) -> Any:
        """Run a model, and return its `HttpResult`; `timeout` is the server's limit, in µs."""
        document = {
            "id": request_id,
            "parameters": {"timeout": timeout},
            "inputs": [each.document() for each in inputs],
            "outputs": [each.document() for each in outputs],
        }
        head = json.dumps(document, separators=(",", ":")).encode()
        body = [head, *(part for each in inputs for part in each.parts)]
        length = {LENGTH: str(len(head))} if len(body) > 1 else {}
        path = f"models/{quote(model)}/infer"

        def read(content: bytes, json_size: int | None) -> Any:
            result = HttpResult(content, json_size)
            response_id = result.get_response().get("id", request_id)
            if response_id != request_id:
                raise http.client.HTTPException(
                    f"expected the response to request {request_id!r}, got that to {response_id!r}"
                )
            return result

        return self._send(Request("POST", path, client_timeout, body, {**headers, **length}, read))

    def get_model_metadata(
        self, model: str, headers: Mapping[str, str] = {}, *, client_timeout: float = 0.0
    ) -> Any:
        """Return a model's metadata as a mapping."""
        return self._get_json(f"models/{quote(model)}", client_timeout, headers)

    def register_system_shared_memory(self, name: str, key: str, byte_size: int, **options: Any) -> Any:
        """Register a region of system shared memory."""
        fields = {"key": key, "offset": 0, "byte_size": byte_size}
        return self._change_region(f"systemsharedmemory/region/{name}/register", fields, **options)

    def register_cuda_shared_memory(
        self, name: str, raw_handle: bytes, device_id: int, byte_size: int, **options: Any
    ) -> Any:
        """Register a region of GPU memory."""
        fields = {"raw_handle": {"b64": raw_handle.decode()}, "device_id": device_id, "byte_size": byte_size}
        return self._change_region(f"cudasharedmemory/region/{name}/register", fields, **options)

    def unregister_system_shared_memory(self, name: str, **options: Any) -> Any:
        """Release a region of system shared memory."""
        return self._change_region(f"systemsharedmemory/region/{name}/unregister", **options)

    def unregister_cuda_shared_memory(self, name: str, **options: Any) -> Any:
        """Release a region of GPU memory."""
        return self._change_region(f"cudasharedmemory/region/{name}/unregister", **options)

    def get_system_shared_memory_status(
        self, headers: Mapping[str, str] = {}, *, client_timeout: float = 0.0
    ) -> Any:
        """Return the registered regions of system shared memory, as a list."""
        return self._get_json("systemsharedmemory/status", client_timeout, headers)

    def _change_region(
        self,
        path: str,
        fields: Mapping[str, Any] = {},
        headers: Mapping[str, str] = {},
        client_timeout: float = 0.0,
    ) -> Any:
        body = [json.dumps(fields).encode()] if fields else []
        return self._send(Request("POST", path, client_timeout, body, headers))

    def _get_json(self, path: str, timeout_s: float, headers: Mapping[str, str] = {}) -> Any:
        return self._send(
            Request("GET", path, timeout_s, (), headers, lambda content, _: json.loads(content))
        )


def json_size_of(header: str | bytes | None) -> int | None:
    """Return the size of a response's JSON header, None if no data follow it."""
    return None if header is None else int(header)


def failure_of(status: int, content: bytes) -> InferenceServerException:
    """Return the error of an unsuccessful response."""
    return InferenceServerException(_error_text(content), str(status))


def _error_text(content: bytes) -> str:
    """Return Triton's error message, or tritonclient's own text for a body without one."""
    try:
        return str(json.loads(content)["error"])
    except (ValueError, LookupError, TypeError):
        text = content[:200].decode(errors="replace")
        return f"an exception occurred in the client while decoding the response: {text!r}"
