"""What `nereid serve` knows about its server, told over HTTP: live, ready, and metrics of the supervision."""

import contextlib
import http.server
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from nereid.errors import ServerError
from nereid.server.ports import why_unusable

# An answer older than this says nothing any more: a probe each second, and the time one may take.
FRESH_S = 8.0
# The supervision looks several times a second; without a look for so long it is dead.
ALIVE_S = 30.0
CLIENT_TIMEOUT_S = 10.0
UNASKED = "not asked yet"
RUNNING, STARTING, RESTARTING, STOPPING = "running", "starting", "restarting", "stopping"
PREFIX = "nereid_supervisor_"
JSON, TEXT = "application/json", "text/plain; version=0.0.4; charset=utf-8"
METRICS = {
    "repairs_total": ("counter", "Loads of a model whose stub was found dead."),
    "repair_failures_total": ("counter", "Repairs that Triton refused."),
    "restarts_total": ("counter", "Starts of tritonserver after the first."),
    "probes_total": ("counter", "Images that the supervisor had classified, or tried to."),
    "probe_failures_total": ("counter", "Probes without an answer."),
    "ready": ("gauge", "1 if every model that takes images classified one lately."),
    "server_up_since_seconds": ("gauge", "Unix time since when tritonserver is ready; 0 while it is not."),
}

Labels = tuple[tuple[str, str], ...]


class Health:
    """The state of one supervised server; all methods may be called from any thread.

    Args:
        clock: seconds that never jump.
        unix_time: seconds since 1970.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, unix_time: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._unix_time = clock, unix_time
        self._lock = threading.Lock()
        self._state, self._reason = STARTING, ""
        self._up_since_s = 0.0
        self._looked_s = clock()
        self._server_failure: str | None = UNASKED
        self._server_asked_s = clock()
        self._models: dict[str, tuple[str | None, float]] = {}
        self._dead: dict[str, str] = {}
        self._counts: Counter[tuple[str, Labels]] = Counter({("restarts_total", ()): 0})

    def enter(self, state: str, reason: str = "") -> None:
        """Take note of what the server does now; nothing follows `stopping`."""
        with self._lock:
            if self._state == STOPPING:
                return
            self._state, self._reason = state, reason
            self._looked_s = self._clock()
            self._up_since_s = self._unix_time() if state == RUNNING else 0.0
            if state != RUNNING:
                self._models, self._dead, self._server_failure = {}, {}, UNASKED

    def looked(self, dead: Mapping[str, str]) -> None:
        """Take note of a look at the processes: the models of which one is dead, and what of it."""
        with self._lock:
            self._looked_s, self._dead = self._clock(), dict(dead)

    def asked(self, server_failure: str | None, models: Collection[str]) -> None:
        """Take note of a probe of the server, and of which models are to be probed; others are forgotten."""
        with self._lock:
            self._server_failure, self._server_asked_s = server_failure, self._clock()
            self._models = {name: self._models.get(name, (UNASKED, self._clock())) for name in models}

    def probed(self, model: str, failure: str | None, began_s: float) -> None:
        """Count a probe of a model that began at a time of the clock; None is a success.

        Its outcome is what is told, unless that of a probe which began later is known.
        """
        with self._lock:
            if model in self._models and began_s >= self._models[model][1]:
                self._models[model] = failure, began_s
            self._counts["probes_total", (("model", model),)] += 1
            self._counts["probe_failures_total", (("model", model),)] += failure is not None

    def repaired(self, model: str, cause: str) -> None:
        """Count a repair; the cause is `pid` or `probe`."""
        self._count("repairs_total", model=model, cause=cause)

    def repair_failed(self, model: str) -> None:
        """Count a repair that did not work."""
        self._count("repair_failures_total", model=model)

    def restarted(self) -> None:
        """Count a start of the server after the first."""
        self._count("restarts_total")

    def is_live(self) -> bool:
        """Tell whether somebody looks after the server."""
        with self._lock:
            return self._state != RUNNING or self._clock() - self._looked_s < ALIVE_S

    def why_not_ready(self) -> dict[str, Any]:
        """Return what keeps the server from being ready: of itself, and by model; empty if it is."""
        with self._lock:
            if self._state != RUNNING:
                return {"server": ": ".join(filter(None, (self._state, self._reason)))}
            found: dict[str, Any] = {}
            if failure := self._stale(self._server_failure, self._server_asked_s):
                found["server"] = failure
            failures = {
                name: reason
                for name, (failure, asked_s) in self._models.items()
                if (reason := self._stale(failure, asked_s))
            }
            if failures := {**failures, **self._dead}:
                found["models"] = dict(sorted(failures.items()))
            return found

    def metrics(self) -> str:
        """Return the metrics page in Prometheus' text format."""
        ready = float(not self.why_not_ready())
        with self._lock:
            samples: dict[tuple[str, Labels], float] = dict(self._counts)
            samples["ready", ()] = ready
            samples["server_up_since_seconds", ()] = self._up_since_s
        return render(samples)

    def _count(self, name: str, **labels: str) -> None:
        with self._lock:
            self._counts[name, tuple(labels.items())] += 1

    def _stale(self, failure: str | None, asked_s: float) -> str | None:
        age_s = self._clock() - asked_s
        return failure or (f"no answer for {age_s:.0f} s" if age_s > FRESH_S else None)


def render(samples: Mapping[tuple[str, Labels], float]) -> str:
    """Return samples in Prometheus' text format; each of `METRICS` is there, with or without samples."""
    lines = []
    for name, (kind, text) in METRICS.items():
        lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"]
        for (family, labels), value in sorted(samples.items()):
            if family == name:
                inner = ",".join(f'{key}="{_escape(word)}"' for key, word in labels)
                lines.append(f"{PREFIX}{name}{f'{{{inner}}}' if inner else ''} {value:.15g}")
    return "\n".join(lines) + "\n"


def answer(health: Health, path: str) -> tuple[HTTPStatus, str, str]:
    """Return status, content type and body of a page."""
    if path == "/metrics":
        return HTTPStatus.OK, TEXT, health.metrics()
    if path == "/livez":
        is_good = health.is_live()
        body: dict[str, Any] = {"live": is_good}
    elif path == "/readyz":
        reasons = health.why_not_ready()
        is_good, body = not reasons, {"ready": not reasons, **reasons}
    else:
        return HTTPStatus.NOT_FOUND, JSON, json.dumps({"error": "there are /livez, /readyz and /metrics"})
    return (HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE), JSON, json.dumps(body)


@contextlib.contextmanager
def serve(health: Health, host: str, port: int) -> Iterator[int]:
    """Answer on `port`, 0 for any free one, for as long as the context lasts; gives the port.

    Raises:
        ServerError: the port cannot be used.
    """
    try:
        if port and (reason := why_unusable(host, port)):
            raise OSError(0, reason)
        server = _Server((host, port), _handler(health))
    except OSError as error:
        raise ServerError(
            f"health port {port} on {host} cannot be used: {error.strerror}; "
            "fix: choose another with --health-port, 0 for any free one, or another --host"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # The base class asks the DNS for a name that nobody needs.
        http.server.socketserver.TCPServer.server_bind(self)  # type: ignore[attr-defined]
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away."""


def _handler(health: Health) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S
        server_version, sys_version = "nereid", ""

        def do_GET(self) -> None:
            self._send(*answer(health, self.path.partition("?")[0]))

        def refuse(self) -> None:
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, JSON, json.dumps({"error": "only GET"}))

        do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = refuse

        def log_message(self, *words: Any) -> None:
            """Polling is no news."""

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


def _escape(word: str) -> str:
    return word.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
