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

from nereid.cli.main import app
from nereid.errors import OperationFailed
from nereid.rollout import orders, service
from nereid.rollout.plan import make_plan
from nereid.rollout.rollout_journal import Journals
from nereid.routes.served import RunningServer
from nereid.routes.target import find_route, read_state
from nereid.server import run_dir
from tests.publishing import record_of
from tests.routes import (
    WATCHDOG_S,
    Load,
    RouteServer,
    X,
    document,
    given,
    order,
    replace,
    serve_routes,
    store_puppet,
    store_router,
    variant,
    wait_until,
)
from tests.supervised import calling, serving

ROUTE, CALLERS = "r", 6
# The limits are wide, so that few requests suffice; the steps are short.
QUICK = {
    "candidate": "new",
    "steps": [10, 50, 100],
    "hold_s": 1,
    "min_requests": 50,
    "max_error_increase": 0.05,
    "max_slow_increase": 0.9,
    "slo_ms": 250,
}
DELAY_MS = 6
# Watchdog of a phase of a rollout, which takes some 20 s on a machine with other load.
ROLLOUT_S = 300


class Rollout:
    """A route with variants `old` and `new`, a server of it, and a controller in this process."""

    def __init__(self, served: RouteServer, base: Path) -> None:
        self.served, self.base = served, base
        self.repository = served.repository
        self.log: list[str] = []
        self.record = record_of(served.server)

    @property
    def location(self):
        return find_route(self.repository)

    @property
    def state(self):
        return Journals.of(self.location).latest()

    def weights(self) -> dict[str, float]:
        return {each.name: each.weight for each in read_state(self.location).route().variants}

    def start(self, **changed):
        return orders.start(self.location, make_plan(**QUICK | changed), self.record)

    @contextlib.contextmanager
    def controlled(self):
        with service.in_background(self.repository, lambda: self.record, self.log.append):
            assert orders.wait_controlled(self.location)
            yield

    def wait_for(self, *phases: str):
        """Wait until the rollout has one of these phases, and return its state."""
        try:
            wait_until(lambda: self.state.phase in phases, f"one of {phases}", ROLLOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}, got {self.state}; log: {self.log}") from None
        return self.state


def store_site(repository: Path) -> Path:
    """Store a route of two puppets."""
    repository.mkdir()
    for name in ("old", "new"):
        store_puppet(repository, f"net_{name}", delay_ms=DELAY_MS)
    store_router(repository, ROUTE)
    replace(repository / f"{ROUTE}.route.json", json.dumps(before()).encode())
    return repository


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    base = tmp_path_factory.mktemp("rollout")
    repository = store_site(base / "models")
    with (
        run_dir.occupy(run_dir.root({"XDG_RUNTIME_DIR": str(base)}), repository) as folder,
        serve_routes(repository, folder) as served,
    ):
        run_dir.write(folder, record_of(served.server))
        yield Rollout(served, base)


def before():
    """Return the route before a rollout: `new` is served only on request."""
    return document(
        variant("old", "net_old", 100), variant("new", "net_new", 0), shadow_max_in_flight=2 * CALLERS
    )


@pytest.fixture
def rollout(rollouts):
    """Begin with the route before a rollout, a healthy candidate and no active rollout."""
    rollouts.log.clear()
    for name in ("old", "new"):
        order(rollouts.repository, f"net_{name}", delay_ms=DELAY_MS)
    rollouts.served.use(ROUTE, before())
    yield rollouts
    with contextlib.suppress(OperationFailed):
        orders.order(rollouts.location, "abort")
        orders.finish(rollouts.location, lambda: rollouts.record, print)


@pytest.fixture
def nereid(rollouts):
    environment = {"XDG_RUNTIME_DIR": str(rollouts.base), "NEREID_REPOSITORY": str(rollouts.repository)}
    return lambda *words: CliRunner().invoke(app, ["rollout", *words], env=environment)


def errors(load: Load) -> list[Exception]:
    return [each.answer for each in load.outcomes if each.is_failed]


