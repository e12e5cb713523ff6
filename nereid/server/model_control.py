"""Administration of a running server: list, load and unload versions.

Only gRPC is used, because Triton's HTTP handler blocks inference by other clients while it loads a model.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid.base import files
from nereid.base.config.instance_bounds import (
    BOUNDS,
    InstanceBounds,
    parse_instance_count,
    read_bounds,
    with_instance_count,
)
from nereid.base.config.model_config import read_config
from nereid.base.contract import GRPC_TOKEN_HEADER, RESTRICTED_TEXT
from nereid.base.errors import InvalidConfig, OperationFailed
from nereid.base.processes import available_bytes
from nereid.repository import instance_sizing
from nereid.repository.triton_rules import why_incomplete
from nereid.server.run_dir import ServerInfo

RESPONSE_TIMEOUT_S, LOAD_TIMEOUT_S = 5.0, 300.0
# Statuses that gRPC itself sets when the server does not respond; all others come from the server.
LATE = "StatusCode.DEADLINE_EXCEEDED"
UNREACHED = ("StatusCode.UNAVAILABLE", LATE, "StatusCode.CANCELLED")
# Triton's refusals have one of these statuses.
REFUSALS = (RESTRICTED_TEXT, "explicit model load")
# The server is on this machine, so no proxy is used.
DIRECT = [("grpc.enable_http_proxy", 0)]


class NotReached(OperationFailed):
    """No server responds at the address."""


class Refused(OperationFailed):
    """The server rejected the operation; the message is the server's."""


@dataclass(frozen=True, slots=True)
class Instances:
    """The instances of a loaded model; `chosen` is the number that a server chose, or None."""

    count: int
    is_on_gpu: bool
    chosen: int | None


NOT_LOADED = Instances(0, False, None)


class ModelControl:
    """Loads and unloads models of a running server.

    All methods raise `NotReached` if there is no response in time, and `Refused` with the server's reason.
    """

    def __init__(
        self, server_info: ServerInfo, response_s: float = RESPONSE_TIMEOUT_S, load_s: float = LOAD_TIMEOUT_S
    ) -> None:
        self._server_info, self._url = server_info, server_info.url("grpc")
        self._headers = {GRPC_TOKEN_HEADER: server_info.token} if server_info.token else {}
        self._response_s, self._load_s = response_s, load_s

    def is_ready(self, model: str, version: int) -> bool:
        """Return whether a version of a model accepts requests."""
        try:
            return bool(self._request("is_model_ready", model, str(version), with_token=False))
        except Refused:
            return False

    def ready_versions(self) -> dict[str, set[int]]:
        """Return the versions that accept requests, by model, from the server's index."""
        index = self._request("get_model_repository_index")
        versions: dict[str, set[int]] = {}
        for entry in index.models:
            if entry.state == "READY":
                versions.setdefault(entry.name, set()).add(int(entry.version))
        return versions

    def is_gone(self, model: str) -> bool:
        """Return whether the server has no version of a model left, not even one that is still unloading."""
        index = self._request("get_model_repository_index")
        return all(entry.name != model or entry.state in ("", "UNAVAILABLE") for entry in index.models)

    def config(self, model: str) -> Any:
        """Return the ModelConfig message of a loaded model."""
        return self._request("get_model_config", model).config

    def load(self, model: str, instance_count: int = 0) -> None:
        """Load a model from disk; versions that have not changed stay loaded.

        If its config leaves the number of instances open, the number is fitted to the server's cores. A model
        with bounds keeps its chosen number.

        Args:
            instance_count: number to keep instead of the one that fits; a repair must not change it.
        """
        server_info, config = self._server_info, None
        repository = Path(server_info.repository)
        must_be_complete = not server_info.completes_configs and (repository / model).is_dir()
        if must_be_complete and (reason := why_incomplete(repository / model, server_info.profile)):
            rest = "this server does not complete configs; fix: start nereid serve again"
            raise Refused(f"cannot load '{model}': {reason}, and {rest}")
        if self._bounded(model):
            with self._locked(model):
                self._load_within_bounds(model, self.instances(model).chosen)
            return
        if server_info.cores:
            machine = instance_sizing.Machine(server_info.cores, available_bytes())
            backends = server_info.fitted_backends
            config = instance_sizing.fitted_config(
                repository, server_info.profile, model, machine, backends, instance_count
            )
        self._request("load_model", model, is_load=True, config=config)

    def change_instances(self, model: str, count: int) -> None:
        """Load a model from disk with another number of instances, within its bounds.

        New instances of all versions start; the old ones then finish their requests and exit.
        """
        with self._locked(model):
            self._load_within_bounds(model, count)

    def instances(self, model: str) -> Instances:
        """Return the instances of a loaded model; none if it is not loaded."""
        try:
            config = self.config(model)
        except Refused:
            return NOT_LOADED
        text = config.parameters[BOUNDS].string_value if BOUNDS in config.parameters else ""
        groups = config.instance_group
        is_on_gpu = any(group.kind == group.KIND_GPU for group in groups)
        return Instances(sum(group.count for group in groups), is_on_gpu, parse_instance_count(text))

    def _bounded(self, model: str) -> tuple[dict[str, Any], InstanceBounds] | None:
        try:
            document = read_config(Path(self._server_info.repository) / model, self._server_info.profile)
            bounds = read_bounds(document)
        except InvalidConfig as error:
            if BOUNDS in str(error):
                raise Refused(f"cannot load '{model}': {error}") from None
            return None  # Triton's message is better
        return (document, bounds) if bounds else None

    @contextlib.contextmanager
    def _locked(self, model: str) -> Iterator[None]:
        """Wait for other loads of a model with bounds: the last load must be the last to read the config."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(files.locked_folder(Path(self._server_info.repository) / model))
            except OSError as error:
                raise Refused(f"cannot load '{model}': {error}") from None
            yield

    def _load_within_bounds(self, model: str, count: int | None) -> None:
        bounded_config = self._bounded(model)
        config = json.dumps(with_instance_count(*bounded_config, count)) if bounded_config and count else None
        self._request("load_model", model, is_load=True, config=config)

    def unload(self, model: str) -> None:
        """Unload all versions of a model after their last response."""
        self._request("unload_model", model, is_load=True)

    def _request(
        self, name: str, *args: Any, is_load: bool = False, with_token: bool = True, **options: str | None
    ) -> Any:
        headers = self._headers if with_token else {}
        timeout_s = self._load_s if is_load else self._response_s
        # gRPC's fork handlers may end a child before it executes another program.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        # Imported here because it costs 20 MB, and `nereid serve` needs it only for repairs.
        import tritonclient.grpc
        from tritonclient.utils import InferenceServerException

        # A new connection per request, because an old one waits before it reconnects to a restarted server.
        with tritonclient.grpc.InferenceServerClient(self._url, channel_args=DIRECT) as client:
            send: Callable[..., Any] = getattr(client, name)
            try:
                return send(*args, headers=headers, client_timeout=timeout_s, **options)
            except InferenceServerException as error:
                text = error.message() or str(error)
                if is_load and error.status() == LATE:
                    raise Refused(f"timed out after {timeout_s:g} s") from None
                if error.status() in UNREACHED and not any(phrase in text for phrase in REFUSALS):
                    raise NotReached(f"the server at {self._url} does not respond: {text}") from None
                raise Refused(text) from None
