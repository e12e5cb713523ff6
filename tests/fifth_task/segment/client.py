"""Segmentation of images on a Triton server."""

from nereid.tasks.segment.result import MASKS, Mask

from nereid.client.model_client import AsyncModelClient, ModelClient


class Segmenter(ModelClient[Mask]):
    """A connection to one model that segments images."""

    kind = MASKS
    segment = ModelClient[Mask].infer


class AsyncSegmenter(AsyncModelClient[Mask]):
    """`Segmenter` for asyncio."""

    kind = MASKS
    segment = AsyncModelClient[Mask].infer
