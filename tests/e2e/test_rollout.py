"""Rollouts on the real server, under load of both protocols: who is promoted, and who loses the traffic."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nereid.base.errors import OperationFailed
from nereid.cli.main import app
from nereid.models.rollout import commands
from nereid.models.routes.location import read_route_file
from nereid.server import run_dir
from tests import routes
from tests.networks import client_input
from tests.rollouts import ROUTE, Rollouts, before
from tests.supervised import calling, serving

CALLERS = 6
BEFORE = before(shadow_max_in_flight=2 * CALLERS)
DELAY_MS = 6
# Watchdog of a phase of a rollout, which takes some 20 s on a machine with other load.
ROLLOUT_S = 300


class Rollout(Rollouts):
    def __init__(self, served: routes.RouteServer, base: Path) -> None:
        super().__init__(served.repository, served.server.info(), hold_s=1, slo_ms=250)
        self.served, self.base, self.repository = served, base, served.repository

    @contextlib.contextmanager
    def controlled(self):
        words = [sys.executable, "-m", "nereid", "rollout", "controller", "--repository", self.repository]
        environment = os.environ | {"XDG_RUNTIME_DIR": str(self.base)}
        with subprocess.Popen(words, env=environment) as controller:
            try:
                routes.wait_until(lambda: commands.wait_controlled(self.location), "the controller")
                yield
            finally:
                controller.send_signal(signal.SIGINT)
            assert controller.wait(routes.WATCHDOG_S) == 0

    def wait_for(self, *phases: str):
        routes.wait_until(lambda: self.state.phase in phases, f"one of {phases}", ROLLOUT_S)
        return self.state


def store_site(repository: Path) -> Path:
    repository.mkdir()
    for name in ("old", "new"):
        routes.store_puppet(repository, f"net_{name}", delay_ms=DELAY_MS)
    routes.store_router(repository, ROUTE, BEFORE)
    return repository


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    base = tmp_path_factory.mktemp("rollout")
    repository = store_site(base / "models")
    with (
        run_dir.occupy(run_dir.root({"XDG_RUNTIME_DIR": str(base)}), repository) as folder,
        routes.serve_routes(repository, folder) as served,
    ):
        run_dir.write(folder, served.server.info())
        yield Rollout(served, base)


@pytest.fixture
def rollout(rollouts):
    """Begin with the route before a rollout, a healthy candidate and no active rollout."""
    for name in ("old", "new"):
        routes.order(rollouts.repository, f"net_{name}", delay_ms=DELAY_MS)
    rollouts.served.use(ROUTE, BEFORE)
    yield rollouts
    with contextlib.suppress(OperationFailed):
        commands.issue(rollouts.location, "abort")
        commands.finish(rollouts.location, lambda: rollouts.server_info, print)


@pytest.fixture
def nereid(rollouts):
    environment = {"XDG_RUNTIME_DIR": str(rollouts.base), "NEREID_REPOSITORY": str(rollouts.repository)}
    return lambda *words: CliRunner().invoke(app, ["rollout", *words], env=environment)


@pytest.mark.slow
def test_good_candidate_gets_all_traffic(rollout, nereid):
    with rollout.controlled(), routes.Load(rollout.served, ROUTE, CALLERS) as load:
        assert nereid("status").stdout.startswith(("no rollout yet", "rollout "))
        rollout.start(steps=["shadow", 50, 100], max_disagreement=0.2)
        state = rollout.wait_for("ended", "paused")

    assert (state.result, rollout.weights()) == ("promoted", {"old": 0, "new": 100})
    assert [outcome.answer for outcome in load.outcomes if outcome.is_failed] == []
    assert not read_route_file(rollout.location).route().shadows
    events = [json.loads(line) for line in nereid("history", str(state.number), "--json").stdout.splitlines()]
    seen = [event["event"] for event in events if event["event"] != "look"]
    assert seen == ["start", *["change", "begin", "pass"] * 2, "change", "begin", "end"]
    assert "promoted" in nereid("status").stdout


@pytest.mark.slow
def test_bad_candidate_loses_the_traffic(rollout):
    routes.order(rollout.repository, "net_new", delay_ms=DELAY_MS, error="planted", error_share=0.2)
    with rollout.controlled(), routes.Load(rollout.served, ROUTE, CALLERS) as load:
        rollout.start()
        state = rollout.wait_for("ended", "paused")
        since = time.monotonic()
        load.wait_for(lambda outcome: not outcome.is_failed, 20, since)

    assert (state.result, rollout.weights()) == ("rolled back", {"old": 100, "new": 0})
    # Three of the first seven requests may fail by chance, which opens the breaker.
    assert state.reasons[0].startswith(("error ", "the breaker of 'new' has opened")), state.reasons
    assert {outcome.answer.variant for outcome in load.begun_after(since)} == {"old"}
    assert rollout.served.grpc.is_model_ready("net_new")


@pytest.mark.slow
def test_restarted_server_continues_the_rollout(tmp_path):
    """The rollout continues when `nereid serve` replaces a killed `tritonserver`, whose counters restart."""
    repository = store_site(tmp_path / "models")
    with serving(repository, tmp_path / "run") as served:
        rollout = Rollouts(repository, served.server_info, hold_s=5, slo_ms=250)
        number = rollout.start(steps=[10, 100]).number

        with calling(served, ROUTE, CALLERS, inputs=lambda protocol: client_input(protocol, "x", routes.X)):
            routes.wait_until(lambda: rollout.state.look, "a look")
            during = served.page("/metrics")[1]
            pid = served.server_info.pid
            os.kill(pid, signal.SIGKILL)
            routes.wait_until(lambda: served.server_info.pid != pid, "a new server")
            routes.wait_until(lambda: not rollout.state.is_active, "the end")
            page = served.page("/metrics")[1]

    assert (rollout.state.result, rollout.state.number) == ("promoted", number), rollout.state.reasons
    # Which of its reasons to wait the controller meets first depends on the moment.
    assert "wait, step 10 %: " in served.log
    assert 'nereid_rollout_share{route="r",candidate="new"} 0.1' in during
    assert "nereid_rollout_" not in page
