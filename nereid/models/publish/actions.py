"""Actions on a model repository, each of which can be repeated and undone.

If only some actions were carried out, recovery repeats or undoes all of them. Their order keeps the
repository loadable for a server that starts at any moment.
"""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nereid.backends.routing.assignment import Variant
from nereid.base import files
from nereid.base.assets import COFFEE
from nereid.base.config.model_config import CONFIGS, ModelConfig, TensorSpec, read_pbtxt
from nereid.base.contract import IMAGE, PROBE_HEADER
from nereid.base.errors import OperationFailed
from nereid.models.routes.change import Proposal, Propose, change_with_retry
from nereid.models.routes.location import RouteFileSnapshot, find_route
from nereid.repository import pbtxt
from nereid.repository.repository_index import config_files, served_versions, unused_models
from nereid.server.model_control import DIRECT, LOAD_TIMEOUT_S, ModelControl, Refused
from nereid.server.run_dir import ServerInfo

if TYPE_CHECKING:
    import tritonclient.grpc

READY_TIMEOUT_S, POLL_S = 60.0, 0.05
# A request that chose a variant just before its removal reaches its model within this time.
DRAIN_S = 1.0
# `SetAside` moves models to the first folder of the staging folder, and renames it before they return.
ASIDE, BACK = "aside", "back"
ROUTE_CHANGE_TIMEOUT_S = 30.0
PROBE = {PROBE_HEADER: "1"}


class VariantInUse(OperationFailed):
    """A variant to be removed still receives requests."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The repository of an operation, its staging folder, and the running server.

    `staging` contains `new` (to be installed), `old` (taken out), `aside` (being replaced) and `before`
    (files in their former state). `server_info` is None if no server runs. `report` receives progress lines.
    """

    repository: Path
    staging: Path
    server_info: ServerInfo | None
    report: Callable[[str], None]

    @property
    def model_control(self) -> ModelControl | None:
        """Return the client that loads and unloads models, None if no server runs."""
        return ModelControl(self.server_info) if self.server_info else None


class Install(Struct, frozen=True, tag=True):
    """Move a file or folder into the repository.

    The folder is a model if only `model` is set, and a version of the model if `version` is also set.
    """

    path: str
    model: str = ""
    version: int = 0

    def do(self, workspace: Workspace) -> None:
        """Move the staged path into the repository atomically; OperationFailed if its place is taken."""
        source, target = workspace.staging / "new" / self.path, workspace.repository / self.path
        if source.exists():
            if target.exists():
                raise OperationFailed(f"cannot install '{self.path}': '{target}' already exists")
            files.move(source, target)
        elif not target.exists():
            raise OperationFailed(f"cannot install '{self.path}': '{target}' has disappeared")
        workspace.report(f"{self.path}: added to the repository")

    def undo(self, workspace: Workspace) -> None:
        """Move the path out of the repository atomically, and unload it from a server that has loaded it.

        Files that are still staged were never installed: a path of that name in the repository is not ours,
        and stays, as does one that `SetAside` has put back.
        """
        source, target = workspace.repository / self.path, workspace.staging / "old" / self.path
        if (workspace.staging / "new" / self.path).exists() or (workspace.staging / BACK).exists():
            return
        if source.exists():
            shutil.rmtree(target, ignore_errors=True)
            files.move(source, target)
        if self.version:
            _unload_version(workspace, self.model, self.version)
        elif self.model and workspace.model_control:
            workspace.model_control.unload(self.model)
        workspace.report(f"{self.path}: removed from the repository")


