"""Locust's users: each has one connection, takes turns, and checks its responses.

Importing this module patches the standard library for gevent, as Locust does, so it needs its own process.
"""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import grpc
import grpc.experimental.gevent
from locust import FastHttpUser, User
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from loadtest.users import request_mix
from loadtest.users.request_mix import RESULTS, ImageRequest, RequestMix
from loadtest.users.turn_scheduler import TIMEOUT_S, TurnScheduler
from nereid.base.contract import VARIANT
from nereid.client.request import CHANNEL_OPTIONS, key_header
from nereid.client.rest import JSON_LENGTH_HEADER, json_size_of
from nereid.client.result_kind import MALFORMED_ERRORS, HttpResult

HTTP, GRPC = "http", "grpc"
DEFAULT_HOST = "http://127.0.0.1:8000"
# By default gRPC shares a connection between channels to the same server.
OWN_CONNECTION = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]

# After Locust's patches and before the first channel; else a gRPC request blocks all greenlets.
grpc.experimental.gevent.init_gevent()


class WrongResponse(Exception):
    """A response is wrong, or did not come."""


def take_turn(user: Any) -> None:
    """Send one request when its turn has come; this is the only task of each user."""
    scheduler: TurnScheduler = user.environment.scheduler
    with scheduler.turn(user.protocol) as due_s:
        user.send(due_s)


class HttpCaller(FastHttpUser):
    """Posts photos as raw bodies; the responses are JSON followed by binary tensors."""

    host = DEFAULT_HOST
    protocol = HTTP
    connection_timeout = network_timeout = TIMEOUT_S
    tasks = [take_turn]  # noqa: RUF012  Locust requires it

    def __init__(self, environment: Any) -> None:
        self.host = (self.host or DEFAULT_HOST).rstrip("/")  # paths begin with a slash
        super().__init__(environment)
        self.requests = _requests(environment)

    def send(self, due_s: float) -> None:
        """Send one photo."""
        options = self.environment.parsed_options
        request, begin_s = self.requests.next(), time.monotonic()
        # Without the last one Locust requests compressed responses, which cost the server time.
        headers = {JSON_LENGTH_HEADER: "0", "Accept-Encoding": "identity", **_headers(options, request)}
        path = f"/v2/models/{quote(options.model)}/infer"
        body: Any = request.photo.content  # Locust's type excludes bytes
        with self.client.post(
            path, data=body, headers=headers, name=_name(options, request), catch_response=True
        ) as response:
            end_s, about = time.monotonic(), response.request_meta
            about["request_type"] = HTTP
            about["response_time"] = (end_s - due_s) * 1e3
            about["context"]["service_ms"] = (end_s - begin_s) * 1e3
            if failure := self._failure(response, request):
                response.failure(WrongResponse(failure))

    def _failure(self, response: Any, request: ImageRequest) -> str:
        if not response.status_code:
            return str(response.error) or type(response.error).__name__
        if response.status_code != 200:
            return f"status {response.status_code}: {response.text}"
        size = response.headers.get(JSON_LENGTH_HEADER)
        return _fault(self, request, lambda: HttpResult(response.content, json_size_of(size)))


class GrpcCaller(User):
    """Sends photos as `raw_input_contents`; the responses have raw tensors, too."""

    host = DEFAULT_HOST
    protocol = GRPC
    tasks = [take_turn]  # noqa: RUF012  Locust requires it

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.requests = _requests(environment)
        address = environment.parsed_options.grpc or _grpc_address(self.host or DEFAULT_HOST)
        self._channel = grpc.insecure_channel(address, options=OWN_CONNECTION)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def on_stop(self) -> None:
        """Close the connection."""
        self._channel.close()

    def send(self, due_s: float) -> None:
        """Send one photo."""
        options = self.environment.parsed_options
        request, begin_s = self.requests.next(), time.monotonic()
        response, failure = None, ""
        try:
            metadata = tuple(_headers(options, request).items())
            response = self._stub.ModelInfer(_message(options, request), TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            failure = f"{error.code().name}: {error.details()}"
        end_s = time.monotonic()
        if response is not None:
            failure = _fault(self, request, partial(InferResult, response))
        self.environment.events.request.fire(
            request_type=GRPC,
            name=_name(options, request),
            response_time=(end_s - due_s) * 1e3,
            response_length=0 if response is None else response.ByteSize(),
            exception=WrongResponse(failure) if failure else None,
            context={"service_ms": (end_s - begin_s) * 1e3},
        )


def _requests(environment: Any) -> RequestMix:
    options = environment.parsed_options
    variants = [word.strip() for word in options.variants.split(",") if word.strip()]
    return RequestMix(environment.photos, variants, options.keys, random.Random())


def _fault(user: Any, request: ImageRequest, result: Callable[[], Any]) -> str:
    """Return the fault of a response, empty for a correct one."""
    try:
        got = request_mix.read(result(), RESULTS[user.environment.parsed_options.task])
    except MALFORMED_ERRORS as error:
        return f"invalid response: {error}"
    return request_mix.fault(request, got, user.protocol, user.environment.scheduler.statistics)


def _headers(options: Any, request: ImageRequest) -> dict[str, str]:
    return {**request.headers, **key_header(options.api_key)}


def _name(options: Any, request: ImageRequest) -> str:
    return f"{options.model} {request.photo.kind}"


def _grpc_address(host: str) -> str:
    """Return the address of gRPC: by Triton's default, the port after that of HTTP."""
    parts = urlsplit(host if "//" in host else f"//{host}")
    name = parts.hostname or "127.0.0.1"
    return f"{f'[{name}]' if ':' in name else name}:{(parts.port or 8000) + 1}"


def _message(options: Any, request: ImageRequest) -> Any:
    message = service_pb2.ModelInferRequest(model_name=options.model)
    message.inputs.add(name="image", datatype="BYTES", shape=[1, 1])
    photo = request.photo.content
    message.raw_input_contents.append(len(photo).to_bytes(4, "little") + photo)
    output = RESULTS[options.task]
    for name in (output, VARIANT) if request.headers else (output,):
        message.outputs.add(name=name)
    return message
