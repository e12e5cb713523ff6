"""What a running server tells about its routes: what is ready, which route file it serves, its breakers."""

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from ops import metrics_page
from ops.cli import CommandFailed
from ops.run_dir import ServerRecord

TIMEOUT_S = 5.0
# What gRPC says when nobody answers; anything else is the server's own word about the model.
UNREACHED = ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED", "StatusCode.CANCELLED")
SERVED, NO_SERVER = "served", "no server runs"
BREAKER_STATES = {0: "closed", 1: "half-open", 2: "open"}


@dataclass(frozen=True, slots=True)
class Served:
    """What the server serves a route by: the files' SHA-256, one if all instances of the route agree.

    `breakers` are those of the variants that have been asked, by variant and version of the network; where
    instances differ, the one that is open most.
    """

    sha256s: frozenset[str]
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
        try:
            page = metrics_page.fetch(self._record.host, self._record.ports.metrics, self._timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise _no_answer(url, error) from None
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
    if served.sha256s == {sha256}:
        return SERVED, served
    others = ", ".join(sorted(other[:12] for other in served.sha256s - {sha256}))
    has = f"has SHA-256 {others}" if others else f"tells of no route '{route}'"
    return f"not served yet: the server {has}", served


def read_metrics(page: str, route: str) -> Served:
    """Read what a metrics page says about one route."""
    served: dict[str, tuple[float, str]] = {}
    states: dict[tuple[str, str], int] = {}
    for sample in metrics_page.parse(page):
        labels, value = sample.labels, sample.value
        if labels.get("route") != route:
            continue
        if sample.name == "nereid_route_served_since_seconds":
            # A process that was killed leaves its series behind: the youngest counts.
            told, instance = (value, labels["sha256"]), labels["model_instance"]
            served[instance] = max(told, served.get(instance, told))
        if sample.name == "nereid_route_breaker_state":
            variant = labels["variant"], labels["version"]
            states[variant] = max(int(value), states.get(variant, 0))
    breakers = {variant: BREAKER_STATES.get(state, str(state)) for variant, state in states.items()}
    return Served(frozenset(sha256 for _, sha256 in served.values()), breakers)


def _no_answer(url: str, reason: object) -> CommandFailed:
    return CommandFailed(f"the server at {url} does not answer: {reason}")
