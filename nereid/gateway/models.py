"""The models that a gateway offers, each with its task, readiness, last minute and route."""

import asyncio
import json
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from msgspec import Struct

from nereid.base.config.model_config import ModelConfig
from nereid.base.contract import PROBE_HEADER
from nereid.base.http_connection import HttpConnectionPool
from nereid.base.task import Task
from nereid.base.task_registry import DEFAULT_TASK, task_of
from nereid.client.retry import RetryBudget
from nereid.gateway.failures import Failure, invalid_request
from nereid.gateway.gateway_metrics import RecentLoad
from nereid.gateway.inference import ImageInference, send_inference, send_to_triton
from nereid.gateway.readiness import CachedCall, ReadinessProbe
from nereid.gateway.route_control import RouteControl, RouteView
from nereid.gateway.v2.inference_body import Output

# Maximum names in an error message; a repository may have hundreds of models.
MAX_NAMES = 20
# Longest delay that an unresponsive server may cause, and the minimum time before it is tried again.
METADATA_TIMEOUT_S, METADATA_PAUSE_S = 1.0, 2.0


class PublishCommand(Struct, frozen=True):
    """A network to publish.

    Attributes:
        model: name of the model or its route.
        source: the ONNX file.
        share: initial share of the traffic.
        is_change_accepted: whether the results may differ from the current version's.
        limits: additional limits for the examination, by name.
    """

    repository: Path
    model: str
    source: Path
    share: float
    is_change_accepted: bool
    limits: dict[str, float]


class PublishAnswer(Struct):
    """A published version and a line about it."""

    model: str
    version: int
    detail: str


class ModelSource(Protocol):
    """The names of the models behind a gateway, which may change; its methods block."""

    @property
    def repository(self) -> Path | None:
        """The folder that `publish` changes; None for a server elsewhere."""
        return None

    def names(self) -> Sequence[str]:
        """Return the names of the models that the gateway currently offers."""

    def outputs(self, name: str) -> Collection[str]:
        """Return the names of a model's outputs; empty while unknown."""

    def route(self, name: str) -> RouteControl | None:
        """Return a route's control, or None if the route cannot be shown and changed here."""
        return None

    def preview(self, name: str, image: bytes) -> bytes | None:
        """Return an image as a model's network sees it (PNG), or None if the preprocessing is unknown.

        Raises:
            Failure: the file is damaged or not an image.
        """
        return None

    def config(self, name: str) -> ModelConfig | None:
        """Return the config of a model or of a route's default variant, or None if unknown."""
        return None

    async def publish(self, command: PublishCommand) -> PublishAnswer:
        """Publish a network as a model's next version, and return once it is served.

        Raises:
            WrongUsage: the command itself is invalid.
            OperationFailed: the network or the server was refused.
        """
        raise AssertionError  # not called without a repository


def path_of(model: str) -> str:
    """Return Triton's path for a model."""
    return f"/v2/models/{quote(model)}"


@dataclass(frozen=True, slots=True)
class FixedModels(ModelSource):
    """Models with fixed names, whose routes cannot be changed; for a server elsewhere.

    Attributes:
        url: HOST:PORT of the server's HTTP port, which reports the outputs; "" leaves them unknown.
    """

    fixed: tuple[str, ...]
    url: str = ""

    def names(self) -> Sequence[str]:
        """Return the fixed names."""
        return self.fixed

    def outputs(self, name: str) -> Collection[str]:
        """Return the outputs listed in the model's metadata; empty if the server does not respond."""
        if not self.url:
            return ()

        async def metadata() -> bytes:
            with closing(HttpConnectionPool(self.url)) as triton:
                return (await send_to_triton(triton, "GET", path_of(name), timeout_s=METADATA_TIMEOUT_S)).body

        try:
            return [output["name"] for output in json.loads(asyncio.run(metadata()))["outputs"]]
        except (Failure, TimeoutError, ValueError, LookupError, TypeError):
            return ()


