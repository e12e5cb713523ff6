"""Debian's Alertmanager with the committed configuration: a dead server silences its followers."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from nereid.server.ports import free_ports
from tests.conftest import ROOT
from tests.deployment import listening
from tests.deployment import running as run_program
from tests.monitoring import alerts
from tests.routes import wait_until

FOUND = shutil.which("prometheus-alertmanager")
pytestmark = pytest.mark.skipif(
    not FOUND, reason="Alertmanager is not installed; fix: apt-get install prometheus-alertmanager"
)
CONFIG = ROOT / "deploy" / "alertmanager" / "alertmanager.yml"


@dataclass(frozen=True, slots=True)
class Alertmanager:
    api: str
    bodies: list[bytes]

    @property
    def notified(self) -> list[set[str]]:
        return [{*re.findall(r'"alertname":"(\w+)"', body.decode())} for body in self.bodies]

    def fire(self, *names: str) -> None:
        labels = {alert["alert"]: alert["labels"] | {"alertname": alert["alert"]} for alert in alerts()}
        httpx.post(f"{self.api}/alerts", json=[{"labels": labels[name]} for name in names]).raise_for_status()

    def states(self) -> dict[str, str]:
        response: list[dict[str, Any]] = httpx.get(f"{self.api}/alerts").json()
        return {alert["labels"]["alertname"]: alert["status"]["state"] for alert in response}


@contextmanager
def running(folder: Path, changes: dict[str, str]) -> Iterator[str]:
    text = CONFIG.read_text()
    for pattern, replacement in changes.items():
        text = re.sub(pattern, replacement, text, flags=re.M)
    (folder / "alertmanager.yml").write_text(text)
    (port,) = free_ports(1)
    words = [str(FOUND), f"--config.file={folder / 'alertmanager.yml'}"]
    words += [f"--storage.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    words += ["--cluster.listen-address=", "--log.level=debug"]
    with run_program(words, folder / "log", f"http://127.0.0.1:{port}/-/ready"):
        yield f"http://127.0.0.1:{port}/api/v2"


@pytest.fixture
def alertmanager(tmp_path):
    """Alertmanager with the webhook of the comment, which waits for a second only."""
    with listening() as (url, bodies):
        changes = {
            r"^  # (- name: webhook|  webhook_configs)": r"  \1",
            r"url_file: \S+\}": f"url: {url}}}",
            r"receiver: log": "receiver: webhook",
            r"group_wait: \w+": "group_wait: 1s",
        }
        with running(tmp_path, changes) as api:
            yield Alertmanager(api, bodies)


def test_dead_server_silences_its_followers(alertmanager):
    alertmanager.fire("ServerNotReady")
    wait_until(lambda: {"ServerNotReady"} in alertmanager.notified, "the page")

    alertmanager.fire("GatewayErrors", "Drift")
    wait_until(lambda: {"Drift"} in alertmanager.notified, "the ticket")

    expected = {"ServerNotReady": "active", "GatewayErrors": "suppressed", "Drift": "active"}
    assert alertmanager.states() == expected
    assert set().union(*alertmanager.notified) == {"ServerNotReady", "Drift"}


def test_alerts_are_logged_without_a_webhook(tmp_path):
    with running(tmp_path, {}) as api:
        Alertmanager(api, []).fire("ServerNotReady")

        wait_until(lambda: "ServerNotReady" in (tmp_path / "log").read_text(), "a line of the log")
