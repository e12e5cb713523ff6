"""The kinds of results that clients can read: everything a client knows about a task."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from nereid.base.contract import DTYPES, REASON, ROUTE_OUTPUTS, VARIANT, VERSION
from nereid.client.client_errors import RequestRefused, Unreachable
from nereid.client.request import RequestOptions

# Exceptions raised by tritonclient and this package on a malformed response.
MALFORMED_ERRORS = (AttributeError, LookupError, TypeError, ValueError, struct.error)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Timings:
    """Client-side time of a prediction, in milliseconds.

    Attributes:
        encode_ms: time to read and encode the image, or all images of its batch.
        request_ms: time of the request, including all attempts and the pauses between them.
        attempts: number of attempts, at least 1.
    """

    encode_ms: float
    request_ms: float
    attempts: int = 1

    @property
    def total_ms(self) -> float:
        """Total client-side time, in milliseconds."""
        return self.encode_ms + self.request_ms


class HttpResult:
    """A Triton response over HTTP, with the methods of tritonclient's `InferResult` at a tenth of the cost.

    Args:
        body: JSON followed by the binary data of the outputs.
        json_bytes: length of the JSON in bytes; None if no binary data follows.
    """

    def __init__(self, body: bytes, json_bytes: int | None) -> None:
        self._response: Any = json.loads(body[:json_bytes])
        self._outputs: dict[str, tuple[Any, bytes | None]] = {}
        at = json_bytes or 0
        for output in self._response.get("outputs", ()):
            size = output.get("parameters", {}).get("binary_data_size")
            data = None if size is None else body[at : at + size]
            self._outputs[output["name"]] = output, data
            at += size or 0

    def get_response(self) -> Any:
        """Return the JSON."""
        return self._response

    def as_numpy(self, name: str) -> Any:
        """Return an output as an array, or None if the response does not contain it."""
        if name not in self._outputs:
            return None
        output, data = self._outputs[name]
        dtype = "O" if output["datatype"] == "BYTES" else DTYPES[output["datatype"]]
        if data is None:
            return np.array(output["data"], dtype).reshape(output["shape"])
        if dtype != "O":
            return np.frombuffer(data, dtype).reshape(output["shape"])
        elements, at = [], 0
        while at < len(data):
            begin = at + 4
            at = begin + int.from_bytes(data[at:begin], "little")
            elements.append(data[begin:at])
        if at != len(data):
            raise ValueError(f"output '{name}' ends within an element")
        return np.array(elements, object).reshape(output["shape"])


@dataclass(frozen=True, slots=True)
class ResultKind(Generic[Result]):
    """One kind of result, read from a model's outputs.

    Attributes:
        action: name of the task.
        model: default model for clients.
        outputs: names of the outputs that a model must have.
        optional: names of additional outputs, which are requested from models that have them.
        count: returns the number of images in an `InferResult`, or -1 if outputs are missing or
            have the wrong shape.
        values: returns the first arguments of `result` for each image.
        result: class of the results; its remaining arguments are the same as for `Prediction`.
        options: class of the request options.
        ranked: name of the output whose `top_k` best classes are requested; "" for none.
        has_equal_shapes: whether outputs have the same shape for every image, so images can share a request.
    """

    action: str
    model: str
    outputs: tuple[str, ...]
    optional: tuple[str, ...]
    count: Callable[[Any], int]
    values: Callable[[Any], list[tuple[Any, ...]]]
    result: Callable[..., Result]
    options: type = RequestOptions
    ranked: str = ""
    has_equal_shapes: bool = True

    def needed_outputs(self, metadata: Any) -> list[str]:
        """Return the names of the outputs to request from a model.

        Raises:
            RequestRefused: the model has a different task.
            Unreachable: the response does not contain metadata.
        """
        if not isinstance(metadata, Mapping) or "outputs" not in metadata:
            raise Unreachable(
                f"the peer is not a Triton server: expected metadata of a model, got {str(metadata)[:200]}"
            )
        names = {output["name"] for output in metadata["outputs"]}
        if missing := [name for name in self.outputs if name not in names]:
            lacking = ", ".join(f"'{name}'" for name in missing)
            raise RequestRefused(
                f"model '{metadata['name']}' has no output {lacking}, it has: {', '.join(sorted(names))}"
            )
        return sorted(names & {*self.outputs, *self.optional, *ROUTE_OUTPUTS})

    def is_complete(self, result: Any, count: int) -> bool:
        """Return whether a response has all outputs for `count` images."""
        try:
            return self.count(result) == count
        except MALFORMED_ERRORS:
            return False

    def read(self, result: Any, model: str, request_id: str, timings: Timings) -> list[Result]:
        """Read one result per image from a complete `HttpResult` or gRPC `InferResult` (see `is_complete`).

        Raises:
            Unreachable: the response is malformed.
        """
        try:
            response = result.get_response()
            model_version = (
                response["model_version"] if isinstance(response, dict) else response.model_version
            )
            values = self.values(result)
            columns = []
            for name in (VARIANT, VERSION, REASON):
                array = result.as_numpy(name)  # one word per image, or no output
                texts = [""] * len(values) if array is None else map(bytes.decode, array.ravel())
                columns.append(texts)
            results = []
            for value, variant, version, reason in zip(values, *columns, strict=True):
                source = model, version or model_version, variant, reason
                results.append(self.result(*value, *source, request_id, timings))
            return results
        except MALFORMED_ERRORS as error:
            raise Unreachable(f"the peer is not a Triton server: {type(error).__name__}: {error}") from None
