"""Segmentation: the class of every pixel of the network's input."""

from nereid.tasks.task import Task

TASKS = (
    Task(
        name="segment",
        work="segments images",
        present="segmenting",
        past="segmented",
        model="segment",
        outputs=("mask",),
        path="/v1/segment",
        fix="nereid add a network that returns masks",
        faces={
            "outputs": "segment.outputs:outputs_of",
            "result": "segment.result:MASKS",
            "client": "segment.client:Segmenter",
            "async_client": "segment.client:AsyncSegmenter",
            "view": "segment.view:VIEW",
            "endpoint": "segment.endpoint:ENDPOINT",
            "intake": "segment.intake:Segmentation",
        },
        public={"client": ("Segmenter", "AsyncSegmenter"), "result": ("Mask",)},
    ),
)
