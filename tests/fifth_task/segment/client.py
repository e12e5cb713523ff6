"""Segmentation of images on a Triton server."""

from typing import Unpack

from nereid.tasks.segment.result import MASKS, Mask

from nereid.client.images import ImageLike
from nereid.client.model_client.async_model_client import AsyncModelClient
from nereid.client.model_client.model_client import ModelClient
from nereid.client.request import RequestOptions


class Segmenter(ModelClient[Mask]):
    """A connection to one model that segments images."""

    kind = MASKS

    def segment(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Mask:
        """Return the mask of one image."""
        return self.infer(image, **options)


class AsyncSegmenter(AsyncModelClient[Mask]):
    """`Segmenter` for asyncio."""

    kind = MASKS

    async def segment(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Mask:
        """Return the mask of one image."""
        return await self.infer(image, **options)
