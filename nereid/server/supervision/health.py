"""Health of a supervised server over HTTP: live, ready, and metrics of the supervision."""

import contextlib
import http.server
import io
import json
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from nereid.base import prometheus_text
from nereid.base.prometheus_text import MetricLabels, counter, gauge
from nereid.server.ports import unusable_port

# Age at which a model's last answer expires: an idle model is probed after 4 to 8 s, and may take 5 s.
MAX_ANSWER_AGE_S = 14.0
# Processes are observed every second: without an observation for this long, the thread has failed.
MAX_OBSERVATION_AGE_S = 30.0
# Time limit for the head of a request, and for its response.
CLIENT_TIMEOUT_S = 10.0
# Maximum number of open connections; a new one closes the oldest, so that health checks are answered.
MAX_CONNECTIONS, MAX_OF_PEER = 128, 32
NOT_PROBED = "not probed yet"
RUNNING, STARTING, RESTARTING, STOPPING = "running", "starting", "restarting", "stopping"
PREFIX = "nereid_supervisor_"
JSON, TEXT = "application/json", "text/plain; version=0.0.4; charset=utf-8"
METRICS = {
    "repairs_total": counter(
        "Loads of a model whose stub was found dead, or whose device failed.", "model cause"
    ),
    "repair_failures_total": counter("Repairs that Triton rejected.", "model"),
    "restarts_total": counter("Starts of tritonserver after the first."),
    "probes_total": counter("Images that the supervisor sent as probes.", "model"),
    "probe_failures_total": counter("Probes that failed.", "model"),
    "instances": gauge("Instances of a model whose number follows the load.", "model"),
    "instance_changes_total": counter("Changes of the number of instances, by direction.", "model direction"),
    "instance_change_failures_total": counter(
        "Changes of the number of instances that Triton rejected.", "model"
    ),
    "ready": gauge("1 if every model that takes images classified one recently."),
    "server_up_since_seconds": gauge("Unix time at which tritonserver became ready; 0 while it is not."),
}

# Status, content type and body.
HttpPage = tuple[HTTPStatus, str, str]


class ServerHealth:
    """The state of one supervised server; all methods may be called from any thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, unix_time: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._unix_time = clock, unix_time
        self._lock = threading.Lock()
        self._state, self._reason = STARTING, ""
        self._up_since = 0.0
        self._observed_at = clock()
        self._server_failure: str | None = NOT_PROBED
        self._server_probed_at = clock()
        self._models: dict[str, tuple[str | None, float]] = {}
        self._broken: dict[str, str] = {}
        self._instances: dict[str, int] = {}
        self._gateway_failure: str | None = None
        self._counts: Counter[tuple[str, MetricLabels]] = Counter({("restarts_total", ()): 0})

    def enter(self, state: str, reason: str = "") -> None:
        """Change the state of the server; `stopping` is the last one."""
        with self._lock:
            if self._state == STOPPING:
                return
            self._state, self._reason = state, reason
            self._observed_at = self._clock()
            self._up_since = self._unix_time() if state == RUNNING else 0.0
            if state != RUNNING:
                self._models, self._broken, self._instances = {}, {}, {}
                self._server_failure = NOT_PROBED

    def record_observation(self, broken: Mapping[str, str]) -> None:
        """Store an observation of the processes: the broken models, each with the reason."""
        with self._lock:
            self._observed_at, self._broken = self._clock(), dict(broken)

    def record_gateway(self, failure: str | None) -> None:
        """Store why the gateway of a guarded server is not listening; None if it is."""
        with self._lock:
            self._gateway_failure = failure

    def record_round_start(self, server_failure: str | None, models: Collection[str]) -> None:
        """Store the server's own readiness and the models to probe; other models are forgotten."""
        with self._lock:
            self._server_failure, self._server_probed_at = server_failure, self._clock()
            self._models = {name: self._models.get(name, (NOT_PROBED, self._clock())) for name in models}

    def record_answers(self, models: Collection[str], seen_at: float) -> None:
        """Record that models have answered requests from other callers."""
        with self._lock:
            self._models |= {name: (None, seen_at) for name in models if name in self._models}

    def record_probe(self, model: str, failure: str | None, started_at: float) -> None:
        """Count a probe of a model; `failure` is None on success.

        The probe that began last decides whether the model is ready.
        """
        with self._lock:
            if model in self._models and started_at >= self._models[model][1]:
                self._models[model] = failure, started_at
            self._counts["probes_total", (("model", model),)] += 1
            self._counts["probe_failures_total", (("model", model),)] += failure is not None

    def count(self, name: str, **labels: str) -> None:
        """Increment a counter of `METRICS`, with its labels."""
        with self._lock:
            self._counts[name, tuple(labels.items())] += 1

    def record_instances(self, instances: Mapping[str, int]) -> None:
        """Store the numbers of instances of the models whose number follows the load."""
        with self._lock:
            self._instances = dict(instances)

    def is_live(self) -> bool:
        """Return whether the supervision works."""
        with self._lock:
            return self._state != RUNNING or self._clock() - self._observed_at < MAX_OBSERVATION_AGE_S

    def why_not_ready(self) -> dict[str, Any]:
        """Return why the server is not ready: its own reason, its gateway's and its models', or nothing."""
        with self._lock:
            if self._state != RUNNING:
                return {"server": ": ".join(filter(None, (self._state, self._reason)))}
            reasons: dict[str, Any] = {}
            if failure := self._failure(self._server_failure, self._server_probed_at):
                reasons["server"] = failure
            if self._gateway_failure:
                reasons["gateway"] = self._gateway_failure
            failures = {
                name: reason
                for name, (failure, probed_at) in self._models.items()
                if (reason := self._failure(failure, probed_at))
            }
            if failures := {**failures, **self._broken}:
                reasons["models"] = dict(sorted(failures.items()))
            return reasons

    def metrics(self) -> str:
        """Return the metrics page in Prometheus' text format."""
        ready = float(not self.why_not_ready())
        with self._lock:
            samples: dict[tuple[str, MetricLabels], float] = dict(self._counts)
            samples["ready", ()] = ready
            samples |= {("instances", (("model", name),)): n for name, n in self._instances.items()}
            samples["server_up_since_seconds", ()] = self._up_since
        return prometheus_text.render(samples, PREFIX, METRICS)

    def _failure(self, failure: str | None, probed_at: float) -> str | None:
        age_s = self._clock() - probed_at
        return failure or (f"no response for {age_s:.0f} s" if age_s > MAX_ANSWER_AGE_S else None)


