"""`POST /v1/segment`: the class of every pixel."""

from collections.abc import Mapping

from nereid.tasks.segment.result import Mask

from nereid.gateway.task_endpoint import Answered, Endpoint, TimingsMs


class SegmentAnswer(Answered):
    """The classes of the pixels, row by row."""

    mask: list[list[int]]
    timings_ms: TimingsMs


def _values(result: Mask, parameters: Mapping[str, str]) -> tuple[list[list[int]]]:
    return (result.classes.tolist(),)


ENDPOINT = Endpoint("Return the class of every pixel of one image.", SegmentAnswer, _values)
