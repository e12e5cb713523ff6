"""One look at a running server for `nereid top`: its pages, processes, route files, and this machine."""

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from nereid.backends.routing.assignment import Route
from nereid.backends.triton import stub_processes
from nereid.base import metrics_page
from nereid.base.errors import OperationFailed
from nereid.base.metrics_page import Snapshot
from nereid.base.serving_errors import InvalidConfig
from nereid.insight.observe.machine import MachineReading, read_machine
from nereid.models.rollout.rollout_journal import active_rollouts
from nereid.models.routes.target import find_routes, read_state
from nereid.server import run_dir
from nereid.server.run_dir import GatewayRecord, ServerRecord
from nereid.server.supervision import process_usage
from nereid.server.supervision.process_usage import GATEWAY, Usage

TIMEOUT_S = 2.0
# Addresses on which a process listens, and the one under which this machine reaches it.
REACHED = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}
NEEDS_KEY = "its metrics need a key"
KEY_NEEDED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


@dataclass(frozen=True, slots=True)
class TopServer:
    """The server; `not_ready` has the reasons by part, and `trouble` why it does not respond."""

    pid: int
    host: str
    ports: Mapping[str, int]
    profile: str
    uptime_s: float | None
    ready: bool | None
    not_ready: Mapping[str, str]
    trouble: str


@dataclass(frozen=True, slots=True)
class TopRollout:
    """An active rollout of a route."""

    candidate: str
    phase: str
    step: str
    share: float


@dataclass(frozen=True, slots=True)
class GatewayReading:
    """A gateway of the repository: its page, or why it cannot be read, and its processes."""

    read_s: float
    record: GatewayRecord
    page: Snapshot | None
    trouble: str
    usage: Sequence[Usage]


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a server at one moment.

    Args:
        read_s: when its page was read, in monotonic seconds.
        server: None if none runs.
        page: Triton's metrics; None if the server does not respond.
        usage: of its processes; empty for a server that the command line has named.
        routes: the route files, by route.
        rollouts: the active rollouts, by route.
    """

    read_s: float
    server: TopServer | None
    page: Snapshot | None
    usage: Sequence[Usage]
    machine: MachineReading | None
    gateways: Sequence[GatewayReading]
    routes: Mapping[str, Route]
    rollouts: Mapping[str, TopRollout]


class TopReader:
    """Reads the state of the server of a repository.

    Args:
        base: folder of the run directories.
        repository: the model repository.
        find: returns the running server, if one runs.
    """

    def __init__(self, base: Path, repository: Path, find: Callable[[], ServerRecord | None]) -> None:
        self._base, self.repository, self._find = base, repository, find

    def read(self) -> Reading:
        """Return the state now."""
        record = self._find()
        if record is None:
            return Reading(time.monotonic(), None, None, (), None, (), {}, {})
        page, trouble = _page(record.url("metrics"))
        read_s, usage = time.monotonic(), _usage(record)  # the health check may take long
        gateways = run_dir.find_gateways(self._base, self.repository) if record.pid else []
        return Reading(
            read_s,
            _server(record, trouble),
            page,
            usage,
            read_machine(record.pid) if record.pid else None,
            [_gateway(each) for each in gateways],
            _routes(self.repository),
            _rollouts(self.repository),
        )


def _server(record: ServerRecord, trouble: str) -> TopServer:
    reasons = {"server": trouble} if trouble else _reasons(record)
    return TopServer(
        record.pid,
        record.host,
        {name: port for name, port in record.all_ports.items() if port},
        record.profile,
        stub_processes.uptime_s(record.pid),
        None if reasons is None else not reasons,
        reasons or {},
        trouble,
    )


def _page(url: str) -> tuple[Snapshot | None, str]:
    try:
        return Snapshot.parse(metrics_page.fetch(url, TIMEOUT_S)), ""
    except (OSError, http.client.HTTPException) as error:
        return None, f"no metrics from {url}: {error}"


def _reasons(record: ServerRecord) -> dict[str, str] | None:
    """Return why a server is not ready, from its supervisor if that has a port, else from Triton itself."""
    try:
        if record.health_port:
            url = f"{REACHED.get(record.host, record.host)}:{record.health_port}"
            status, text = metrics_page.get(url, "/readyz", TIMEOUT_S)
            return {} if status == HTTPStatus.OK else _flat(json.loads(text))
        if record.sockets or record.ports.http:
            status, _ = metrics_page.get(record.url("http"), "/v2/health/ready", TIMEOUT_S)
            return {} if status == HTTPStatus.OK else {"server": f"Triton responds with status {status}"}
    except (OSError, http.client.HTTPException, ValueError) as error:
        return {"server": str(error)}
    return None


def _flat(document: Mapping[str, object]) -> dict[str, str]:
    """Return the reasons of `/readyz`, those of models by their names."""
    found: dict[str, str] = {}
    for part, reason in document.items():
        if isinstance(reason, Mapping):
            found |= {str(name): str(text) for name, text in reason.items()}
        elif part != "ready":
            found[part] = str(reason)
    return found


def _gateway(record: GatewayRecord) -> GatewayReading:
    page, trouble = None, ""
    try:
        url = f"{REACHED.get(record.host, record.host)}:{record.port}"
        status, text = metrics_page.get(url, "/metrics", TIMEOUT_S)
        if status == HTTPStatus.OK:
            page = Snapshot.parse(text)
        else:
            trouble = NEEDS_KEY if status in KEY_NEEDED else f"its metrics have status {status}"
    except (OSError, http.client.HTTPException) as error:
        trouble = f"no metrics: {error}"
    read_s = time.monotonic()
    return GatewayReading(read_s, record, page, trouble, process_usage.read_tree(record.pid, GATEWAY))


def _usage(record: ServerRecord) -> Sequence[Usage]:
    if not record.pid or not (supervisor := process_usage.parent_of(record.pid)):
        return ()
    return process_usage.read(supervisor, Path(record.repository))


def _routes(repository: Path) -> dict[str, Route]:
    """Return the routes whose files can be read; `nereid check` has the reasons of the others."""
    found = {}
    with contextlib.suppress(OperationFailed, InvalidConfig, OSError):
        for location in find_routes(repository):
            with contextlib.suppress(OperationFailed, InvalidConfig, OSError):
                found[location.name] = read_state(location).route()
    return found


def _rollouts(repository: Path) -> dict[str, TopRollout]:
    with contextlib.suppress(OperationFailed, OSError):  # `nereid rollout status` has the reason
        return {
            route: TopRollout(state.plan.candidate, state.phase, state.step_name, state.share)
            for route, state in active_rollouts(repository).items()
        }
    return {}
