"""Classify several images at the same time from one asyncio program; each user stays on one variant.

python clients/python_asyncio.py HOST:PORT IMAGE [IMAGE...]
"""

import asyncio
import sys

from nereid import AsyncClassifier, NereidError


async def main(url: str, images: list[str]) -> None:
    """Send all images, and print one line per image in their order."""
    async with AsyncClassifier(url) as classifier:
        responses = await asyncio.gather(
            *(classifier.classify(image, top_k=1, route_key="alice") for image in images),
            return_exceptions=True,
        )
    for image, response in zip(images, responses, strict=True):
        if isinstance(response, NereidError):
            print(f"{image}: failed: {response}")
        elif isinstance(response, BaseException):
            raise response
        else:
            print(f"{image}: {response.labels[0].name} {response.labels[0].score:.3f}, {response.variant}")


asyncio.run(main(sys.argv[1], sys.argv[2:]))
