"""The known tasks, and the choice of one for a file."""

from collections.abc import Mapping

from nereid.base.errors import WrongUsage
from nereid.models.publish.intake.network_facts import NetworkFacts, Size
from nereid.tasks.classify.intake import Classification
from nereid.tasks.detect.intake import Detection
from nereid.tasks.read.intake import Reading

# How the file of a network is read, changed, served and shown.
Task = Classification | Detection | Reading
# Results of Ultralytics' other tasks. Read as boxes, they are wrong without an error.
UNSERVED = {"segment": "masks", "pose": "key points", "obb": "turned boxes"}
# Source: super-gradients, training/utils/export_utils.py.
FLAT = "flat_predictions"
DEFAULT = Classification.name
# In the order in which a file is tried.
TASKS: Mapping[str, Task] = {each.name: each for each in (Reading(), Classification(), Detection())}


def choose_task(name: str, facts: NetworkFacts, size: Size) -> Task:
    """Return the task with a name; without one, the task that recognises the file, else classification.

    Raises:
        WrongUsage: no task has that name, or metadata or outputs are those of another kind of network.
    """
    if facts.task in UNSERVED:
        raise WrongUsage(
            f"the file's metadata names the task '{facts.task}': its {UNSERVED[facts.task]} cannot be "
            f"served; fix: a network for one of {', '.join(sorted(TASKS))}"
        )
    if flat := [each for each in facts.signature.outputs if each.endswith(FLAT)]:
        raise WrongUsage(
            f"output '{flat[0]}': expected rows of each image, got one list for all images (YOLO-NAS's flat "
            "format); fix: export it with output_predictions_format=DetectionOutputFormatMode.BATCH_FORMAT"
        )
    if name:
        return named_task(name)
    if facts.task and facts.task not in TASKS:
        raise WrongUsage(
            f"the file's metadata names the task '{facts.task}': expected one of {', '.join(sorted(TASKS))}; "
            "fix: --task, if its outputs are those of that task"
        )
    return next((each for each in TASKS.values() if each.recognises(facts, size)), TASKS[DEFAULT])


def named_task(name: str) -> Task:
    """Return the task with a name.

    Raises:
        WrongUsage: there is none.
    """
    if name not in TASKS:
        raise WrongUsage(f"invalid task: expected one of {', '.join(sorted(TASKS))}, got '{name}'")
    return TASKS[name]
