"""Response bodies of the classification endpoints; the OpenAPI page shows the same classes."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from nereid.gateway.failures import Reason


class Score(Struct):
    """One class: label, index among all classes, and score, a probability in 0..1."""

    label: str
    index: int
    score: float


class TimingsMs(Struct):
    """Durations of the stages in milliseconds; `total` starts at the arrival of the request."""

    receive: float
    admission: float
    inference: float
    total: float


class Answer(Struct):
    """The best classes of one image, best first, and the variant that answered."""

    request_id: str
    model: str
    variant: str
    version: str
    reason: str
    predictions: list[Score]
    timings_ms: TimingsMs


class Result(Struct):
    """The best classes of one image of a batch."""

    id: str | int
    model: str
    variant: str
    version: str
    reason: str
    predictions: list[Score]
    timings_ms: TimingsMs


class FailedResult(Struct):
    """An image of a batch that was not classified."""

    id: str | int
    error: Reason


# msgspec has no schema for two Structs without a tag.
_RESULT = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Result", "FailedResult")]}


class BatchAnswer(Struct):
    """The results of a batch, in the order of its images."""

    request_id: str
    results: Annotated[list[Any], Meta(extra_json_schema={"items": _RESULT})]
