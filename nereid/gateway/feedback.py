"""`POST /v1/feedback`: the true class of an image that was classified."""

from typing import Annotated

from msgspec import Meta, Struct

from nereid.gateway.failures import Failure
from nereid.gateway.http.http_request import MAX_ID_LENGTH, GatewayRequest, GatewayResponse, json_response
from nereid.gateway.state import Gateway
from nereid.tasks.classify.result import Prediction

MAX_LABEL = 1024


class Feedback(Struct, forbid_unknown_fields=True):
    """The true class of an image: its label, or its index among all classes.

    `image` is the id, or the position, of an image of a batch.
    """

    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)]
    label: Annotated[str, Meta(min_length=1, max_length=MAX_LABEL)] | Annotated[int, Meta(ge=0, lt=2**31)]
    image: Annotated[str, Meta(max_length=MAX_LABEL)] | int | None = None


class FeedbackAnswer(Struct):
    """The answer that the feedback is about, and whether its best class was correct."""

    request_id: str
    model: str
    variant: str
    correct: bool


def remember(
    gateway: Gateway, request: GatewayRequest, found: Prediction, image: str | int | None = None
) -> None:
    """Keep the best class of an answer for feedback about it."""
    if found.labels:
        best, name = found.labels[0], _name(request.owner, request.request_id, image)
        variant = gateway.metrics.variant(found.variant)
        gateway.memory.remember(name, request.model.name, variant, best.index, best.name)


async def feedback(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Compare an answer to the same key with the true class, and count the result once."""
    given = await gateway.uploads.json(request, gateway.settings.default_timeout_s, Feedback)
    rated = gateway.memory.rate(_name(request.owner, given.request_id, given.image), given.label)
    if rated is None:
        raise Failure(
            "unknown_request", f"no answer to request {given.request_id!r} is known: wrong id, or too old"
        )
    if not rated.is_first:
        raise Failure("conflict", f"feedback about request {given.request_id!r} was counted before")
    gateway.metrics.count_feedback(rated.model, rated.variant, rated.is_correct)
    return json_response(FeedbackAnswer(given.request_id, rated.model, rated.variant, rated.is_correct))


def _name(owner: str, request_id: str, image: str | int | None) -> str:
    # The callers choose the ids: another key may have used the same one. An id and a position of an image are
    # different names, as in the body of a batch.
    return f"{owner}\0{request_id}" if image is None else f"{owner}\0{request_id}\0{image!r}"
