"""The gateway process of a guarded server, and the page of Triton's metrics."""

import contextlib
import http.client
import importlib.util
import json
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path

from nereid.base import prometheus_text
from nereid.base.errors import ServerError
from nereid.base.processes import BackOff
from nereid.server import run_dir
from nereid.server.command_line import ServerOptions
from nereid.server.ports import check_ports
from nereid.server.supervision import health
from nereid.server.supervision.health import JSON, TEXT, HttpPage

START_TIMEOUT_S, STOP_TIMEOUT_S, STOP_POLL_INTERVAL_S = 60.0, 40.0, 0.1
METRICS_TIMEOUT_S = 5.0
PACKAGE, INSTALL = "uvicorn", "pip install 'nereid-serving[gateway]'"
# Starts the gateway of a server, which prints its ports to stdout.
Launcher = Callable[[ServerOptions], "subprocess.Popen[str]"]


class GatewayProcess:
    """A gateway process that is restarted when it exits.

    Args:
        launch: starts the process, which Ctrl-C must not reach and which must end with this one.

    Raises:
        ServerError: the gateway's packages are missing.
    """

    def __init__(self, launch: Callable[[], "subprocess.Popen[str]"], log: Callable[[str], None]) -> None:
        if importlib.util.find_spec(PACKAGE) is None:
            raise ServerError(f"a guarded server needs the package '{PACKAGE}'", INSTALL)
        self._launch_process, self._log = launch, log
        self._process: subprocess.Popen[str] | None = None
        self._back_off = BackOff()
        self._has_listened, self._started_at = False, 0.0

    def start(self) -> None:
        """Start the gateway of a running server unless it is running already, and wait until it listens.

        Raises:
            ServerError: the gateway did not start; the reason is on stderr.
        """
        if self._process:
            return
        self._launch()
        self._is_listening(START_TIMEOUT_S)
        if not self._has_listened:
            self.stop()
            raise ServerError("the gateway in front of the server did not start")

    def keep(self) -> str | None:
        """Restart a gateway that has exited, with growing pauses; return why it is not listening, or None."""
        if self._process is None:
            return None
        now_s = time.monotonic()
        if (status := self._process.poll()) is None:
            if self._is_listening(0):
                return None
            if now_s > self._started_at + START_TIMEOUT_S:
                self._process.kill()
            return "the gateway is starting"
        if self._back_off.due_at is None:
            pause_s = self._back_off.record_failure(now_s)
            self._log(f"supervisor: the gateway exited with status {status}; restarting in {pause_s:g} s")
        elif now_s >= self._back_off.due_at:
            try:
                self._launch()
            except OSError as error:
                pause_s = self._back_off.record_failure(now_s)
                self._log(f"supervisor: the gateway cannot be started: {error}; next try in {pause_s:g} s")
        return f"the gateway exited with status {status}"

    def stop(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Stop the gateway; its requests may finish unless `is_hurried` returns true."""
        if self._process is None:
            return
        deadline = time.monotonic() + STOP_TIMEOUT_S
        self._process.send_signal(signal.SIGTERM)
        while self._process.poll() is None and time.monotonic() < deadline and not is_hurried():
            time.sleep(STOP_POLL_INTERVAL_S)
        self._process.kill()
        self._end()
        self._process = None

    def _end(self) -> None:
        """Wait for the process to exit, and close its pipe."""
        if self._process:
            with self._process:
                pass

    def _is_listening(self, timeout_s: float) -> bool:
        assert self._process
        assert self._process.stdout
        if not self._has_listened and select.select([self._process.stdout], [], [], timeout_s)[0]:
            self._has_listened = bool(self._process.stdout.readline())
        return self._has_listened

    def _launch(self) -> None:
        self._started_at = time.monotonic()
        self._back_off.record_start(self._started_at)
        self._end()
        self._process, self._has_listened = self._launch_process(), False


@contextlib.contextmanager
def gateway_of(
    options: ServerOptions, folder: Path, launch: Launcher, log: Callable[[str], None]
) -> Iterator[GatewayProcess]:
    """Return a guarded server's gateway, not started yet, with a page for Triton's metrics.

    Raises:
        ServerError: a port cannot be used.
    """
    check_ports(options.host, options.ports)
    pages = partial(metrics_of, run_dir.socket_url(run_dir.socket_folder(folder), "metrics"))
    front = GatewayProcess(lambda: launch(options), log)
    with health.serve(pages, options.host, options.ports.metrics, "metrics"):
        try:
            yield front
        finally:
            front.stop(lambda: True)


def metrics_of(url: str, path: str) -> HttpPage:
    """Return status, content type and body of a page of Triton's metrics port."""
    if path != "/metrics":
        return HTTPStatus.NOT_FOUND, JSON, json.dumps({"error": "unknown page: expected /metrics"})
    try:
        return HTTPStatus.OK, TEXT, prometheus_text.fetch(url, METRICS_TIMEOUT_S)
    except (OSError, http.client.HTTPException):
        return HTTPStatus.SERVICE_UNAVAILABLE, JSON, json.dumps({"error": "the server does not respond"})