class SetAside(Struct, frozen=True, tag=True):
    """Move replaced models out of the repository; they are deleted when the operation is done.

    It precedes the actions that install their successors, and is undone after them.

    Args:
        models: in load order; the last one is the public name.
        files: its route's files.
    """

    models: tuple[str, ...]
    files: tuple[str, ...] = ()

    @property
    def _paths(self) -> tuple[str, ...]:
        *behind, last = self.models
        return (*behind, *self.files, last)

    def do(self, workspace: Workspace) -> None:
        """Move each path atomically, the public name first, and unload the models from a server."""
        for path in reversed(self._paths):
            source, target = workspace.repository / path, workspace.staging / ASIDE / path
            if source.exists():
                if target.exists():
                    continue  # a successor has taken its place
                files.move(source, target)
            if path in self.models and workspace.model_control:
                workspace.model_control.unload(path)
            workspace.report(f"{path}: set aside")

    def undo(self, workspace: Workspace) -> None:
        """Move all paths back, and load the models again; one that the server refuses is reported."""
        aside, back = workspace.staging / ASIDE, workspace.staging / BACK
        if aside.exists():
            files.move(aside, back)
        for path in self._paths:
            if (back / path).exists():
                files.move(back / path, workspace.repository / path)
                workspace.report(f"{path}: back in the repository")
        for model in self.models:
            self._load_again(workspace, model)

    def _load_again(self, workspace: Workspace, model: str) -> None:
        model_control = workspace.model_control
        if model_control is None or not _is_used(workspace, model_control, model):
            return
        try:
            model_control.load(model)
            _wait(lambda: model in model_control.ready_versions(), f"cannot load '{model}': it is not ready")
        except Refused as error:  # perhaps it never loaded, and is being replaced for that reason
            workspace.report(f"{model}: cannot be loaded again: {error}; fix: nereid reload {model}")


class AddToVersionPolicy(Struct, frozen=True, tag="Policy"):
    """Add a version to `version_policy` in config.pbtxt and in the configs of all profiles.

    Files with the policy `all` stay unchanged, because Triton 24.10 reloads every version in the background
    when a config that is not in use changes.
    """

    model: str
    version: int

    def do(self, workspace: Workspace) -> None:
        """Add the version; each file is replaced atomically."""
        for path in self._files(workspace):
            before = self._before(workspace, path)
            if not before.exists():
                before.parent.mkdir(parents=True, exist_ok=True)
                files.replace(before, path.read_bytes())
            self._write(workspace, path, {*self._others(path), self.version})
        workspace.report(f"{self.model}: version_policy includes version {self.version}")

    def undo(self, workspace: Workspace) -> None:
        """Remove the version, or restore the former files, and unload the version."""
        changed = self._files(workspace)
        for path in changed:
            before = self._before(workspace, path)
            if before.exists():
                self._replace(workspace, path, before.read_text(encoding="utf-8"))
            else:
                self._write(workspace, path, self._others(path))
        if changed:
            _unload_version(workspace, self.model, self.version)
            workspace.report(f"{self.model}: version_policy no longer includes version {self.version}")

    def _files(self, workspace: Workspace) -> list[Path]:
        paths = config_files(workspace.repository / self.model)
        return [path for path in paths if "all" not in read_pbtxt(path).get("version_policy", {})]

    def _before(self, workspace: Workspace, path: Path) -> Path:
        return workspace.staging / "before" / path.relative_to(workspace.repository)

    def _others(self, path: Path) -> set[int]:
        folder = path.parent.parent if path.parent.name == CONFIGS else path.parent
        return {*served_versions(folder, read_pbtxt(path), without=self.version)}

    def _write(self, workspace: Workspace, path: Path, versions: set[int]) -> None:
        self._replace(
            workspace, path, pbtxt.with_versions(path.read_text(encoding="utf-8"), sorted(versions))
        )

    def _replace(self, workspace: Workspace, path: Path, text: str) -> None:
        if text != path.read_text(encoding="utf-8"):
            files.replace(path, text.encode(), workspace.staging)


class LoadVersion(Struct, frozen=True, tag="Serve"):
    """Load a version of a model into the running server."""

    model: str
    version: int

    def do(self, workspace: Workspace) -> None:
        """Load the version if the server's profile uses the model, and wait until it is ready."""
        model_control = workspace.model_control
        if model_control is None or not _is_used(workspace, model_control, self.model):
            return
        model_control.load(self.model)
        name = f"version {self.version} of '{self.model}'"
        _wait(
            lambda: model_control.is_ready(self.model, self.version), f"cannot load {name}: it is not ready"
        )
        workspace.report(f"{self.model}: version {self.version} is ready")

    def undo(self, workspace: Workspace) -> None:
        """Do nothing: the action that removes the files also unloads them."""


