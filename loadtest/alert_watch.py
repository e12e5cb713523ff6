"""Debian's Prometheus and Alertmanager with the committed rules in scaled time, and a webhook for alerts."""

import contextlib
import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import yaml

from loadtest import time_scale
from loadtest.http_receiver import listening
from nereid.processes import end_with_parent
from nereid.server.ports import free_ports

PROGRAMS = ("prometheus", "prometheus-alertmanager")
DASHBOARD = time_scale.DEPLOY / "grafana" / "dashboards" / "nereid.json"
START_S, TIMEOUT_S = 30.0, 10.0
PAGES = 'ALERTS{alertstate="firing",severity="page"}'


@dataclass(frozen=True, slots=True)
class Notice:
    """One alert of a notification, as it arrived at a monotonic time."""

    at_s: float
    status: str
    labels: Mapping[str, str]
    fingerprint: str


@dataclass
class Webhook:
    """The alerts that the webhook got, oldest first."""

    url: str
    notices: list[Notice] = field(default_factory=list)

    def fired(self, names: Sequence[str], since_s: float) -> list[Notice]:
        """Return the firing alerts with one of these names that arrived later."""
        return [each for each in self._since(since_s, "firing") if each.labels["alertname"] in names]

    def resolved(self, fingerprint: str, since_s: float) -> list[Notice]:
        """Return the ends of an alert that arrived later."""
        return [each for each in self._since(since_s, "resolved") if each.fingerprint == fingerprint]

    def names(self, since_s: float) -> list[str]:
        """Return the names and severities of the alerts that arrived later, in order."""
        found = (each.labels for each in self._since(since_s, "firing"))
        return [*dict.fromkeys(f"{each['alertname']} ({each['severity']})" for each in found)]

    def _since(self, since_s: float, status: str) -> list[Notice]:
        return [each for each in list(self.notices) if each.at_s >= since_s and each.status == status]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus, by its address."""

    address: str

    def series(self, expression: str) -> list[tuple[Mapping[str, str], float]]:
        """Return the labels and the current value of each series of an expression, without NaN."""
        answer = httpx.get(f"{self.address}/api/v1/query", params={"query": expression}, timeout=TIMEOUT_S)
        if not answer.is_success:
            raise SystemExit(f"Prometheus refused '{expression}': {answer.text}")
        found = [(each["metric"], float(each["value"][1])) for each in answer.json()["data"]["result"]]
        return [(labels, value) for labels, value in found if math.isfinite(value)]

    def largest(self, expression: str, window_s: float, labels: Mapping[str, str]) -> float:
        """Return the largest value in the last seconds, of the series with these labels; 0 without any."""
        window = max(2, round(window_s))
        found = self.series(f"max_over_time(({expression})[{window}s:1s])")
        return max((value for has, value in found if labels.items() <= has.items()), default=0.0)

    def pages(self, window_s: float) -> set[str]:
        """Return the names of the page alerts that fired at any moment of the last seconds."""
        found = self.series(f"max_over_time({PAGES}[{max(1, round(window_s))}s])")
        return {labels["alertname"] for labels, _ in found}


def panel(title: str, place: int = 0) -> str:
    """Return a query of the committed dashboard in scaled time."""
    document = json.loads(DASHBOARD.read_text())
    every = [inner for each in document["panels"] for inner in (each, *each.get("panels", ()))]
    (found,) = (each for each in every if each["title"] == title and each["type"] != "row")
    text = found["targets"][place]["expr"].replace("$__rate_interval", "1m")
    return time_scale.expression(text)


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    """Receive notifications of Alertmanager on a free port."""

    def keep(body: bytes) -> None:
        at_s = time.monotonic()
        for each in json.loads(body)["alerts"]:
            notice = Notice(at_s, each["status"], each["labels"], each["fingerprint"])
            found.notices.append(notice)

    class Page(BaseHTTPRequestHandler):
        """Handler of the notifications."""

        def do_POST(self) -> None:
            """Keep the alerts of a notification."""
            keep(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *about: object) -> None:
            """Log nothing."""

    found = Webhook("")
    with listening(Page) as address:
        found.url = f"http://{address}/"
        yield found


@contextlib.contextmanager
def metrics_page(text: Callable[[], str]) -> Iterator[str]:
    """Serve a metrics page on a free port; gives HOST:PORT."""

    class Page(BaseHTTPRequestHandler):
        """Handler of the page."""

        def do_GET(self) -> None:
            """Send the present page."""
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # Prometheus waits no longer than an interval
                self.wfile.write(body)

        def log_message(self, *about: object) -> None:
            """Log nothing."""

    with listening(Page) as address:
        yield address


@contextlib.contextmanager
def watched(folder: Path, targets: Mapping[str, list[str]], url: str, ignored: str) -> Iterator[Prometheus]:
    """Run Prometheus and Alertmanager with the committed files in scaled time.

    Args:
        folder: takes configurations, data and logs.
        targets: HOST:PORT of each job.
        url: of the webhook.
        ignored: HOST:PORT of a target whose `nereid_drift_` is left out, because its window is not scaled.
    """
    folder.mkdir()
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    config = time_scale.scrapes(targets, second)
    drop = {"source_labels": ["instance", "__name__"], "regex": f"{ignored};nereid_drift_.+"}
    for job in config["scrape_configs"]:
        job["metric_relabel_configs"] = [drop | {"action": "drop"}]
    for path in (time_scale.RULES, time_scale.ALERTS):
        _write(folder / path.name, time_scale.rules(path))
    _write(folder / "prometheus.yml", config)
    _write(folder / "alertmanager.yml", time_scale.notifications(url))
    storage = f"--storage.tsdb.path={folder / 'data'}"
    own = f"--config.file={folder / 'prometheus.yml'}", storage, "--log.level=warn"
    other = f"--config.file={folder / 'alertmanager.yml'}", f"--storage.path={folder / 'notified'}"
    with (
        _program(PROGRAMS[1], folder, second, *other, "--cluster.listen-address=", "--log.level=warn"),
        _program(PROGRAMS[0], folder, first, *own),
    ):
        yield Prometheus(f"http://{first}")


def missing() -> str:
    """Return the package that is not installed, with the command to install it; empty if none is."""
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    return f"missing: {', '.join(absent)}; fix: apt-get install {' '.join(absent)}" if absent else ""


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(document, sort_keys=False, width=1000))


@contextlib.contextmanager
def _program(name: str, folder: Path, address: str, *words: str) -> Iterator[None]:
    log = folder / f"{name}.log"
    with log.open("w") as output:
        command = [name, *words, f"--web.listen-address={address}"]
        process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=end_with_parent())
    try:
        _wait_until_ready(process, address, log)
        yield
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(process: subprocess.Popen, address: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://{address}/-/ready").is_success:
                return
        time.sleep(0.1)
    raise SystemExit(f"expected that {address} is ready, got:\n{log.read_text()[-3000:]}")
