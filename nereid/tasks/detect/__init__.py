"""Detection: the objects in an image, each with a box, a score and a label."""

from nereid.base.contract import BOX, LABEL, SCORE
from nereid.base.task import CommandTexts, Task, TaskBackend

DETECT = Task(
    name="detect",
    verb_phrase="finds objects",
    present_participle="searching",
    past_participle="searched",
    model="detect",
    outputs=(BOX, SCORE, LABEL),
    path="/v1/detect",
    fix="nereid add a detector",
    network="boxes",
    backend=TaskBackend("boxes"),
    command=CommandTexts(
        help="Find the objects in images on a running server.",
        csv="Print one row per object.",
        note="An image without objects is not a failure.",
        draws=True,
    ),
    entry_points={
        "outputs": "detect.outputs:make_outputs",
        "result": "detect.result:DETECTIONS",
        "client": "detect.client:Detector",
        "async_client": "detect.client:AsyncDetector",
        "view": "detect.view:VIEW",
        "endpoint": "detect.endpoint:DETECT",
        "importer": "detect.importer:DetectorImporter",
        "examination": "detect.examination:ObjectExamination",
        "post_processing": "detect.detector:ObjectFinder.from_config",
        "check": "detect.importer:check",
    },
    public={"client": ("Detector", "AsyncDetector"), "result": ("DetectedObject", "Detection")},
)
TASKS = (DETECT,)