class Warm(Struct, frozen=True, tag=True):
    """Send a loaded version one batch of every size before it receives traffic."""

    model: str
    version: int

    def do(self, workspace: Workspace) -> None:
        """Send the batches if the version is loaded."""
        server_info = workspace.server_info
        if server_info and ModelControl(server_info).is_ready(self.model, self.version):
            size = warm(server_info, workspace.repository / self.model, self.version)
            sizes = f"batches of 1 to {size}" if size > 1 else "one request"
            workspace.report(f"{self.model}: version {self.version} is warmed up with {sizes}")

    def undo(self, workspace: Workspace) -> None:
        """Do nothing: requests have no lasting effect."""


class AddVariant(Struct, frozen=True, tag="Vary", omit_defaults=True):
    """Add a variant to a route, optionally as its first fallback: version 1 of a pinned model."""

    route: str
    name: str
    model: str
    weight: float
    is_fallback: bool = False

    def do(self, workspace: Workspace) -> None:
        """Add the variant, and wait until the server uses the new route."""
        self._change(workspace, self.propose_addition)

    def undo(self, workspace: Workspace) -> None:
        """Remove the variant once requests that chose it had time; VariantInUse if it has other traffic."""
        if (workspace.repository / self.route).exists():
            self._change(workspace, self.propose_removal)
            if workspace.server_info:
                time.sleep(DRAIN_S)

    def _change(self, workspace: Workspace, propose: Propose) -> None:
        location = find_route(workspace.repository, self.route)
        server_info = workspace.server_info
        workspace.report(change_with_retry(location, propose, server_info, ROUTE_CHANGE_TIMEOUT_S))

    def propose_addition(self, current: RouteFileSnapshot) -> Proposal:
        """Return the route with the variant, with the default's deadline and ahead of other fallbacks."""
        route = current.route()
        if any(variant.model == self.model for variant in route.variants):
            return Proposal(route, "")
        weight = int(self.weight) if self.weight == int(self.weight) else self.weight
        deadline_ms = next(variant.deadline_ms for variant in route.variants if variant.name == route.default)
        variant = Variant(name=self.name, model=self.model, version=1, weight=weight, deadline_ms=deadline_ms)
        fallbacks = (self.name, *route.fallbacks) if self.is_fallback else route.fallbacks
        note = f"{'fall back to' if self.is_fallback else 'publish'} {self.model}"
        return Proposal(replace(route, variants=(*route.variants, variant), fallbacks=fallbacks), note)

    def propose_removal(self, current: RouteFileSnapshot) -> Proposal:
        """Return the route without the variant, which must be unchanged since it was added."""
        route = current.route()
        own_variants = [v for v in route.variants if (v.name, v.model) == (self.name, self.model)]
        for variant in own_variants:
            became_fallback = self.name in route.fallbacks and not self.is_fallback
            if reason := reason_in_use(variant, self.name == route.default, self.weight, became_fallback):
                raise VariantInUse(f"cannot remove variant '{self.name}': {reason}")
        variants = tuple(v for v in route.variants if v not in own_variants)
        fallbacks = tuple(name for name in route.fallbacks if not own_variants or name != self.name)
        return Proposal(replace(route, variants=variants, fallbacks=fallbacks), f"retire {self.model}")


Action = Install | SetAside | AddToVersionPolicy | LoadVersion | Warm | AddVariant


def _is_used(workspace: Workspace, model_control: ModelControl, model: str) -> bool:
    """Return whether the server's profile uses a model, or the server has loaded it anyway."""
    profile = workspace.server_info.profile if workspace.server_info else ""
    return (
        model not in unused_models(workspace.repository, profile) or model in model_control.ready_versions()
    )


