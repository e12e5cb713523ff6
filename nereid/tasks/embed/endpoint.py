"""`POST /v1/embed`: the embedding of an image."""

from collections.abc import Mapping

from nereid.gateway.endpoint import Answered, Endpoint, TimingsMs
from nereid.tasks.embed.result import Embedding


class EmbedAnswer(Answered):
    """The embedding of an image, one number per dimension, and the variant that answered."""

    embedding: list[float]
    timings_ms: TimingsMs


def _values(result: Embedding, given: Mapping[str, str]) -> tuple[list[float]]:
    return (result.vector.tolist(),)


ENDPOINT = Endpoint("Return the embedding of one image.", EmbedAnswer, _values)
