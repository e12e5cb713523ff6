"""Predictions of a classifier, read from tritonclient's results."""

import struct
from dataclasses import dataclass
from typing import Any

from nereid.client.classifier_errors import Unreachable
from nereid.contract import REASON, SCORES, VARIANT, VERSION

# Exceptions of tritonclient and of this module for a malformed response.
MALFORMED = (AttributeError, LookupError, TypeError, ValueError, struct.error)


@dataclass(frozen=True, slots=True)
class Label:
    """One class and its score.

    Attributes:
        index: index of the class in the model's output.
        name: name of the class in the model's labels; empty if the model has no labels.
        score: probability, 0..1.
    """

    index: int
    name: str
    score: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Client-side time of a prediction, in milliseconds.

    Attributes:
        encode_ms: reading and encoding the image, or the images of its batch.
        request_ms: the request, with all attempts and the pauses between them.
        attempts: number of attempts, at least 1.
    """

    encode_ms: float
    request_ms: float
    attempts: int = 1

    @property
    def total_ms(self) -> float:
        """Total client-side time, in milliseconds."""
        return self.encode_ms + self.request_ms


@dataclass(frozen=True, slots=True)
class Prediction:
    """The best classes of one image, and the model that computed them.

    Attributes:
        labels: best first; `top_k` of them.
        model: name of the requested model.
        version: version of the network behind a route, otherwise of the requested model.
        variant: variant of the route; empty for a model without a route.
        reason: why the route chose the variant; empty for a model without a route.
        request_id: id of the request.
        timings: client-side time.
        image: from `classify_many` the path of the image, or `images[3]` for the fourth without a path; else
            empty.
    """

    labels: tuple[Label, ...]
    model: str
    version: str
    variant: str
    reason: str
    request_id: str
    timings: Timings
    image: str = ""


def read(result: Any, model: str, request_id: str, timings: Timings) -> list[Prediction]:
    """Read one prediction per image from tritonclient's `InferResult` (HTTP or gRPC) that `is_complete`.

    Raises:
        Unreachable: the response is malformed.
    """
    try:
        response = result.get_response()
        own_version = response["model_version"] if isinstance(response, dict) else response.model_version
        scores = result.as_numpy(SCORES)
        variants, versions, reasons = (
            _words(result, name, len(scores)) for name in (VARIANT, VERSION, REASON)
        )
        return [
            Prediction(labels, model, version or own_version, variant, reason, request_id, timings)
            for labels, variant, version, reason in zip(
                map(_labels, scores), variants, versions, reasons, strict=True
            )
        ]
    except MALFORMED as error:
        raise Unreachable(f"the peer is not a Triton server: {type(error).__name__}: {error}") from None


def _words(result: Any, output: str, count: int) -> list[str]:
    """Return one word per image; empty words for a missing output."""
    array = result.as_numpy(output)
    return [""] * count if array is None else [word.decode() for word in array.ravel()]


def _labels(row: Any) -> tuple[Label, ...]:
    return tuple(label(entry.decode()) for entry in row)


def is_complete(result: Any, count: int) -> bool:
    """Return whether a response has scores for `count` images."""
    try:
        scores = result.as_numpy(SCORES)
        return scores is not None and scores.ndim == 2 and len(scores) == count
    except MALFORMED:
        return False


def label(entry: str) -> Label:
    """Read one entry of Triton's classification extension, `SCORE:INDEX:NAME`; the name may be missing."""
    score, index, *name = entry.split(":", 2)
    return Label(int(index), name[0] if name else "", float(score))