def _unload_version(workspace: Workspace, model: str, version: int) -> None:
    """Reload a model without a version whose files are gone, if the server still has that version."""
    model_control = workspace.model_control
    if model_control and version in model_control.ready_versions().get(model, ()):
        model_control.load(model)
        name = f"version {version} of '{model}'"
        _wait(lambda: not model_control.is_ready(model, version), f"cannot unload {name}: it is still loaded")


def _wait(is_done: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not is_done():
        if time.monotonic() > deadline:
            raise Refused(f"{failure} after {READY_TIMEOUT_S:g} s; fix: see the reason in the server's log")
        time.sleep(POLL_S)


def reason_in_use(variant: Variant, is_default: bool, weight: float, is_fallback: bool) -> str:
    """Return why requests can reach a variant; empty if it has only its initial `weight`."""
    if variant.weight != weight:
        return (
            f"expected weight {weight:g}, got {variant.weight:g}; "
            f"fix: nereid route set {variant.name}={weight:g}, or nereid rollback {variant.model}"
        )
    if is_default:
        return "it is the route's default; fix: make another variant the default"
    if is_fallback:
        return "it is a fallback of the route; fix: remove it from `fallbacks` in the route file"
    return "it has header rules; fix: remove them from the route file" if variant.headers else ""


def warm(server_info: ServerInfo, folder: Path, version: int) -> int:
    """Send a model one batch of every size; return the largest size.

    A model that takes one image per request gets as many concurrent requests instead. OperationFailed:
    a request fails, or an output has values that are not finite.
    """
    import tritonclient.grpc  # slow to import, and commands that load nothing do not need it

    config = ModelConfig.from_file(folder, version)
    with tritonclient.grpc.InferenceServerClient(server_info.url("grpc"), channel_args=DIRECT) as client:
        for size in range(1, max(1, config.max_batch_size) + 1):
            if takes_one(config):
                with ThreadPoolExecutor(size) as pool:
                    list(pool.map(_infer, [client] * size, [config] * size, [1] * size))
            else:
                _infer(client, config, size)
    return max(1, config.max_batch_size)


def takes_one(config: ModelConfig) -> bool:
    """Return whether requests carry one image, because the model returns as many rows as it finds."""
    texts = [tensor for tensor in config.inputs if tensor.name == IMAGE and tensor.datatype == "TYPE_STRING"]
    return bool(texts) and any(output.dims[:1] == (-1,) for output in config.outputs)


def _infer(client: "tritonclient.grpc.InferenceServerClient", config: ModelConfig, size: int) -> None:
    from tritonclient.utils import InferenceServerException

    tensors = [
        _tensor(spec, config.max_batch_size > 0, size) for spec in config.inputs if not spec.is_optional
    ]
    failure = f"warm-up of version {config.version} of '{config.name}' failed with a batch of {size}"
    try:
        result = client.infer(
            config.name, tensors, str(config.version), headers=PROBE, client_timeout=LOAD_TIMEOUT_S
        )
    except InferenceServerException as error:
        raise OperationFailed(f"{failure}: {error.message()}") from None
    for output in config.outputs:
        array = result.as_numpy(output.name)
        if array is not None and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise OperationFailed(
                f"{failure}: expected finite numbers in output '{output.name}', got NaN or infinity"
            )


def _tensor(spec: TensorSpec, is_batched: bool, size: int) -> "tritonclient.grpc.InferInput":
    import tritonclient.grpc

    datatype = spec.datatype.removeprefix("TYPE_").replace("STRING", "BYTES")
    shape = [size] * is_batched + [max(1, dim) for dim in spec.dims]
    if datatype == "BYTES":
        array = np.full(shape, COFFEE.read_bytes(), np.object_)
    else:
        array = np.zeros(shape, spec.numpy_type)
    tensor = tritonclient.grpc.InferInput(spec.name, shape, datatype)
    tensor.set_data_from_numpy(array)
    return tensor
