"""The registry of tasks: it discovers the folders of `nereid/tasks`, and no other package names one.

Triton's stubs import it, so it loads only the records, and each package its own entry points of them.
"""

import pkgutil
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nereid.base.assets import PACKAGE
from nereid.base.task import Task

if TYPE_CHECKING:  # importing NumPy adds 50 ms to a command
    from nereid.base.task_outputs import TaskOutputs

TASK_FOLDERS = PACKAGE / "tasks"


def _records() -> tuple[Task, ...]:
    folders = sorted(module.name for module in pkgutil.iter_modules([str(TASK_FOLDERS)]) if module.ispkg)
    return tuple(task for folder in folders for task in import_module(f"nereid.tasks.{folder}").TASKS)


TASKS: tuple[Task, ...] = _records()
DEFAULT_TASK: Task = next(task for task in TASKS if task.is_default)
# By backend name; if several tasks share a backend, the first one is used.
TASK_BY_BACKEND: Mapping[str, Task] = {task.backend.name: task for task in reversed(TASKS) if task.backend}


def entry_point_of_backend(backend: str, name: str) -> Any:
    """Import an entry point of the task whose models use a backend; None if there is none."""
    task = TASK_BY_BACKEND.get(backend)
    return task.entry_point(name) if task else None


def task_of(outputs: Collection[str]) -> Task | None:
    """Return the task of a model with these outputs; if several match, the one requiring the most outputs."""
    matches = [task for task in TASKS if {*task.outputs} <= {*outputs}]
    return max(matches, key=lambda task: len(task.outputs), default=None)


def make_task_outputs(outputs: Sequence[str], class_names: Sequence[str] = ()) -> "TaskOutputs":
    """Return what a model's outputs mean; `outputs` are in the order of its config.

    A model with other outputs is treated as a classifier whose first output holds the scores.
    """
    result: TaskOutputs = (task_of(outputs) or DEFAULT_TASK).entry_point("outputs")(outputs, class_names)
    return result
