"""The state of a repository: its server, gateways, models, processes and memory, for `nereid status`."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid.backends.routing.assignment import shares
from nereid.backends.triton import stub_processes
from nereid.base.config.instance_bounds import read_bounds
from nereid.base.errors import InvalidConfig, OperationFailed
from nereid.models.routes.location import check_repository, readable_routes
from nereid.repository.repository_index import (
    ROUTE,
    backend_of,
    is_post_processing,
    model_folders,
    readable_configs,
    served_versions,
    steps_of,
    unused_models,
)
from nereid.server import run_dir
from nereid.server.command_line import ENSEMBLE_PROFILE
from nereid.server.model_control import ModelControl
from nereid.server.run_dir import GatewayInfo, ServerInfo
from nereid.server.supervision.process_usage import memory_bytes

KINDS = {ROUTE: "route", "onnxruntime": "network", "preprocess": "preprocessing"}


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A running server.

    Args:
        pid: of `tritonserver`; 0 if it was named by its address.
        uptime_s: seconds since `tritonserver` started.
        memory_bytes: of `tritonserver`, without its model processes.
        trouble: why the server does not respond; empty if it does.
    """

    pid: int
    host: str
    ports: Mapping[str, int]
    profile: str
    uptime_s: float
    memory_bytes: int
    trouble: str


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model.

    Args:
        kind: route, pinned, network, preprocessing, or the name of another backend.
        ready: versions that the server has loaded.
        expected: versions that the config serves.
        is_inside: whether the pinned models do the model's work in their own processes.
        traffic: share of each variant of a route, 0 to 1.
        memory_bytes: of the model's processes; memory that they share counts once.
        instances: number and bounds, such as `2 of 1-4`, if the number follows the load; otherwise empty.
    """

    name: str
    kind: str
    ready: Sequence[int]
    expected: Sequence[int]
    is_inside: bool
    traffic: Mapping[str, float]
    processes: int
    memory_bytes: int
    instances: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a repository; `server` is None if none runs."""

    repository: str
    server: ServerStatus | None
    gateways: Sequence[GatewayInfo]
    models: Sequence[ModelStatus]


def status(run_root: Path, repository: Path, server_info: ServerInfo | None) -> Status:
    """Return the state of a repository.

    Raises:
        WrongUsage: the repository does not exist.
    """
    check_repository(repository)
    ready, problem = _ready(server_info)
    stubs = []
    if server_info and server_info.pid:
        stubs = stub_processes.find(server_info.pid, Path(server_info.repository))
    profile = server_info.profile if server_info and server_info.profile != ENSEMBLE_PROFILE else ""
    documents, inside = readable_configs(repository, profile), unused_models(repository, profile)
    routes, models = readable_routes(repository), []
    for name in sorted({*(folder.name for folder in model_folders(repository)), *ready}):
        document = documents.get(name)
        pids = [stub.process.pid for stub in stubs if stub.model == name]
        models.append(
            ModelStatus(
                name,
                _kind(repository / name, document),
                sorted(ready.get(name, ())),
                served_versions(repository / name, document) if document is not None else [],
                name in inside,
                shares(routes[name]) if name in routes else {},
                len(pids),
                sum(map(memory_bytes, pids)),
                _instances(server_info, name, document or {}) if name in ready else "",
            )
        )
    server = _server(server_info, problem) if server_info else None
    return Status(str(repository), server, run_dir.find_gateways(run_root, repository), models)


def _ready(server_info: ServerInfo | None) -> tuple[Mapping[str, set[int]], str]:
    if server_info is None:
        return {}, ""
    try:
        return ModelControl(server_info).ready_versions(), ""
    except OperationFailed as error:
        return {}, str(error)


def _instances(server_info: ServerInfo | None, name: str, document: Mapping[str, Any]) -> str:
    # Suppressed: the server is stopping, or `nereid check` gives the reason.
    with contextlib.suppress(OperationFailed, InvalidConfig):
        if server_info and (bounds := read_bounds(document)):
            return f"{ModelControl(server_info).instances(name).count} of {bounds}"
    return ""


def _server(server_info: ServerInfo, problem: str) -> ServerStatus:
    uptime_s = round(stub_processes.uptime_s(server_info.pid) or 0.0, 1)
    memory = memory_bytes(server_info.pid)
    # The HTTP port is unknown if the server was named on the command line.
    ports = {name: port for name, port in server_info.all_ports.items() if port}
    return ServerStatus(
        server_info.pid, server_info.host, ports, server_info.profile, uptime_s, memory, problem
    )


def _kind(folder: Path, document: Mapping[str, Any] | None) -> str:
    if document is None:
        return "invalid config" if folder.exists() else "not on disk"
    if "ensemble_scheduling" in document or steps_of(document):
        return "pinned"
    backend = backend_of(folder, document)
    if is_post_processing(backend):
        return "postprocessing"
    return KINDS.get(backend, backend or "unknown")
