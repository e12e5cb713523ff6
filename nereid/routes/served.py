"""What a running server tells about its routes: what is ready, which route file it serves, its breakers."""

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from nereid import metrics_page
from nereid.errors import OperationFailed
from nereid.server.control import RESPONSE_S, Control, NotReached
from nereid.server.run_dir import ServerRecord

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

    All methods raise `OperationFailed` when it does not answer within `timeout_s`.
    """

    def __init__(self, record: ServerRecord, timeout_s: float = RESPONSE_S) -> None:
        self._record = record
        self._timeout_s = timeout_s
        self._control = Control(record, timeout_s)

    def is_ready(self, model: str, version: int) -> bool:
        """Tell whether a version of a model can be called."""
        return self._control.is_ready(model, version)

    def served(self, route: str) -> Served:
        """Tell what the server serves the route by."""
        url = self._record.url("metrics")
        try:
            page = metrics_page.fetch(self._record.host, self._record.ports.metrics, self._timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise NotReached(f"the server at {url} does not answer: {error}") from None
        return read_metrics(page, route)


def served_status(server: Server | None, route: str, sha256: str) -> tuple[str, Served | None]:
    """Ask whether the server serves the route file with this SHA-256.

    Returns `SERVED` or words for what it does instead, and what it told, if anything.
    """
    if server is None:
        return NO_SERVER, None
    try:
        served = server.served(route)
    except OperationFailed as error:
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
