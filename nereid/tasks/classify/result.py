"""Predictions of a classifier, read from tritonclient's results."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nereid.base.contract import SCORES
from nereid.client.request import Options
from nereid.client.result_kind import ResultKind, Timings
from nereid.tasks.classify import CLASSIFY


@dataclass(frozen=True, slots=True)
class Label:
    """One class and its score.

    Attributes:
        index: class index in the model's output.
        name: class name from the model's labels; empty if the model has no labels.
        score: probability, 0..1.
    """

    index: int
    name: str
    score: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The best classes of one image, and the model that computed them.

    Attributes:
        labels: best first; `top_k` of them.
        model: name of the requested model.
        version: version of the network behind a route; otherwise, of the requested model.
        variant: variant of the route; empty for a model without a route.
        reason: why the route chose the variant; empty for a model without a route.
        request_id: id of the request.
        timings: times measured by the client.
        image: for `classify_many`, the image's path, or `images[3]` for the fourth image if it has no path;
            otherwise empty.
    """

    labels: tuple[Label, ...]
    model: str
    version: str
    variant: str
    reason: str
    request_id: str
    timings: Timings
    image: str = ""


def _count(result: Any) -> int:
    scores = result.as_numpy(SCORES)
    return len(scores) if scores.ndim == 2 else -1


def _values(result: Any) -> list[tuple[tuple[Label, ...]]]:
    return [(labels(row),) for row in result.as_numpy(SCORES)]


def labels(row: Iterable[bytes]) -> tuple[Label, ...]:
    """Parse entries of Triton's classification extension, `SCORE:INDEX:NAME`; the name may be missing."""
    classes = []
    for entry in row:
        score, index, *name = entry.decode().split(":", 2)
        classes.append(Label(int(index), name[0] if name else "", float(score)))
    return tuple(classes)


PREDICTIONS = ResultKind(
    *(CLASSIFY.name, CLASSIFY.model, CLASSIFY.outputs, (), _count, _values, Prediction),
    options=Options,
    ranked=SCORES,
)
