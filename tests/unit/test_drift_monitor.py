"""The drift monitor in front of metrics pages that a test writes."""

import datetime
import json
import os
from http import HTTPStatus
from pathlib import Path

import pytest

from nereid.backends.routing import reference_file
from nereid.backends.triton.metrics import ROUTE_QUALITY_METRICS
from nereid.base.errors import OperationFailed
from nereid.insight.drift.drift_report import report
from nereid.insight.drift.monitor import STATE_FILE, DriftState, Monitor, MonitoredServer
from nereid.insight.drift.recording import RECORDING_FILE
from nereid.server.ports import Ports
from nereid.server.run_dir import GatewayInfo, ServerInfo
from nereid.server.supervision import health
from tests.routes import document, replace, store_adding, store_router, variant

CONFIDENCE = ROUTE_QUALITY_METRICS["confidence"].buckets
BOUNDS = [*(f"{bound:g}" for bound in CONFIDENCE), "+Inf"]


class World:
    def __init__(self, base: Path) -> None:
        self.repository, self.run_dir = base / "models", base / "run"
        for folder in (self.repository, self.run_dir):
            folder.mkdir()
        store_adding(self.repository, "net", 1.0, 2.0)
        store_router(self.repository, "r")
        content = document(variant("v1", "net", 1), variant("v2", "net", 1, version=2))
        replace(self.repository / "r.route.json", json.dumps(content).encode())
        self.now, self.pid, self.log = 1e9, 1, list[str]()
        self.counts = dict.fromkeys(BOUNDS, 0)
        self.port, self.is_running = 0, True
        self.monitor = Monitor(self.repository, self.find, self.log.append, lambda: self.now)

    def find(self) -> MonitoredServer | None:
        ports = Ports(1, 2, self.port)
        server_info = ServerInfo(self.pid, "127.0.0.1", ports, str(self.repository), "ensemble", "")
        return (server_info, self.run_dir) if self.is_running else None

    def page(self, path: str) -> health.HttpPage:
        labels = 'model_instance="r_0_0",route="r",variant="v1",version="1"'
        lines, below = [], 0
        for bound, count in self.counts.items():
            below += count
            lines.append(f'nereid_route_confidence_bucket{{le="{bound}",{labels}}} {below}')
        return HTTPStatus.OK, health.TEXT, "\n".join(lines) + "\n"

    def look(self, *added: int) -> DriftState:
        for bound, count in zip(BOUNDS, added, strict=False):
            self.counts[bound] += count
        self.now += 60
        self.monitor.poll()
        assert self.monitor.state
        return self.monitor.state

    def store_reference(self, *counts: int) -> None:
        filled = (*counts, *[0] * (len(BOUNDS) - len(counts)))
        signals = {"confidence": reference_file.Histogram(CONFIDENCE, filled)}
        created = datetime.datetime.fromtimestamp(self.now - 30, datetime.UTC)
        mine = reference_file.VariantReference("v1", "net", 1, "1", sum(counts), signals)
        path = reference_file.path_of(self.repository, "r")
        path.write_bytes(reference_file.format_reference(reference_file.Reference(created, "test", (mine,))))
        os.utime(path, (self.now - 30, self.now - 30))


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    with health.serve(made.page, "127.0.0.1", 0, "metrics") as made.port:
        yield made


def test_growth_is_compared_with_the_reference(world):
    world.store_reference(100, 100, 100)
    world.look(1000, 0, 0)

    same = world.look(100, 100, 100).routes[0].variants[0]
    other = world.look(1000, 0, 0).routes[0].variants[0]
    world.look(100, 0, 0)

    assert (same.requests, same.has_drifted, same.reference_age_s) == (300, False, 150)
    assert (other.requests, other.has_drifted, other.idle_s) == (1300, True, 0)
    assert world.log == ["drift: variant 'v1' of 'r' exceeds its limit: confidence"]


def test_window_forgets_old_images(world):
    world.store_reference(100, 100, 100)
    world.look()
    world.look(1000, 0, 0)
    world.now += 3600

    drift = world.look().routes[0].variants[0]

    assert (drift.requests, drift.signals[0].verdict) == (0, "too few")
    assert drift.idle_s == 3660
    assert world.log[1:] == ["drift: variant 'v1' of 'r' has no signal over its limit"]


def test_restarted_server_counts_from_zero(world):
    world.look(10)
    world.look(10)
    world.counts = dict.fromkeys(BOUNDS, 0)
    world.pid = 2

    assert world.look(30).routes[0].variants[0].requests == 40


def test_route_without_a_reference_is_recorded(world):
    world.look()
    first = world.look(50).routes[0]
    world.store_reference(100, 100, 100)
    second = world.look().routes[0]

    assert [drift.problem for drift in first.variants] == ["the route has no reference"] * 2
    assert (first.variants[0].requests, first.variants[0].signals) == (50, ())
    assert [drift.problem for drift in second.variants] == ["", "the reference does not have this variant"]


def test_invalid_files_are_named(world):
    reference_file.path_of(world.repository, "r").write_text("{")
    assert "nereid drift baseline" in world.look().routes[0].variants[0].problem
    (world.repository / "r.route.json").write_text("{")
    assert "nereid route revert" in world.look().routes[0].problem


def test_look_is_due_once_a_minute_and_after_a_new_reference(world):
    """A user who stores a reference need not wait for the next minute."""
    assert world.monitor.is_due()
    world.look()
    assert not world.monitor.is_due()
    world.store_reference(100, 100, 100)
    assert world.monitor.is_due()
    world.look()
    assert not world.monitor.is_due()
    world.now += 60
    assert world.monitor.is_due()


def test_trouble_is_logged_once(world):
    world.look()
    world.port = 1
    for _ in range(3):
        world.monitor.poll()
    world.is_running = False
    world.monitor.poll()

    (trouble,) = world.log
    assert trouble.startswith("drift: ConnectionRefusedError")


def test_commands_read_the_state(world):
    with pytest.raises(OperationFailed, match="no drift data yet"):
        report(world.run_dir, "r", [])
    world.look()
    state = world.look(5)

    summary = report(world.run_dir, "r", [])

    assert (summary.at, summary.route) == (state.at, state.routes[0])
    assert {path.name for path in world.run_dir.iterdir()} == {STATE_FILE, RECORDING_FILE}
    assert all(path.stat().st_mode & 0o077 == 0 for path in world.run_dir.iterdir())
    with pytest.raises(OperationFailed, match="does not know route 'other'"):
        report(world.run_dir, "other", [])


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_feedback_comes_from_gateways_on_any_address(world, host):
    counted = 'nereid_gateway_feedback_total{{model="r",variant="v1",result="{}"}} {}\n'
    text = counted.format("correct", 3) + counted.format("wrong", 1)
    world.look()

    with health.serve(lambda path: (HTTPStatus.OK, health.TEXT, text), "127.0.0.1", 0, "gateway") as port:
        (accuracy,) = report(world.run_dir, "r", [GatewayInfo(1, host, port)]).accuracy

    assert (accuracy.answers, accuracy.correct) == (4, 3)
