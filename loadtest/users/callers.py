"""Locust's users: each holds one connection, takes its turns, and checks what it is answered.

Importing this module changes the standard library for gevent, as Locust does: run it in a process of its own.
"""

import random
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import grpc
import grpc.experimental.gevent
from locust import FastHttpUser, User
from tritonclient.grpc import service_pb2, service_pb2_grpc

from loadtest.users import questions
from loadtest.users.generator import TIMEOUT_S, Generator
from loadtest.users.questions import LENGTH, Answer, Question, Questions
from nereid.client.prediction import SCORES, VARIANT
from nereid.client.request import CHANNEL

HTTP, GRPC = "http", "grpc"
DEFAULT_HOST = "http://127.0.0.1:8000"
JSON_SIZE = "Inference-Header-Content-Length"
# Each caller has a connection of its own; by default gRPC shares one between channels to the same server.
OWN_CONNECTION = [*CHANNEL, ("grpc.use_local_subchannel_pool", 1)]

# Now that Locust has patched the standard library, and before the first channel: without it one call of gRPC
# stops all greenlets until it is answered.
grpc.experimental.gevent.init_gevent()


class WrongAnswer(Exception):
    """What came is not what was asked for."""


def take_turn(user: Any) -> None:
    """Send one request when its turn has come: the only task of every user."""
    generator: Generator = user.environment.generator
    with generator.turn(user.protocol) as due_s:
        user.ask(due_s)


class HttpCaller(FastHttpUser):
    """Posts photos as raw bodies; the answers are JSON, then binary tensors."""

    host = DEFAULT_HOST
    protocol = HTTP
    connection_timeout = network_timeout = TIMEOUT_S
    tasks = [take_turn]  # noqa: RUF012  as Locust wants it

    def __init__(self, environment: Any) -> None:
        self.host = (self.host or DEFAULT_HOST).rstrip("/")  # paths begin with one
        super().__init__(environment)
        self.questions = _questions(environment)

    def ask(self, due_s: float) -> None:
        """Classify one photo."""
        options = self.environment.parsed_options
        question, begin_s = self.questions.next(), time.monotonic()
        # Without the last, Locust asks for compressed answers, which cost the server time.
        headers = {JSON_SIZE: "0", "Accept-Encoding": "identity", **question.headers}
        path = f"/v2/models/{quote(options.model)}/infer"
        body: Any = question.image  # Locust's own type of it leaves out bytes
        with self.client.post(
            path,
            data=body,
            headers=headers,
            name=_name(options, question),
            catch_response=True,
        ) as response:
            end_s, about = time.monotonic(), response.request_meta
            about["request_type"] = HTTP
            about["response_time"] = (end_s - due_s) * 1e3
            about["context"]["service_ms"] = (end_s - begin_s) * 1e3
            if failure := self._failure(response, question):
                response.failure(WrongAnswer(failure))

    def _failure(self, response: Any, question: Question) -> str:
        if not response.status_code:
            return str(response.error) or type(response.error).__name__
        if response.status_code != 200:
            return f"status {response.status_code}: {response.text}"
        try:
            outputs = questions.http_outputs(response.content, response.headers.get(JSON_SIZE))
            return _wrong(self, question, questions.read(outputs))
        except ValueError as error:
            return f"not an answer of a classifier: {error}"


class GrpcCaller(User):
    """Sends photos as `raw_input_contents`; the answers are tensors of the same kind."""

    host = DEFAULT_HOST
    protocol = GRPC
    tasks = [take_turn]  # noqa: RUF012  as Locust wants it

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.questions = _questions(environment)
        address = environment.parsed_options.grpc or _beside(self.host or DEFAULT_HOST)
        self._channel = grpc.insecure_channel(address, options=OWN_CONNECTION)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def on_stop(self) -> None:
        """Close the connection."""
        self._channel.close()

    def ask(self, due_s: float) -> None:
        """Classify one photo."""
        options = self.environment.parsed_options
        question, begin_s = self.questions.next(), time.monotonic()
        response, failure = None, ""
        try:
            response = self._stub.ModelInfer(
                _request(options.model, question), TIMEOUT_S, metadata=tuple(question.headers.items())
            )
        except grpc.RpcError as error:
            failure = f"{error.code().name}: {error.details()}"
        end_s = time.monotonic()
        if response is not None:
            failure = self._failure(response, question)
        self.environment.events.request.fire(
            request_type=GRPC,
            name=_name(options, question),
            response_time=(end_s - due_s) * 1e3,
            response_length=0 if response is None else response.ByteSize(),
            exception=WrongAnswer(failure) if failure else None,
            context={"service_ms": (end_s - begin_s) * 1e3},
        )

    def _failure(self, response: Any, question: Question) -> str:
        try:
            return _wrong(self, question, questions.read(questions.grpc_outputs(response)))
        except ValueError as error:
            return f"not an answer of a classifier: {error}"


def _questions(environment: Any) -> Questions:
    options = environment.parsed_options
    return Questions(names(options.variants), options.keys, random.Random())


def names(words: str) -> Sequence[str]:
    """Return the words between commas."""
    return [word.strip() for word in words.split(",") if word.strip()]


def _wrong(user: Any, question: Question, answer: Answer) -> str:
    expected, ledger = user.environment.parsed_options.expect, user.environment.generator.ledger
    return questions.wrong(question, answer, expected, user.protocol, ledger)


def _name(options: Any, question: Question) -> str:
    return f"{options.model} {question.size}"


def _beside(host: str) -> str:
    """Return gRPC's address if it is the port after that of HTTP, as Triton has it."""
    parts = urlsplit(host if "//" in host else f"//{host}")
    name = parts.hostname or "127.0.0.1"
    return f"{f'[{name}]' if ':' in name else name}:{(parts.port or 8000) + 1}"


def _request(model: str, question: Question) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="image", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(LENGTH.pack(len(question.image)) + question.image)
    for name in (SCORES, VARIANT) if question.headers else (SCORES,):
        request.outputs.add(name=name)
    return request
