"""Incidents of a served route: the alert that reaches a webhook, the dashboard, and `nereid why`.

Debian's Prometheus and Alertmanager watch a real server and gateway with the committed rules. All of their
durations are divided by 60; thresholds stay. Each incident has a calm phase before it, in which no page may
fire, and ends when its alert is resolved.

    python -m loadtest.incidents [--only NAME …]
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest import alert_watch, incident_causes, record, servers, time_scale
from loadtest.alert_watch import Notice
from loadtest.incident_causes import SLOW, Photos, Scene
from loadtest.photo_callers import PhotoCallers
from loadtest.swap import ROUTE
from nereid import assets
from nereid.drift import drift_metrics
from nereid.drift.monitor import Monitor, Server, Timing, in_background
from nereid.server import run_dir

CALLERS, PERIOD_S = 3, 0.1
CALM_S, WARM_S, SETTLED_S = 10.0, 15.0, 3.0
# Limits of a phase; the alerts need less.
FIRES_S, RESOLVES_S, SETTLES_S = 75.0, 90.0, 60.0
# `nereid why` looks at this much of an incident.
WHY_S = 15
DRIFT = Timing(time_scale.seconds("1m"), time_scale.seconds("1h"))
HEADINGS = (
    *("incident", "alert", "fired after", "panel: calm → incident", "cause", "stage that grew most"),
    *("resolved after", "failed requests"),
)
Cause = Callable[[Scene], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident, and the expected alert and explanation.

    Attributes:
        begin: lets the incident last for a context.
        alerts: names, of which one must reach the webhook.
        cause: expected from `nereid why`.
        panel, place: title of a panel of the dashboard, and the place of its query.
        labels: of the series that is shown.
        severity: expected of the alert.
        signal: expected label of the alert; "" for none.
        variant: expected as that of the slow requests; "" for any.
        prepare: runs before the calm phase.
    """

    begin: Cause
    alerts: tuple[str, ...]
    cause: str
    panel: str
    place: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    severity: str = "page"
    signal: str = ""
    variant: str = ""
    prepare: Callable[[Scene], None] = lambda scene: None


LATENCY = ("RouteSlow", "GatewaySlow")
INCIDENTS = {
    "a slow version gets traffic": Incident(
        incident_causes.slow_version, LATENCY, "network", "Latency by variant", 1, variant=SLOW
    ),
    "processes of a model die": Incident(
        incident_causes.dying_processes,
        ("RouteErrors", "GatewayErrors", "ServerNotReady"),
        "unavailable",
        "Errors",
    ),
    "30 % damaged images": Incident(
        incident_causes.damaged_images,
        ("RouteInvalidImages", "GatewayInvalidImages"),
        "invalid_image",
        "Outcomes",
        labels={"outcome": "invalid_image"},
        severity="ticket",
    ),
    "dark images": Incident(
        incident_causes.dark_images,
        ("Drift",),
        "",
        "Drift, relative to its limit",
        labels={"signal": "brightness"},
        severity="ticket",
        signal="brightness",
        prepare=incident_causes.take_reference,
    ),
    "other programs take the cores": Incident(
        incident_causes.busy_loops,
        LATENCY,
        "cores",
        "Error budget: burn rate of slow requests",
    ),
}