def page(health: ServerHealth, path: str, more_metrics: Callable[[], str] = str) -> HttpPage:
    """Return status, content type and body of a page; `more_metrics` returns samples of other parts."""
    if path == "/metrics":
        return HTTPStatus.OK, TEXT, health.metrics() + more_metrics()
    if path == "/livez":
        is_good = health.is_live()
        body: dict[str, Any] = {"live": is_good}
    elif path == "/readyz":
        reasons = health.why_not_ready()
        is_good, body = not reasons, {"ready": not reasons, **reasons}
    else:
        unknown = {"error": "unknown page: expected /livez, /readyz or /metrics"}
        return HTTPStatus.NOT_FOUND, JSON, json.dumps(unknown)
    return (HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE), JSON, json.dumps(body)


@contextlib.contextmanager
def serve(page_of: Callable[[str], HttpPage], host: str, port: int, name: str) -> Iterator[int]:
    """Serve pages by path on `port`, 0 for any free one, while the context is open; yield the port.

    Raises:
        ServerError: the port, called `name` in the message, cannot be used.
    """
    try:
        server = _Server((host, port), _handler(page_of))
    except OSError as error:
        raise unusable_port(name, host, port, error.strerror or str(error)) from None
    # Without an interval it wakes only for requests, and when its socket closes.
    thread = threading.Thread(target=server.serve_forever, args=[None], name=name, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.socket.shutdown(socket.SHUT_RDWR)
        server.shutdown()
        server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self._lock, self._peers = threading.Lock(), dict[Any, str]()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, within the limits."""
        peer = str(client_address[0])
        with self._lock:
            peer_connections = [connection for connection, owner in self._peers.items() if owner == peer]
            is_full = len(self._peers) >= MAX_CONNECTIONS
            if len(peer_connections) >= MAX_OF_PEER or is_full:
                oldest = next(iter(self._peers if is_full else peer_connections))
                del self._peers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread then ends
            self._peers[request] = peer
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._peers.pop(request, None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        # The base class looks up a DNS name that is not used.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that closed their connection."""


class _HeadReader(socket.SocketIO):
    """A connection whose head must be complete in time; a timeout per read would allow one byte at a time."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, "r")
        self._connection, self._deadline = connection, time.monotonic() + CLIENT_TIMEOUT_S

    def readinto(self, buffer: Any) -> int | None:
        self._connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
        try:
            return super().readinto(buffer)
        finally:
            self._connection.settimeout(CLIENT_TIMEOUT_S)


def _handler(page_of: Callable[[str], HttpPage]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S
        server_version, sys_version = "nereid", ""

        def setup(self) -> None:
            super().setup()
            self.rfile = io.BufferedReader(_HeadReader(self.connection))

        def do_GET(self) -> None:
            self._send(*page_of(self.path.partition("?")[0]))

        def reject(self) -> None:
            rejected = {"error": f"method not allowed: expected GET, got {self.command}"}
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, JSON, json.dumps(rejected))

        do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = reject

        def log_message(self, *args: Any) -> None:
            """Log nothing, because health checks are frequent."""

        def _send(self, status: HTTPStatus, content_type: str, body: str) -> None:
            content = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            if status == HTTPStatus.METHOD_NOT_ALLOWED:
                self.send_header("Allow", "GET")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    return Handler