class OfferedModel:
    """One model that the gateway offers.

    Attributes:
        path: Triton's path for the model.
        task: its task; None while unknown.
        budget: retry budget for its images.
        outputs: the outputs to request, by the task's action and the number of classes.
    """

    def __init__(self, name: str, source: ModelSource, triton: HttpConnectionPool) -> None:
        self.name, self.path = name, path_of(name)
        self._source, self._triton = source, triton
        self.recent_load, self.readiness = RecentLoad(), ReadinessProbe(self._probe)
        route = source.route(name)
        self.route = RouteView(route) if route else None
        self.task: Task | None = None
        self.budget = RetryBudget()
        self.outputs: dict[tuple[str, int], list[Output]] = {}
        self._finding = CachedCall(self._find_task)

    async def find_task(self) -> Task | None:
        """Return the model's task, or None while it is unknown or if no task has its outputs."""
        if self.task is None:
            await asyncio.shield(self._finding.task(METADATA_PAUSE_S))
        return self.task

    def forget(self) -> None:
        """Forget the task and the outputs, because the model rejects them: it was replaced or removed."""
        self.task = None
        self.outputs.clear()

    async def _find_task(self) -> None:
        self.task = task_of(await asyncio.to_thread(self._source.outputs, self.name))

    async def _probe(self, image: bytes, timeout_s: float) -> None:
        task, deadline = await self.find_task() or DEFAULT_TASK, time.monotonic() + timeout_s
        headers, name = [(PROBE_HEADER.encode(), b"1")], f"readyz-{uuid.uuid4().hex}"
        inference = ImageInference(self, task.entry_point("result"), image, None, 1, headers, name)
        async with asyncio.timeout(timeout_s):
            await send_inference(self._triton, inference, lambda: deadline - time.monotonic())


class Models:
    """All models of one gateway; the gateway connects to a model when a request first names it.

    Args:
        default: name of the model for requests that do not name one, if it has their task.
        source: names, outputs and routes of the models.
        triton: the connections to the server.
    """

    def __init__(self, default: str, source: ModelSource, triton: HttpConnectionPool) -> None:
        self.source, self.triton = source, triton
        self.known: dict[str, OfferedModel] = {}
        # By task name: the first model that can perform it, and that model's own task when it was found.
        self._first: dict[str, tuple[OfferedModel, Task | None]] = {}
        self.default = self._known(default)

    async def find(self, name: str | None, task: Task | None = None) -> OfferedModel:
        """Return the model with the given name or, without a name, the first one that has the task.

        Raises:
            Failure: no model has that name or task; the message lists those available.
        """
        if name is None:
            if task is None:
                return self.default
            first, model_task = self._first.get(task.name, (None, None))
            return first if first and first.task is model_task else await self._with_task(task)
        model = self.known.get(name) or await self._named(name)
        model_task = await model.find_task() if task else None
        if task and model_task and not _does(model_task, task):
            fix = f"POST /v1/models/{name}/{model_task.path.rpartition('/')[2]}"
            raise invalid_request(
                f"model {name!r} {model_task.verb_phrase}, and does not support this endpoint; fix: {fix}"
            )
        return model

    async def names(self) -> list[str]:
        """Return the names of all models, the default one first."""
        names = await asyncio.to_thread(self.source.names)
        return [self.default.name, *(name for name in names if name != self.default.name)]

    async def all(self) -> list[OfferedModel]:
        """Return all models, the default one first."""
        return [self._known(name) for name in await self.names()]

    async def _named(self, name: str) -> OfferedModel:
        names = await self.names()
        if name not in names:
            listed = ", ".join(names[:MAX_NAMES]) + (", …" if names[MAX_NAMES:] else "")
            raise Failure("not_found", f"unknown model {name[:128]!r}; expected one of: {listed}")
        return self._known(name)

    async def _with_task(self, task: Task) -> OfferedModel:
        """Return the first model with exactly this task, or else one that can perform it."""
        models = [(model, await model.find_task()) for model in await self.all()]
        exact = [model for model, model_task in models if model_task is task]
        able = [model for model, model_task in models if model_task and _does(model_task, task)]
        if candidates := [*exact, *able]:
            self._first[task.name] = candidates[0], candidates[0].task
            return candidates[0]
        if unknown := [model for model, model_task in models if model_task is None]:
            return unknown[0]  # its server decides
        offered = ", ".join(
            f"{model.name} {model_task.verb_phrase}" for model, model_task in models[:MAX_NAMES] if model_task
        )
        raise Failure("not_found", f"no model {task.verb_phrase} here; available: {offered}")

    def _known(self, name: str) -> OfferedModel:
        if name not in self.known:
            self.known[name] = OfferedModel(name, self.source, self.triton)
        return self.known[name]


def _does(model_task: Task, task: Task) -> bool:
    """Return whether models with the task `model_task` can perform a task."""
    return task.name in (model_task.name, model_task.extends)
