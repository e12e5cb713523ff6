"""What a classifier answers."""

import struct
from dataclasses import dataclass
from typing import Any

from nereid.client.errors import Unreachable
from nereid.contract import REASON, SCORES, VARIANT, VERSION

# What tritonclient and we raise over an answer that is none of Triton's.
MALFORMED = (AttributeError, LookupError, TypeError, ValueError, struct.error)


@dataclass(frozen=True, slots=True)
class Label:
    """One class and its score, a probability in 0..1."""

    index: int
    name: str
    score: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the caller's time went, in milliseconds: reading and encoding the image, then the request.

    `request_ms` includes all `attempts` and the pauses between them.
    """

    encode_ms: float
    request_ms: float
    attempts: int = 1

    @classmethod
    def of(cls, encode_s: float, request_s: float, attempts: int) -> "Timings":
        """Return seconds as milliseconds, to the microsecond."""
        return cls(round(encode_s * 1e3, 3), round(request_s * 1e3, 3), attempts)

    @property
    def total_ms(self) -> float:
        """What the caller waited."""
        return self.encode_ms + self.request_ms


@dataclass(frozen=True, slots=True)
class Prediction:
    """The best classes of one image, and who answered.

    `version` is that of the network behind a route, else that of the model called; `variant` and `reason`
    are empty for a model that is no route.
    """

    labels: tuple[Label, ...]
    model: str
    version: str
    variant: str
    reason: str
    request_id: str
    timings: Timings


def read(result: Any, model: str, request_id: str, timings: Timings) -> list[Prediction]:
    """Read one prediction per image out of tritonclient's `InferResult`, of HTTP or gRPC, that `is_whole`.

    Raises:
        Unreachable: this is no answer of Triton's.
    """
    try:
        return _read(result, model, request_id, timings)
    except MALFORMED as error:
        raise Unreachable(f"what answers is no Triton: {type(error).__name__}: {error}") from None


def is_whole(result: Any, count: int) -> bool:
    """Tell whether an answer has scores for `count` images."""
    try:
        scores = result.as_numpy(SCORES)
        return scores is not None and scores.ndim == 2 and len(scores) == count
    except MALFORMED:
        return False


def _read(result: Any, model: str, request_id: str, timings: Timings) -> list[Prediction]:
    response = result.get_response()
    own_version = response["model_version"] if isinstance(response, dict) else response.model_version
    scores = result.as_numpy(SCORES)

    def words(name: str) -> list[str]:
        array = result.as_numpy(name)
        return [""] * len(scores) if array is None else [word.decode() for word in array.ravel()]

    return [
        Prediction(
            tuple(label(entry.decode()) for entry in row),
            model,
            version or own_version,
            variant,
            reason,
            request_id,
            timings,
        )
        for row, variant, version, reason in zip(
            scores, words(VARIANT), words(VERSION), words(REASON), strict=True
        )
    ]


def label(entry: str) -> Label:
    """Read one entry of Triton's classification extension, `SCORE:INDEX:NAME`; the name may be missing."""
    score, index, *name = entry.split(":", 2)
    return Label(int(index), name[0] if name else "", float(score))
