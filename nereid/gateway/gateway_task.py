"""The tasks that a gateway offers, and the models of each; by the outputs of a model."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from nereid.base.contract import FIELD
from nereid.client.result_kind import ResultKind
from nereid.tasks.classify.result import PREDICTIONS
from nereid.tasks.detect.result import DETECTIONS
from nereid.tasks.read.result import READINGS


@dataclass(frozen=True, slots=True)
class GatewayTask:
    """One task.

    Attributes:
        name: name of the task in `/v1/models`.
        work: what its models do, for messages: `reads text`.
        path: path of its endpoint.
        kind: the results of its models.
        outputs: names of outputs that its models must have.
        includes: names of further tasks whose models can do this task, too.
    """

    name: str
    work: str
    path: str
    kind: ResultKind[Any]
    outputs: tuple[str, ...]
    includes: tuple[str, ...] = ()

    def accepts(self, other: "GatewayTask") -> bool:
        """Return whether the models of another task can do this task."""
        return other.name in (self.name, *self.includes)

    def path_of(self, model: str) -> str:
        """Return the path of the endpoint for a named model."""
        return f"/v1/models/{model}/{self.path.rpartition('/')[2]}"


CLASSIFY = GatewayTask("classify", "classifies images", "/predict", PREDICTIONS, PREDICTIONS.outputs)
WAYBILL = GatewayTask(
    "waybill", "reads fields of documents", "/v1/waybill", READINGS, (*READINGS.outputs, FIELD)
)
READ = GatewayTask("read", "reads text", "/v1/read", READINGS, READINGS.outputs, (WAYBILL.name,))
DETECT = GatewayTask("detect", "finds objects", "/v1/detect", DETECTIONS, DETECTIONS.outputs)
# A reader of documents has the outputs of a reader, too, so it comes first.
TASKS = CLASSIFY, WAYBILL, READ, DETECT


def task_of(outputs: Collection[str]) -> GatewayTask | None:
    """Return the task of a model with these outputs, None for other models."""
    return next((task for task in TASKS if {*task.outputs} <= {*outputs}), None)
