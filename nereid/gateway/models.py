"""The models that a gateway offers, each with its task, readiness, last minute and route."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field
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
from nereid.gateway.readiness import ReadinessProbe
from nereid.gateway.route_control import RouteControl, RouteView
from nereid.gateway.v2.inference_body import Output

# Maximum names in an error message; a repository may have hundreds of models.
MAX_NAMES = 20
# Longest delay that an unresponsive server may cause, and the minimum time before it is tried again.
METADATA_TIMEOUT_S, METADATA_PAUSE_S = 1.0, 2.0


class PreviewRefused(Exception):
    """An image cannot be shown the way the network sees it; the message says why."""


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


class Publisher(Protocol):
    """Publishes networks to the repository of a gateway's server."""

    @property
    def repository(self) -> Path:
        """The model repository folder."""

    async def publish(self, command: PublishCommand) -> PublishAnswer:
        """Publish a network as a model's next version, and return once it is served.

        Raises:
            WrongUsage: the command itself is invalid.
            OperationFailed: the network or the server was refused.
        """


class ModelSource(Protocol):
    """The names of the models behind a gateway, which may change; its methods block."""

    @property
    def publisher(self) -> Publisher | None:
        """Publishes new versions of the models; None for a server elsewhere."""
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
            PreviewRefused: the file is damaged or not an image.
        """
        return None

    def config(self, name: str) -> ModelConfig | None:
        """Return the config of a model or of a route's default variant, or None if unknown."""
        return None


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


@dataclass(slots=True)
class OfferedModel:
    """One model that the gateway offers.

    Attributes:
        task: its task; None while unknown.
        path: Triton's path for the model.
        budget: retry budget for its images.
        outputs: the outputs to request, by the task's action and the number of classes.
    """

    name: str
    recent_load: RecentLoad
    readiness: ReadinessProbe
    route: RouteView | None
    task: Task | None = None
    path: str = ""
    budget: RetryBudget = field(default_factory=RetryBudget)
    outputs: dict[tuple[str, int], list[Output]] = field(default_factory=dict)
    _finding: "asyncio.Task[None] | None" = None
    _found_at: float = 0.0

    async def find_task(self, outputs: Callable[[str], Collection[str]]) -> None:
        """Determine the task from the outputs that a blocking function returns; callers share one call."""
        finding = self._finding
        if finding is None or (finding.done() and time.monotonic() - self._found_at >= METADATA_PAUSE_S):
            finding = self._finding = asyncio.create_task(self._find_task(outputs))
        if not finding.done():
            await asyncio.shield(finding)

    def forget(self) -> None:
        """Forget the task and the outputs, because the model rejects them: it was replaced or removed."""
        self.task = None
        self.outputs.clear()

    async def _find_task(self, outputs: Callable[[str], Collection[str]]) -> None:
        try:
            self.task = task_of(await asyncio.to_thread(outputs, self.name))
        finally:
            self._found_at = time.monotonic()


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
        self.default = self._add(default)

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
        model_task = await self.task_of(model) if task else None
        if task and model_task and not _does(model_task, task):
            fix = f"POST /v1/models/{name}/{model_task.path.rpartition('/')[2]}"
            raise invalid_request(
                f"model {name!r} {model_task.verb_phrase}, and does not support this endpoint; fix: {fix}"
            )
        return model

    async def task_of(self, model: OfferedModel) -> Task | None:
        """Return a model's task, or None while it is unknown or if no task has its outputs."""
        if model.task is None:
            await model.find_task(self.source.outputs)
        return model.task

    async def names(self) -> list[str]:
        """Return the names of all models, the default one first."""
        names = await asyncio.to_thread(self.source.names)
        return [self.default.name, *(name for name in names if name != self.default.name)]

    async def all(self) -> AsyncIterator[OfferedModel]:
        """Yield all models, the default one first."""
        for name in await self.names():
            yield self.known.get(name) or self._add(name)

    async def _named(self, name: str) -> OfferedModel:
        names = await self.names()
        if name not in names:
            listed = ", ".join(names[:MAX_NAMES]) + (", …" if names[MAX_NAMES:] else "")
            raise Failure("not_found", f"unknown model {name[:128]!r}; expected one of: {listed}")
        return self.known.get(name) or self._add(name)

    async def _with_task(self, task: Task) -> OfferedModel:
        """Return the first model with exactly this task, or else one that can perform it."""
        models = [(model, await self.task_of(model)) async for model in self.all()]
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

    def _add(self, name: str) -> OfferedModel:
        async def probe(image: bytes, timeout_s: float) -> None:
            task, deadline = await self.task_of(model) or DEFAULT_TASK, time.monotonic() + timeout_s
            headers, name = [(PROBE_HEADER.encode(), b"1")], f"readyz-{uuid.uuid4().hex}"
            inference = ImageInference(model, task.entry_point("result"), image, None, 1, headers, name)
            async with asyncio.timeout(timeout_s):
                await send_inference(self.triton, inference, lambda: deadline - time.monotonic())

        route = self.source.route(name)
        view = RouteView(route) if route else None
        model = self.known[name] = OfferedModel(
            name, RecentLoad(), ReadinessProbe(probe), view, path=path_of(name)
        )
        return model


def _does(model_task: Task, task: Task) -> bool:
    """Return whether models with the task `model_task` can perform a task."""
    return task.name in (model_task.name, model_task.extends)
