"""Detection: the objects in an image, with a box, a score and a label each."""

from nereid.base.contract import BOX, LABEL, SCORE
from nereid.tasks.task import Task, TaskBackend

TASKS = (
    Task(
        name="detect",
        work="finds objects",
        present="searching",
        past="searched",
        model="detect",
        outputs=(BOX, SCORE, LABEL),
        path="/v1/detect",
        fix="nereid add a detector",
        backend=TaskBackend("boxes"),
        faces={
            "outputs": "detect.outputs:outputs_of",
            "result": "detect.result:DETECTIONS",
            "client": "detect.client:Detector",
            "async_client": "detect.client:AsyncDetector",
            "intake": "detect.intake:Detection",
            "examination": "detect.examination:FoundObjects",
            "post_processing": "detect.detector:ObjectFinder.from_config",
            "check": "detect.check:check",
        },
        public={"client": ("Detector", "AsyncDetector"), "result": ("DetectedObject", "Detection")},
    ),
)
