"""The tasks of models: what their outputs mean, how two responses compare, and what is measured of them."""

from collections.abc import Sequence

from nereid.contract import SCORES
from nereid.tasks.classification_outputs import ClassificationOutputs
from nereid.tasks.detection_outputs import DetectionOutputs
from nereid.tasks.reading_outputs import FieldOutputs, ReadingOutputs
from nereid.tasks.task_outputs import TaskOutputs

# Tasks that a model's outputs determine; of two that fit, the first.
BY_OUTPUTS: tuple[TaskOutputs, ...] = (FieldOutputs(), ReadingOutputs(), DetectionOutputs())


def task_of(outputs: Sequence[str], class_names: Sequence[str] = ()) -> TaskOutputs:
    """Return the task of a model with these outputs, which are in the order of its config.

    A model with other outputs counts as a classifier whose first output has the scores.
    """
    for task in BY_OUTPUTS:
        if set(task.outputs) <= set(outputs):
            return task
    return ClassificationOutputs(outputs[0] if outputs else SCORES, class_names)
