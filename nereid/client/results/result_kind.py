"""The kinds of results that clients read; all that a client knows about a task."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nereid.client.classifier_errors import RequestRefused, Unreachable
from nereid.client.request import RequestOptions
from nereid.contract import REASON, ROUTE_OUTPUTS, VARIANT, VERSION

if TYPE_CHECKING:
    from nereid.client.prediction import Timings

# Exceptions of tritonclient and of this package for a malformed response.
MALFORMED = (AttributeError, LookupError, TypeError, ValueError, struct.error)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ResultKind(Generic[Result]):
    """One kind of results, from the outputs of a model.

    Attributes:
        action: the work of its models in the infinitive, for messages: `classify`.
        outputs: names of the outputs that a model must have.
        optional: names of further outputs, which are requested from a model that has them.
        count: returns the number of images in tritonclient's `InferResult`, -1 if outputs are missing or
            have a wrong shape.
        values: returns the first arguments of `result` for each image.
        result: class of the results; its further arguments are those of `Prediction`.
        options: class of the options of a request.
    """

    action: str
    outputs: tuple[str, ...]
    optional: tuple[str, ...]
    count: Callable[[Any], int]
    values: Callable[[Any], list[tuple[Any, ...]]]
    result: Callable[..., Result]
    options: type = RequestOptions

    def wanted_outputs(self, metadata: Any) -> list[str]:
        """Return the names of the outputs to request from a model.

        Raises:
            RequestRefused: the model has another task.
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
        """Return whether a response has all outputs of `count` images."""
        try:
            return self.count(result) == count
        except MALFORMED:
            return False

    def read(self, result: Any, model: str, request_id: str, timings: "Timings") -> list[Result]:
        """Read one result per image from tritonclient's `InferResult` (HTTP or gRPC) that `is_complete`.

        Raises:
            Unreachable: the response is malformed.
        """
        try:
            response = result.get_response()
            own_version = response["model_version"] if isinstance(response, dict) else response.model_version
            values = self.values(result)
            columns = (_words(result, name, len(values)) for name in (VARIANT, VERSION, REASON))
            return [
                self.result(*value, model, version or own_version, variant, reason, request_id, timings)
                for value, variant, version, reason in zip(values, *columns, strict=True)
            ]
        except MALFORMED as error:
            raise Unreachable(f"the peer is not a Triton server: {type(error).__name__}: {error}") from None


def _words(result: Any, output: str, count: int) -> list[str]:
    """Return one word per image; empty words for a missing output."""
    array = result.as_numpy(output)
    return [""] * count if array is None else [word.decode() for word in array.ravel()]
