"""Embeddings of images from a Triton server, blocking and from asyncio."""

from nereid.client.model_client import AsyncModelClient, ModelClient
from nereid.tasks.embed.result import EMBEDDINGS, Embedding


class Embedder(ModelClient[Embedding]):
    """A connection to one model that computes embeddings; arguments, retries and errors as of `Classifier`.

    Args:
        model: a route, or any model with an input `image` and an output `embedding`; default `embed`.

    Example:
        >>> with Embedder("localhost:8001") as embedder:
        ...     embedder.embed("cat.jpg").vector.shape
        (1280,)
    """

    kind = EMBEDDINGS
    embed = ModelClient[Embedding].infer
    """Return the embedding of one image; arguments and errors as `Classifier.classify`."""
    embed_many = ModelClient[Embedding].infer_many
    """Return the embeddings of a stream of images, several at a time; see `Classifier.classify_many`."""


class AsyncEmbedder(AsyncModelClient[Embedding]):
    """`Embedder` for asyncio: the same arguments, results and errors."""

    kind = EMBEDDINGS
    embed = AsyncModelClient[Embedding].infer
    """Return the embedding of one image; see `Embedder.embed`."""
    embed_many = AsyncModelClient[Embedding].infer_many
    """Return the embeddings of a stream of images; see `Embedder.embed_many`."""
