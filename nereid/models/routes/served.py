"""The routes of a running server: ready models, the route file in use, and circuit breakers."""

import http.client
from collections.abc import Mapping
from dataclasses import dataclass

from nereid.backends.triton.metrics import ROUTE_PREFIX
from nereid.base import metrics_page
from nereid.base.errors import OperationFailed
from nereid.base.metrics_page import Snapshot
from nereid.server.control import RESPONSE_S, Control, NotReached
from nereid.server.run_dir import ServerRecord

SERVED, NO_SERVER = "served", "no server runs"
BREAKER_STATES = {0: "closed", 1: "half-open", 2: "open"}


@dataclass(frozen=True, slots=True)
class Served:
    """The SHA-256 of the route files in use (one if all instances agree), and the states of the breakers.

    `breakers` contains the variants that received requests, by variant and version of the network. If
    instances differ, the most open state counts.
    """

    sha256s: frozenset[str]
    breakers: Mapping[tuple[str, str], str]


class RunningServer:
    """A server on this machine, read through gRPC and its metrics page.

    All methods raise `OperationFailed` if the server does not respond within `timeout_s`.
    """

    def __init__(self, record: ServerRecord, timeout_s: float = RESPONSE_S) -> None:
        self._record = record
        self._timeout_s = timeout_s
        self._control = Control(record, timeout_s)

    @classmethod
    def of(cls, record: ServerRecord | None) -> "RunningServer | None":
        """Return the server of a record, None without one."""
        return cls(record) if record else None

    def is_ready(self, model: str, version: int) -> bool:
        """Return whether a version of a model accepts requests."""
        return self._control.is_ready(model, version)

    def served(self, route: str) -> Served:
        """Return the route files and breakers that the server uses for a route."""
        url = self._record.url("metrics")
        try:
            page = metrics_page.fetch(url, self._timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise NotReached(f"the server at {url} does not respond: {error}") from None
        return read_metrics(Snapshot.parse(page, (ROUTE_PREFIX,), {"route": route}), route)


def served_status(server: RunningServer | None, route: str, sha256: str) -> tuple[str, Served | None]:
    """Return whether the server uses the route file with this SHA-256, and the details it reports.

    The status is `SERVED`, or a phrase with the reason why not.
    """
    if server is None:
        return NO_SERVER, None
    try:
        served = server.served(route)
    except OperationFailed as error:
        return f"not confirmed: {error}", None
    if served.sha256s == {sha256}:
        return SERVED, served
    others = ", ".join(sorted(other[:12] for other in served.sha256s - {sha256}))
    has = f"uses SHA-256 {others}" if others else f"reports no route '{route}'"
    return f"not served yet: the server {has}", served


def read_metrics(page: Snapshot, route: str) -> Served:
    """Return what a metrics page has about one route."""
    labels = {"route": route}
    served: dict[str, tuple[float, str]] = {}
    files = page.sums(f"{ROUTE_PREFIX}served_since_seconds", "model_instance", "sha256", labels=labels)
    for (instance, sha256), since in files.items():
        # A killed process leaves its series behind: the newest one counts.
        served[instance] = max((since, sha256), served.get(instance, (since, sha256)))
    states: dict[tuple[str, str], int] = {}
    instances = page.sums(
        f"{ROUTE_PREFIX}breaker_state", "variant", "version", "model_instance", labels=labels
    )
    for (variant, version, _), state in instances.items():
        states[variant, version] = max(int(state), states.get((variant, version), 0))
    breakers = {variant: BREAKER_STATES.get(state, str(state)) for variant, state in states.items()}
    return Served(frozenset(sha256 for _, sha256 in served.values()), breakers)
