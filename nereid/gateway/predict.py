"""Images by REST: from the body of a request to the result of a model, for every task."""

from collections.abc import Mapping
from typing import Any

from nereid.gateway.endpoint import Endpoint, Handler, Parameter, TimingsMs
from nereid.gateway.failures import invalid_request
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, whole_number
from nereid.gateway.http.upload import CancelOnDisconnect
from nereid.gateway.inference import ImageCall, run
from nereid.gateway.state import Gateway
from nereid.tasks import Task
from nereid.vision.imaging.formats.size import read_size
from nereid.vision.imaging.formats.work import work_of

DEFAULT_TOP_K = 5


def handler(task: Task, endpoint: Endpoint) -> Handler:
    """Return the function that runs a task on the image of a request; it has the name of the task's path."""
    kind = task.face("result")

    async def answer(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
        settings, given = gateway.settings, parameters(request, endpoint.parameters)
        headers = request.forwarded(given)
        left_s = request.start_timeout(settings.default_timeout_s, settings.max_timeout_s)
        gateway.admission.check(left_s, request.owner)
        image = await gateway.uploads.one(request, left_s)
        received_s = request.end_stage("receive")
        size = read_size(image)
        work, name, top_k = work_of(size, settings.max_pixels), request.request_id, top_k_of(given)
        call = ImageCall(request.model, kind, image, size, work, headers, name, top_k, work - 1)
        with CancelOnDisconnect(request):
            found = await run(gateway, request, call)
        request.variant = call.variant
        if endpoint.keep:
            endpoint.keep(gateway, request, found)
        source, timings_ms = source_of(found), timings(request, received_s, call.stages_s)
        values = endpoint.values(found, given)
        return endpoint.respond(endpoint.answer(name, *source, *values, timings_ms), given)

    answer.__name__, answer.__doc__ = task.path.rpartition("/")[2], endpoint.summary
    return answer


def parameters(request: GatewayRequest, known: Mapping[str, Parameter]) -> dict[str, str]:
    """Return the parameters in the query of a request.

    Raises:
        Failure: a parameter is unknown or repeated, or not a value of its schema.
    """
    given = request.query(known)
    for name, value in given.items():
        schema = known[name][1]
        if schema["type"] == "integer":
            whole_number(name, value, schema["maximum"])
        elif "enum" in schema:
            given[name] = value.lower()
            if given[name] not in schema["enum"]:
                expected = ", ".join(schema["enum"])
                raise invalid_request(f"{name} must be one of {expected}, got {given[name][:32]!r}")
    return given


def top_k_of(given: Mapping[str, str]) -> int:
    """Return the number of classes that the parameters of a request ask for."""
    return int(given.get("top_k", DEFAULT_TOP_K))


def source_of(found: Any) -> tuple[str, str, str, str]:
    """Return model, variant, version and reason of a result, as an answer has them."""
    return found.model, found.variant, found.version, found.reason


def timings(request: GatewayRequest, received_s: float, stages_s: Mapping[str, float]) -> TimingsMs:
    """Return the durations of the stages so far, and since the request arrived."""
    durations_s = received_s, stages_s["admission"], stages_s["inference"], request.elapsed_s()
    return TimingsMs(*(round(seconds * 1e3, 3) for seconds in durations_s))
