"""Image embeddings from a Triton server, blocking and asyncio."""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Unpack

from nereid.client.base_client import ResultOrError
from nereid.client.images import ImageLike
from nereid.client.model_client import AsyncModelClient, ImageStream, ModelClient
from nereid.client.request import RequestOptions
from nereid.tasks.embed.result import EMBEDDINGS, Embedding


class Embedder(ModelClient[Embedding]):
    """A connection to one model that computes embeddings; arguments, retries and errors as for `Classifier`.

    Args:
        model: a route, or any model with an input `image` and an output `embedding`; default `embed`.

    Example:
        >>> with Embedder("localhost:8001") as embedder:
        ...     embedder.embed("cat.jpg").vector.shape
        (1280,)
    """

    kind = EMBEDDINGS

    def embed(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Embedding:
        """Return the embedding of one image; arguments and errors as for `Classifier.classify`."""
        return self.infer(image, **options)

    def embed_many(
        self, images: Iterable[ImageLike], batch_size: int = 1, **options: Unpack[RequestOptions]
    ) -> Iterator[ResultOrError[Embedding]]:
        """Return the embeddings of a stream of images, several at a time; see `Classifier.classify_many`."""
        return self.infer_many(images, batch_size, **options)


class AsyncEmbedder(AsyncModelClient[Embedding]):
    """`Embedder` for asyncio, with the same arguments, results and errors."""

    kind = EMBEDDINGS

    async def embed(self, image: ImageLike, **options: Unpack[RequestOptions]) -> Embedding:
        """Return the embedding of one image; see `Embedder.embed`."""
        return await self.infer(image, **options)

    def embed_many(
        self, images: ImageStream, batch_size: int = 1, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[ResultOrError[Embedding]]:
        """Return the embeddings of a stream of images; see `Embedder.embed_many`."""
        return self.infer_many(images, batch_size, **options)