def play(name: str, scene: Scene) -> record.Row:
    """Let an incident happen after a calm phase, wait until its alert is resolved, and return its row."""
    incident = INCIDENTS[name]
    incident.prepare(scene)
    query = alert_watch.panel(incident.panel, incident.place)
    pages = _calm(scene)
    before = scene.prometheus.largest(query, CALM_S, incident.labels)
    began_s = time.monotonic()
    with incident.begin(scene):
        notice = _wait_for(lambda: _notice(incident, scene, began_s), FIRES_S)
        time.sleep(max(0.0, began_s + WHY_S - time.monotonic()))
        why = json.loads(scene.nereid("why", "--since", f"{WHY_S}s", "--route", ROUTE, "--json"))
        during = scene.prometheus.largest(query, time.monotonic() - began_s, incident.labels)
    over_s = time.monotonic()
    end = notice and _wait_for(lambda: scene.webhook.resolved(notice.fingerprint, began_s), RESOLVES_S)
    outcomes = scene.callers.outcomes(began_s, time.monotonic())
    row = {
        "incident": name,
        "alert": notice.labels["alertname"] if notice else None,
        "severity": notice.labels["severity"] if notice else None,
        "labels": dict(notice.labels) if notice else {},
        "fired_s": round(notice.at_s - began_s, 1) if notice else None,
        "alerts": scene.webhook.names(began_s),
        "panel": incident.panel,
        "query": query,
        "before": before,
        "during": during,
        "cause": why["cause"],
        "why": why["why"],
        "stage": _grown(why),
        "slow_variant": why["slow_variant"],
        "p50_ms": round(why["p50_ms"], 1),
        "p99_ms": round(why["p99_ms"], 1),
        "resolved_s": round(end[0].at_s - over_s, 1) if end else None,
        "requests": outcomes.total(),
        "failed": outcomes.total() - outcomes["ok"],
        "outcomes": dict(outcomes),
        "calm_pages": pages,
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def _calm(scene: Scene) -> list[str]:
    """Wait until no page fires, then for the calm phase; returns the pages that fire in it."""
    _wait_for(lambda: not scene.prometheus.pages(SETTLED_S), SETTLES_S)
    time.sleep(CALM_S)
    return sorted(scene.prometheus.pages(CALM_S - 1))


def _notice(incident: Incident, scene: Scene, since_s: float) -> Notice | None:
    expected = (incident.severity, incident.signal)
    for each in scene.webhook.fired(incident.alerts, since_s):
        if (each.labels["severity"], each.labels.get("signal", "")) == expected:
            return each
    return None


def _wait_for(condition: Callable[[], Any], limit_s: float) -> Any:
    """Return the first true value of a condition, or the last one when the time is over."""
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return found


def _grown(why: Mapping[str, Any]) -> str:
    """Return the stage in which slow requests spend the most time more than typical ones."""
    typical, slow = why["typical_ms"], why["slow_ms"]
    return max(slow, key=lambda name: float(slow[name] - typical.get(name, 0.0)), default="")


def problems(row: record.Row) -> list[str]:
    """Return the differences of a row from the expected result."""
    incident = INCIDENTS[row["incident"]]
    found = [f"{each} fired in the calm phase" for each in row["calm_pages"]]
    if not row["alert"]:
        expected = f"{' or '.join(incident.alerts)} ({incident.severity})"
        found.append(f"expected {expected}, got {row['alerts']}")
    elif row["resolved_s"] is None:
        found.append(f"{row['alert']} was not resolved")
    if row["cause"] != incident.cause:
        found.append(f"expected the cause '{incident.cause}', got '{row['cause']}': {row['why']}")
    if incident.variant and row["slow_variant"] != incident.variant:
        found.append(f"expected slow requests of '{incident.variant}', got '{row['slow_variant']}'")
    if row["during"] <= row["before"]:
        found.append(f"the panel '{row['panel']}' did not move: {row['before']:g} → {row['during']:g}")
    return [f"{row['incident']}: {each}" for each in found]


@contextlib.contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    """Serve a copy of the default repository under load, watched in scaled time."""
    repository = shutil.copytree(assets.REPOSITORY, folder / "models")
    incident_causes.prefer_dying(repository)
    incident_causes.add_slow_version(repository, folder)
    (own := folder / "run").mkdir()
    photos = Photos.crops()
    with (
        servers.supervised(repository, own, os.environ) as running,
        servers.gateway_of(running) as gateway,
        drift_page(running, folder) as drift,
        alert_watch.webhook() as webhook,
    ):
        supervisor = f"127.0.0.1:{running.record.health_port}"
        targets = {
            "server": [running.record.url("metrics")],
            "gateway": [f"127.0.0.1:{gateway.port}"],
            "supervisor": [supervisor, drift],
        }
        with (
            alert_watch.watched(folder / "watch", targets, webhook.url, supervisor) as prometheus,
            PhotoCallers(targets["gateway"][0], CALLERS, PERIOD_S, photos.any_normal) as callers,
        ):
            time.sleep(WARM_S)
            yield Scene(running, callers, prometheus, webhook, photos)


@contextlib.contextmanager
def drift_page(running: servers.Supervised, folder: Path) -> Iterator[str]:
    """Run the drift monitor with a scaled window, and serve its metrics; gives HOST:PORT."""
    (own := folder / "drift").mkdir()

    def find() -> Server | None:
        found = run_dir.find(run_dir.root(running.environment), running.repository)
        return Server(found, own) if found else None

    monitor = Monitor(running.repository, find, lambda line: print(line, file=sys.stderr), DRIFT)
    with (
        in_background(monitor),
        alert_watch.metrics_page(lambda: drift_metrics.metrics(monitor.state)) as address,
    ):
        yield address


def run(names: Sequence[str], folder: Path) -> list[record.Row]:
    """Let incidents happen one after the other on one server; returns a row for each."""
    with scene(folder) as found:
        return [play(name, found) for name in names]


def _cells(row: record.Row) -> list[str]:
    fired, resolved, place = row["fired_s"], row["resolved_s"], row["panel"]
    variant = f", variant `{row['slow_variant']}`" if row["slow_variant"] else ""
    return [
        row["incident"],
        f"`{row['alert']}` ({row['severity']})"
        if row["alert"]
        else f"missed; got {', '.join(row['alerts'])}",
        f"{fired:.0f} s" if fired is not None else "",
        f"{place}: {row['before']:.3g} → {row['during']:.3g}",
        f"`{row['cause']}`" if row["cause"] else "nothing unusual",
        f"`{row['stage']}`{variant}",
        f"{resolved:.0f} s" if resolved is not None else "no",
        f"{row['failed']:,} of {row['requests']:,}",
    ]


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/monitoring.md."""
    return record.markdown(HEADINGS, map(_cells, rows))


def _parser() -> argparse.ArgumentParser:
    made = record.parser(__doc__)
    made.add_argument(
        "--only", nargs="+", choices=INCIDENTS, default=[*INCIDENTS], help="incidents, default: all"
    )
    return made


def main() -> int:
    """Let all incidents happen, print and record; exit status 1 if one had another result than expected."""
    args = record.parsed(_parser(), alert_watch.missing())
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        rows = run(args.only, Path(scratch))
    print(markdown(rows))
    result = {
        "factor": time_scale.FACTOR,
        "scrape_s": time_scale.SCRAPE_S,
        "min_range_s": time_scale.MIN_RANGE_S,
        "drift_interval_s": DRIFT.interval_s,
        "drift_window_s": DRIFT.window_s,
        "callers": CALLERS,
        "period_s": PERIOD_S,
        "seconds": round(time.monotonic() - began_s),
        "rows": rows,
    }
    return record.finish(args.record, result, [each for row in rows for each in problems(row)])


if __name__ == "__main__":
    record.end(main)
