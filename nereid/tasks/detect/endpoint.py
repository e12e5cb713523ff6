"""`POST /v1/detect`: the objects in an image."""

from typing import Annotated

from msgspec import Meta, Struct

from nereid.gateway.answers import TimingsMs
from nereid.gateway.gateway_task import DETECT
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, json_response
from nereid.gateway.predict import ROUTE_PARAMETERS, answer_one
from nereid.gateway.state import Gateway

Sides = Annotated[list[float], Meta(min_length=4, max_length=4)]


class ObjectAnswer(Struct):
    """One object: label, score in 0..1, and left, top, right and bottom in pixels of the upright image."""

    label: str
    score: float
    box: Sides


class DetectAnswer(Struct):
    """The objects in an image, best first, and the variant that answered."""

    request_id: str
    model: str
    variant: str
    version: str
    reason: str
    objects: list[ObjectAnswer]
    timings_ms: TimingsMs


async def detect(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Find the objects in one image."""
    found, timings = await answer_one(gateway, request, DETECT, request.query(ROUTE_PARAMETERS))
    objects = [ObjectAnswer(each.label, each.score, [*each.box]) for each in found.objects]
    source = found.model, found.variant, found.version, found.reason
    return json_response(DetectAnswer(request.request_id, *source, objects, timings))
