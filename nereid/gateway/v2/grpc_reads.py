"""Health and metadata over gRPC, read from Triton's HTTP port: its JSON has the fields of the messages."""

from http import HTTPStatus
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as v2

from nereid.gateway.state import Gateway
from nereid.gateway.v2 import inference

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
# Requests that only read. All have at most a model's name and version.
READ: dict[str, type[Message]] = {
    "ServerLive": v2.ServerLiveRequest,
    "ServerReady": v2.ServerReadyRequest,
    HEALTH_CHECK: v2.ServerReadyRequest,
    "ServerMetadata": v2.ServerMetadataRequest,
    "ModelReady": v2.ModelReadyRequest,
    "ModelMetadata": v2.ModelMetadataRequest,
    "ModelConfig": v2.ModelConfigRequest,
    "ModelStatistics": v2.ModelStatisticsRequest,
}
# Messages HealthCheckResponse with the status NOT_SERVING and SERVING. Source: grpc/health/v1/health.proto.
_SERVING = (b"\x08\x02", b"\x08\x01")
# Path below that of a model.
_PARTS = {"ModelReady": "/ready", "ModelConfig": "/config", "ModelStatistics": "/stats"}


async def read(gateway: Gateway, name: str, given: Any) -> bytes:
    """Return the response to a request that only reads, as an encoded message.

    Args:
        gateway: the way to Triton.
        name: name of the method, a key of `READ`.
        given: the message of the request.

    Raises:
        Failure: Triton rejected or failed the request.
    """
    response = await inference.read(gateway, _path(name, given))
    is_ok = response.status == HTTPStatus.OK
    if name == HEALTH_CHECK:
        return _SERVING[is_ok]
    message: Message
    if name == "ServerLive":
        message = v2.ServerLiveResponse(live=is_ok)
    elif name == "ServerReady":
        message = v2.ServerReadyResponse(ready=is_ok)
    elif name == "ModelReady":
        message = v2.ModelReadyResponse(ready=is_ok)
    elif not is_ok:
        raise inference.failure_of(response)
    elif name == "ModelConfig":
        message = v2.ModelConfigResponse()
        json_format.Parse(response.body, message.config, ignore_unknown_fields=True)
    else:
        message = getattr(v2, f"{name}Response")()
        json_format.Parse(response.body, message, ignore_unknown_fields=True)
    return bytes(message.SerializeToString())


def _path(name: str, given: Any) -> str:
    """Return Triton's path.

    Raises:
        Failure: no model can have that name or version.
    """
    if name == "ServerLive":
        return "/v2/health/live"
    if name in ("ServerReady", HEALTH_CHECK):
        return "/v2/health/ready"
    if name == "ServerMetadata":
        return "/v2"
    if name == "ModelStatistics" and not given.name:
        return "/v2/models/stats"
    return inference.path_of(given.name, given.version) + _PARTS.get(name, "")
