"""`POST /v1/embed`: the embedding of an image."""

from nereid.gateway.task_endpoint import PHOTOS, Answered, Endpoint, TimingsMs


class EmbedAnswer(Answered):
    """The embedding of an image, one number per dimension, and the variant that answered."""

    embedding: list[float]
    timings_ms: TimingsMs


ENDPOINT = Endpoint(
    "Return the embedding of one image.",
    EmbedAnswer,
    lambda result, parameters: (result.vector.tolist(),),
    photos=PHOTOS,
)
