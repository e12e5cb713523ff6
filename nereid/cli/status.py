"""`nereid status`: the server, gateways, models, processes and memory of a repository."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed, no_server
from nereid.base.units import format_bytes, format_duration
from nereid.cli.options import AsJson, Repository, environment
from nereid.cli.server_options import find_server
from nereid.cli.tables import print_table
from nereid.server import run_dir

if TYPE_CHECKING:
    from nereid.insight.observe.status import ModelStatus, ServerStatus, Status

COLUMNS = ("model", "kind", "versions", "traffic", "processes", "memory")


def status(context: typer.Context, as_json: AsJson = False, repository: Repository = REPOSITORY) -> None:
    """Show the server, gateways, models, traffic, processes and memory of a repository.

    The exit code is 1 if no server is running or it does not respond.
    """
    from nereid.insight.observe.status import status as observed

    state = observed(run_dir.root(environment(context)), repository, find_server(context, repository))
    if as_json:
        print(json.dumps(asdict(state)))
    else:
        show(state)
    if state.server is None:
        raise no_server(repository)
    if state.server.trouble:
        raise OperationFailed(state.server.trouble)


def show(status: "Status") -> None:
    """Print a status as lines and a table."""
    rows = [("repository", status.repository), *_server_rows(status.server)]
    for gateway in status.gateways:
        rows.append(("gateway", f"http://{gateway.host}:{gateway.port}, pid {gateway.pid}"))
    processes = sum(model.processes for model in status.models)
    memory = sum(model.memory_bytes for model in status.models)
    if status.server:
        total = format_bytes(memory + status.server.memory_bytes)
        rows.append(("memory", f"{total}: tritonserver and {processes} model processes"))
    for name, value in rows:
        print(f"{name:<11} {value}")
    print_table(*COLUMNS, rows=[_model_row(model, status.server is not None) for model in status.models])


def _server_rows(server: "ServerStatus | None") -> list[tuple[str, str]]:
    if server is None:
        return [("server", "not running")]
    running = f"running for {format_duration(server.uptime_s)}, pid {server.pid}" if server.pid else "running"
    state = "does not respond" if server.trouble else running
    addresses = ", ".join(f"{name} {server.host}:{port}" for name, port in server.ports.items())
    return [("server", f"{state}, profile {server.profile}"), ("addresses", addresses)]


def _model_row(model: "ModelStatus", is_running: bool) -> tuple[str, ...]:
    from nereid.models.routes.location import percent

    traffic = ", ".join(f"{name} {percent(share)}" for name, share in model.traffic.items())
    memory = format_bytes(model.memory_bytes) if model.processes else ""
    processes = str(model.processes or "")
    if model.instances:
        processes += f" (instances {model.instances})"
    return model.name, model.kind, _versions(model, is_running), traffic, processes, memory


def _versions(model: "ModelStatus", is_running: bool) -> str:
    ready = ", ".join(map(str, model.ready))
    missing = ", ".join(str(version) for version in model.expected if version not in model.ready)
    if not missing:
        return ready
    state = "inside the pinned models" if model.is_inside else "not loaded" if is_running else "not served"
    return "; ".join(filter(None, (ready, f"{missing} {state}")))
