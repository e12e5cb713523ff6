"""What a running server tells about its routes: what is ready, which route file it serves, its breakers."""

import http.client
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from ops.cli import CommandFailed
from ops.run_dir import ServerRecord

TIMEOUT_S = 5.0
# What gRPC says when nobody answers; anything else is the server's own word about the model.
UNREACHED = ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED", "StatusCode.CANCELLED")
SERVED, NO_SERVER = "served", "no server runs"
BREAKER_STATES = {0: "closed", 1: "half-open", 2: "open"}


@dataclass(frozen=True, slots=True)
class Served:
    """What the server serves a route by: the file's SHA-256, empty before it has told.

    `breakers` are those of the variants that have been asked, by variant and version of the network.
    """

    sha256: str
    breakers: Mapping[tuple[str, str], str]


class Server(Protocol):
    """What a change of a route needs of a server."""

    def is_ready(self, model: str, version: int) -> bool:
        """Tell whether a version of a model can be called."""

    def served(self, route: str) -> Served:
        """Tell what the server serves the route by."""


class RunningServer:
    """A server on this machine, asked through gRPC and its metrics page.

    All methods raise `CommandFailed` when it does not answer within `timeout_s`.
    """

    def __init__(self, record: ServerRecord, timeout_s: float = TIMEOUT_S) -> None:
        self._record = record
        self._timeout_s = timeout_s

    def is_ready(self, model: str, version: int) -> bool:
        """Tell whether a version of a model can be called."""
        url = self._record.url("grpc")
        # Never through a proxy: the server is on this machine.
        direct = [("grpc.enable_http_proxy", 0)]
        with tritonclient.grpc.InferenceServerClient(url, channel_args=direct) as client:
            try:
                return bool(client.is_model_ready(model, str(version), client_timeout=self._timeout_s))
            except InferenceServerException as error:
                if error.status() in UNREACHED:
                    raise _no_answer(url, error.message()) from None
                return False

    def served(self, route: str) -> Served:
        """Tell what the server serves the route by."""
        url = self._record.url("metrics")
        connection = http.client.HTTPConnection(
            self._record.host, self._record.ports.metrics, timeout=self._timeout_s
        )
        try:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            page = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise _no_answer(url, error) from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise _no_answer(url, f"{response.status} {page.strip()[:200]}")
        return read_metrics(page, route)


def ask_served(server: Server | None, route: str, sha256: str) -> tuple[str, Served | None]:
    """Ask whether the server serves the route file with this SHA-256.

    Returns `SERVED` or words for what it does instead, and what it told, if anything.
    """
    if server is None:
        return NO_SERVER, None
    try:
        served = server.served(route)
    except CommandFailed as error:
        return f"not known to be served: {error}", None
    if served.sha256 == sha256:
        return SERVED, served
    has = f"has SHA-256 {served.sha256[:12]}" if served.sha256 else f"tells of no route '{route}'"
    return f"not served yet: the server {has}", served


def read_metrics(page: str, route: str) -> Served:
    """Read what a metrics page says about one route."""
    sha256, breakers = "", {}
    for name, text, value in re.findall(r"^(nereid_route_\w+)\{(.*)\} (\S+)$", page, re.MULTILINE):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
        if labels.get("route") != route:
            continue
        if name == "nereid_route_info" and float(value) == 1:
            sha256 = labels["sha256"]
        if name == "nereid_route_breaker_state":
            breakers[labels["variant"], labels["version"]] = BREAKER_STATES.get(int(float(value)), value)
    return Served(sha256, breakers)


def _no_answer(url: str, reason: object) -> CommandFailed:
    return CommandFailed(f"the server at {url} does not answer: {reason}")
