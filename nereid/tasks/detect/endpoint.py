"""`POST /v1/detect`: the objects in an image."""

from typing import Annotated

from msgspec import Meta, Struct

from nereid.gateway.task_endpoint import PHOTOS, Answered, Endpoint, TimingsMs

Sides = Annotated[list[float], Meta(min_length=4, max_length=4)]


class ObjectAnswer(Struct):
    """One object: label, score in 0..1, and left, top, right and bottom in pixels of the upright image."""

    label: str
    score: float
    box: Sides


class DetectAnswer(Answered):
    """The objects in an image, best first, and the variant that answered."""

    objects: list[ObjectAnswer]
    timings_ms: TimingsMs


DETECT = Endpoint("Find the objects in one image.", DetectAnswer, photos=PHOTOS)
