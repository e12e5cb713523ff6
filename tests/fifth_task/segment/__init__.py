"""Segmentation: the class of every pixel of the network's input."""

from nereid.base.task import CommandTexts, Task

TASKS = (
    Task(
        name="segment",
        verb_phrase="segments images",
        present_participle="segmenting",
        past_participle="segmented",
        model="segment",
        outputs=("mask",),
        path="/v1/segment",
        fix="nereid add a network that returns masks",
        network="masks",
        command=CommandTexts(
            help="Segment images on a running server.", csv="Print one row per image, with its classes."
        ),
        entry_points={
            "outputs": "segment.outputs:make_outputs",
            "result": "segment.result:MASKS",
            "client": "segment.client:Segmenter",
            "async_client": "segment.client:AsyncSegmenter",
            "view": "segment.view:VIEW",
            "endpoint": "segment.endpoint:ENDPOINT",
            "importer": "segment.importer:Segmentation",
            "examination": "segment.examination:MaskExamination",
        },
        public={"client": ("Segmenter", "AsyncSegmenter"), "result": ("Mask",)},
    ),
)
