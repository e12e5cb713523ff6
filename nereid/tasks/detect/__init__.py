"""Detection: the objects in an image, with a box, a score and a label each."""

from nereid.base.contract import BOX, LABEL, SCORE
from nereid.tasks.task import Task

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
        network="boxes",
        faces={
            "outputs": "detect.outputs:outputs_of",
            "result": "detect.result:DETECTIONS",
            "client": "detect.client:Detector",
            "async_client": "detect.client:AsyncDetector",
            "intake": "detect.intake:DetectorIntake",
            "examination": "detect.examination:ComparedObjects",
        },
        public={"client": ("Detector", "AsyncDetector"), "result": ("DetectedObject", "Detection")},
    ),
)