@pytest.mark.slow
def test_good_candidate_gets_all_traffic(rollout, nereid):
    with rollout.controlled(), Load(rollout.served, ROUTE, CALLERS) as load:
        assert nereid("status").stdout.startswith(("no rollout yet", "rollout "))
        rollout.start(steps=["shadow", 50, 100], max_disagreement=0.2)
        state = rollout.wait_for("ended", "paused")

    assert (state.result, rollout.weights()) == ("promoted", {"old": 0, "new": 100})
    assert not errors(load)
    assert not read_state(rollout.location).route().shadows
    events = [json.loads(line) for line in nereid("history", str(state.number), "--json").stdout.splitlines()]
    assert [each["event"] for each in events if each["event"] != "look"] == [
        "start",
        *["change", "begin", "pass"] * 2,
        "change",
        "begin",
        "end",
    ]
    assert "promoted" in nereid("status").stdout


@pytest.mark.slow
def test_bad_candidate_loses_the_traffic(rollout):
    order(rollout.repository, "net_new", delay_ms=DELAY_MS, error="planted", error_share=0.2)
    with rollout.controlled(), Load(rollout.served, ROUTE, CALLERS) as load:
        rollout.start()
        state = rollout.wait_for("ended", "paused")
        since = time.monotonic()
        load.wait_for(lambda outcome: not outcome.is_failed, 20, since)

    assert (state.result, rollout.weights()) == ("rolled back", {"old": 100, "new": 0})
    # Three of the first seven requests may fail by chance, which opens the breaker.
    assert state.reasons[0].startswith(("error ", "the breaker of 'new' has opened")), state.reasons
    assert {each.answer.variant for each in load.begun_after(since)} == {"old"}
    assert rollout.served.grpc.is_model_ready("net_new")


@pytest.mark.slow
def test_killed_controller_is_continued(rollout):
    """`nereid rollout controller` is killed in a step; the next one promotes, and ends with status 0."""
    words = [sys.executable, "-m", "nereid", "rollout", "controller", "--repository", str(rollout.repository)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(rollout.base)}
    with Load(rollout.served, ROUTE, CALLERS) as load, subprocess.Popen(words, env=environment) as first:
        rollout.start()
        rollout.wait_for("measuring")
        first.kill()
        with subprocess.Popen(words, env=environment) as second:
            try:
                state = rollout.wait_for("ended", "paused")
            finally:
                second.send_signal(signal.SIGINT)
                assert second.wait(WATCHDOG_S) == 0

    assert (state.result, rollout.weights()) == ("promoted", {"old": 0, "new": 100}), state.reasons
    served = RunningServer(rollout.record).served(ROUTE)
    assert served.sha256s == {read_state(rollout.location).sha256}
    assert not errors(load)


@pytest.mark.slow
def test_restarted_server_continues_the_rollout(tmp_path):
    """`nereid serve` replaces a killed `tritonserver`, whose counters begin anew; the rollout goes on."""
    repository = store_site(tmp_path / "models")
    with serving(repository, tmp_path / "run") as served:
        state = orders.start(
            find_route(repository), make_plan(**QUICK | {"hold_s": 5, "steps": [10, 100]}), served.record
        )
        logs = Journals.of(find_route(repository))

        with calling(served, ROUTE, CALLERS, given=lambda protocol: given(protocol, X)):
            wait_until(lambda: logs.latest().look, "a look")
            during = served.page("/metrics")[1]
            pid = served.record.pid
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: served.record.pid != pid, "a new server")
            wait_until(lambda: not logs.latest().is_active, "the end")
            page = served.page("/metrics")[1]

    assert logs.latest().result == "promoted", logs.latest().reasons
    assert logs.latest().number == state.number
    # Which of its reasons to wait the controller meets first depends on the moment.
    assert "wait, step 10 %: " in served.log
    assert 'nereid_rollout_share{route="r",candidate="new"} 0.1' in during
    assert "nereid_rollout_" not in page
