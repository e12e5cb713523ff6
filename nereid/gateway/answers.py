"""What the two ways to classify answer; these classes are also what the OpenAPI page shows."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from nereid.client.prediction import Prediction
from nereid.gateway.failures import Reason


class Score(Struct):
    """One class: its label, its place among all classes, and its score, a probability in 0..1."""

    label: str
    index: int
    score: float


class TimingsMs(Struct):
    """Where the time went, in milliseconds; `total` is from the request's arrival on."""

    receive: float
    admission: float
    inference: float
    total: float


class Answer(Struct):
    """The best classes of one image, best first, and who answered."""

    request_id: str
    model: str
    variant: str
    version: str
    reason: str
    predictions: list[Score]
    timings_ms: TimingsMs


class Result(Struct):
    """The best classes of one image of several."""

    id: str | int
    model: str
    variant: str
    version: str
    reason: str
    predictions: list[Score]
    timings_ms: TimingsMs


class FailedResult(Struct):
    """One image of several that was not classified."""

    id: str | int
    error: Reason


# msgspec has no schema for two Structs without a tag.
_RESULT = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Result", "FailedResult")]}


class BatchAnswer(Struct):
    """The outcomes of several images, in their order."""

    request_id: str
    results: Annotated[list[Any], Meta(extra_json_schema={"items": _RESULT})]


def scores(prediction: Prediction) -> list[Score]:
    """Return a prediction's classes as they are answered."""
    return [Score(label.name, label.index, label.score) for label in prediction.labels]
