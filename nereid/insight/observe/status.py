"""The state of a repository: its server, gateways, models, processes and memory, for `nereid status`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid.backends.routing.assignment import shares
from nereid.backends.triton import stub_processes
from nereid.base.config.instance_bounds import read_bounds
from nereid.base.errors import InvalidConfig, OperationFailed
from nereid.models.routes.location import check_repository, find_route, read_state
from nereid.repository.layout import (
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
from nereid.server.command_line import PLAIN_PROFILE
from nereid.server.control import Control
from nereid.server.run_dir import GatewayRecord, ServerRecord
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
    gateways: Sequence[GatewayRecord]
    models: Sequence[ModelStatus]


def status(base: Path, repository: Path, record: ServerRecord | None) -> Status:
    """Return the state of a repository.

    Raises:
        WrongUsage: the repository does not exist.
    """
    check_repository(repository)
    ready, trouble = _ready(record)
    counts, memory = _processes(record)
    profile = record.profile if record and record.profile != PLAIN_PROFILE else ""
    documents, inside = readable_configs(repository, profile), unused_models(repository, profile)
    models = [
        ModelStatus(
            name,
            _kind(repository / name, documents.get(name)),
            sorted(ready.get(name, ())),
            served_versions(repository / name, documents[name]) if name in documents else [],
            name in inside,
            _traffic(repository, name, documents.get(name, {})),
            counts[name],
            memory[name],
            _instances(record, name, documents.get(name, {})) if name in ready else "",
        )
        for name in sorted({*(folder.name for folder in model_folders(repository)), *ready})
    ]
    server = _server(record, trouble) if record else None
    return Status(str(repository), server, run_dir.find_gateways(base, repository), models)


def _ready(record: ServerRecord | None) -> tuple[Mapping[str, set[int]], str]:
    if record is None:
        return {}, ""
    try:
        return Control(record).ready_versions(), ""
    except OperationFailed as error:
        return {}, str(error)


def _instances(record: ServerRecord | None, name: str, document: Mapping[str, Any]) -> str:
    try:
        bounds = read_bounds(document)
        return f"{Control(record).instances(name).count} of {bounds}" if record and bounds else ""
    except (OperationFailed, InvalidConfig):  # the server is stopping, or `nereid check` gives the reason
        return ""


def _processes(record: ServerRecord | None) -> tuple[Counter[str], Counter[str]]:
    counts, memory = Counter[str](), Counter[str]()
    if record and record.pid:
        for stub in stub_processes.find(record.pid, Path(record.repository)):
            counts[stub.model] += 1
            memory[stub.model] += memory_bytes(stub.process.pid)
    return counts, memory


def _server(record: ServerRecord, trouble: str) -> ServerStatus:
    uptime_s = round(stub_processes.uptime_s(record.pid) or 0.0, 1)
    memory = memory_bytes(record.pid)
    # The HTTP port is unknown if the server was named on the command line.
    ports = {name: port for name, port in record.all_ports.items() if port}
    return ServerStatus(record.pid, record.host, ports, record.profile, uptime_s, memory, trouble)


def _kind(folder: Path, document: Mapping[str, Any] | None) -> str:
    if document is None:
        return "invalid config" if folder.exists() else "not on disk"
    if "ensemble_scheduling" in document or steps_of(document):
        return "pinned"
    backend = backend_of(folder, document)
    if is_post_processing(backend):
        return "postprocessing"
    return KINDS.get(backend, backend or "unknown")


def _traffic(repository: Path, name: str, document: Mapping[str, Any]) -> Mapping[str, float]:
    if document.get("backend") != ROUTE:
        return {}
    try:
        return shares(read_state(find_route(repository, name)).route())
    except (OperationFailed, InvalidConfig, OSError):  # `nereid route show` gives the reason
        return {}
