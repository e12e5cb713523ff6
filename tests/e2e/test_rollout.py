"""Rollouts on the real server, under load of both protocols: who is promoted, and who loses the traffic."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nereid.cli.main import app
from nereid.errors import OperationFailed, WrongUsage
from nereid.publish.publisher import publish
from nereid.rollout import orders, service
from nereid.rollout.plan import make_plan
from nereid.rollout.rollout_journal import Journals, RolloutActive
from nereid.routes.served import RunningServer
from nereid.routes.target import find_route, read_state
from nereid.routing.breaker import State as BreakerState
from nereid.server import run_dir
from tests.publishing import record_of
from tests.routes import (
    WATCHDOG_S,
    Load,
    RouteServer,
    answered_by,
    document,
    order,
    replace,
    serve_routes,
    store_puppet,
    store_router,
    variant,
    wait_until,
)
from tests.supervised import Served, serving

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
# The route reports its counts this often.
FLUSH_S = 0.5
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
        """The route."""
        return find_route(self.repository)

    @property
    def state(self):
        """The newest rollout."""
        return Journals.of(self.location).latest()

    def weights(self) -> dict[str, float]:
        """Return the weights in the route file."""
        return {each.name: each.weight for each in read_state(self.location).route().variants}

    def start(self, **changed):
        """Start a rollout with short steps."""
        return orders.start(self.location, make_plan(**QUICK | changed), self.record)

    @contextlib.contextmanager
    def controlled(self):
        """Run the controller."""
        with service.in_background(self.repository, lambda: self.record, self.log.append):
            assert orders.wait_controlled(self.location)
            yield

    def wait_for(self, *phases: str):
        """Wait until the rollout has one of these phases, and return its state."""
        try:
            wait_until(lambda: self.state.phase in phases, f"one of {phases}", ROLLOUT_S)
        except AssertionError as error:
            threads = "\n".join(
                "".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()
            )
            raise AssertionError(f"{error}, got {self.state}; log: {self.log}; threads:\n{threads}") from None
        return self.state


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Serve a route of two puppets."""
    base = tmp_path_factory.mktemp("rollout")
    repository = base / "models"
    repository.mkdir()
    for name in ("old", "new"):
        store_puppet(repository, f"net_{name}", delay_ms=DELAY_MS)
    store_router(repository, ROUTE)
    replace(repository / f"{ROUTE}.route.json", json.dumps(before()).encode())
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
    """Run `nereid rollout WORDS`."""
    environment = {"XDG_RUNTIME_DIR": str(rollouts.base), "NEREID_REPOSITORY": str(rollouts.repository)}

    def run(*words: str):
        return CliRunner().invoke(app, ["rollout", *words], env=environment)

    return run


def errors(load: Load) -> list[Exception]:
    """Return the failures that callers saw."""
    return [each.answer for each in load.outcomes if each.is_failed]


@pytest.mark.slow
def test_good_candidate_gets_all_traffic(rollout, nereid):
    """Each step is confirmed by numbers; no caller sees an error; every event is in the history."""
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


BAD = {
    "errors": ({"error": "planted", "error_share": 0.2}, "error "),
    "slow": ({"delay_ms": 10 * DELAY_MS}, ("slow ", "the median latency is")),
    "breaker": ({"error": "planted"}, ("the breaker of 'new' has opened", "error 100.00%")),
}


@pytest.mark.slow
@pytest.mark.parametrize(("behaviour", "reason"), BAD.values(), ids=BAD)
def test_bad_candidate_loses_the_traffic(rollout, behaviour, reason):
    """The reason names the numbers; the candidate stays loaded; the control answers everything afterwards."""
    order(rollout.repository, "net_new", **{"delay_ms": DELAY_MS} | behaviour)
    with rollout.controlled(), Load(rollout.served, ROUTE, CALLERS) as load:
        rollout.start(slo_ms=32, max_slow_increase=0.2)
        state = rollout.wait_for("ended", "paused")
        since = time.monotonic()
        load.wait_for(lambda outcome: not outcome.is_failed, 20, since)

    assert (state.result, rollout.weights()) == ("rolled back", {"old": 100, "new": 0})
    assert state.reasons[0].startswith(reason), state.reasons
    assert not [each for each in load.begun_after(since) if each.is_failed]
    assert {each.answer.variant for each in load.begun_after(since)} == {"old"}
    # It stays loaded.
    assert rollout.served.grpc.is_model_ready("net_new")


@pytest.mark.slow
def test_wrong_candidate_is_found_by_its_shadow(rollout):
    """It never answers a caller."""
    order(rollout.repository, "net_new", delay_ms=0, factor=-1)
    with rollout.controlled(), Load(rollout.served, ROUTE, 1) as load:
        rollout.start(steps=["shadow", 50, 100])
        state = rollout.wait_for("ended", "paused")

    assert state.result == "rolled back"
    assert state.reasons[0].startswith("disagreement 100.00%")
    assert {each.answer.variant for each in load.outcomes} == {"old"}
    assert not read_state(rollout.location).route().shadows


# Its breaker may have opened before or after the measurement began.
OF_A_DEAD_CANDIDATE = (
    "the breaker of 'new' has opened",
    "the breaker of 'new' has not closed",
    "error 100.00%",
)


@pytest.mark.slow
def test_dead_candidate_loses_the_traffic(rollout):
    """Its process is killed while it answers: its breaker opens."""
    with rollout.controlled(), Load(rollout.served, ROUTE, CALLERS) as load:
        rollout.start(hold_s=30)
        load.wait_for(answered_by("new"))
        with killed(rollout.served, "net_new"):
            state = rollout.wait_for("ended", "paused")

    assert (state.result, rollout.weights()) == ("rolled back", {"old": 100, "new": 0})
    assert state.reasons[0].startswith(OF_A_DEAD_CANDIDATE)


@pytest.mark.slow
def test_candidate_that_died_before_its_step_loses_the_traffic(rollout):
    """Its breaker has opened before the measurement begins, and stays open."""
    shares = variant("old", "net_old", 90), variant("new", "net_new", 10)
    rollout.served.use(ROUTE, document(*shares))
    with Load(rollout.served, ROUTE, CALLERS) as load, killed(rollout.served, "net_new"):
        rollout.served.wait_metric(BreakerState.OPEN, "breaker_state", route=ROUTE, variant="new")
        load.wait_for(answered_by("old"), CALLERS, since=time.monotonic())
        with rollout.controlled():
            rollout.start()
            state = rollout.wait_for("ended", "paused")

    assert (state.result, rollout.weights()) == ("rolled back", {"old": 100, "new": 0})
    assert state.reasons[0].startswith(OF_A_DEAD_CANDIDATE)


@contextlib.contextmanager
def killed(served: RouteServer, model: str):
    """Kill all processes of a model, and repair it at the end."""
    served.kill(model)
    try:
        yield
    finally:
        served.repair(model)


@pytest.mark.slow
def test_candidate_that_is_a_fallback_is_judged_by_its_own_requests(rollout, nereid):
    """What it answers for the control counts for neither: the step pauses, and its repetition decides."""
    rollout.served.use(ROUTE, before() | {"fallbacks": ["new"]})
    drawn, replaced = own_and_replaced(rollout)
    with rollout.controlled(), Load(rollout.served, ROUTE, CALLERS) as load:
        rollout.start(hold_s=8)
        rollout.wait_for("measuring")
        rollout.served.grpc.unload_model("net_old")
        wait_until(lambda: rollout.state.elapsed_s > 6, "most of the step")
        assert own_and_replaced(rollout)[1] > replaced + 200
        rollout.served.grpc.load_model("net_old")
        state = rollout.wait_for("ended", "paused")
        time.sleep(2 * FLUSH_S)  # the counts of the last requests come later
        most = own_and_replaced(rollout)[0] - drawn

        assert (state.phase, state.reasons[0][:12]) == ("paused", "broken split"), state
        assert state.look.events["error"][0].events == 0
        assert 50 <= state.look.events["error"][0].requests <= most
        assert 50 <= sum(state.look.latencies[0]) <= most
        assert nereid("resume").exit_code == 0
        wait_until(lambda: rollout.state.phase != "paused", "the resumed step")
        state = rollout.wait_for("ended", "paused")

    assert (state.result, rollout.weights()) == ("promoted", {"old": 0, "new": 100}), state.reasons
    assert not errors(load)
    assert read_state(rollout.location).route().fallbacks == ("new",)


def own_and_replaced(rollout) -> tuple[float, float]:
    """Return the requests that chance gave to the candidate, and its responses for the control."""
    metric = rollout.served.metric
    drawn = metric("requests_total", route=ROUTE, variant="new", reason="weight")
    return drawn, metric("fallbacks_total", route=ROUTE, to="new")


def test_candidate_that_is_not_loaded_gets_no_traffic(rollout):
    """The server refuses the first step, and the reason names the model."""
    rollout.served.grpc.unload_model("net_new")
    wait_until(lambda: not rollout.served.grpc.is_model_ready("net_new"), "unloaded")
    with rollout.controlled():
        rollout.start()
        state = rollout.wait_for("ended", "paused")
    rollout.served.grpc.load_model("net_new")

    assert (state.result, rollout.weights()) == ("rolled back", {"old": 100, "new": 0})
    assert state.reasons == ("the candidate is not ready: 'new' names version 1 of 'net_new': not ready",)


@pytest.mark.slow
def test_too_little_traffic_pauses_and_says_so(rollout, nereid):
    """Nothing is decided without requests, also in a step begun anew by `resume`, and after `promote`."""
    with rollout.controlled():
        rollout.start(patience_s=3)
        state = rollout.wait_for("paused")
        assert state.reasons == ("no decision within 3 s", "0 of at least 50 requests of the candidate")
        assert rollout.weights() == {"old": 90, "new": 10}
        assert "paused at step 10 %: no decision within 3 s" in nereid("status").stdout

        assert nereid("resume").exit_code == 0
        rollout.wait_for("measuring")
        assert nereid("promote", "--reason", "tested elsewhere").exit_code == 0
        wait_until(lambda: rollout.weights() == {"old": 0, "new": 100}, "all traffic")
        state = rollout.wait_for("paused")
    assert state.reasons[1] == "0 of at least 50 requests of the candidate"


@pytest.mark.slow
def test_inconclusive_step_can_roll_back(rollout):
    """The plan decides what follows, and its hook receives the decision."""
    seen = rollout.base / "decision.json"
    with rollout.controlled():
        hook = f"tee {seen}"
        rollout.start(patience_s=2, if_inconclusive="rollback", hooks={"after_decision": hook})
        state = rollout.wait_for("ended", "paused")
        wait_until(lambda: seen.exists() and seen.read_text().endswith("}"), "the hook")
    assert (state.result, rollout.weights()) == ("rolled back", {"old": 100, "new": 0})
    decision = json.loads(seen.read_text())
    assert (decision["event"], decision["rollout"]["result"]) == ("after_decision", "rolled back")


@pytest.mark.slow
def test_edited_route_pauses_and_names_the_edit(rollout, nereid):
    """The controller never overwrites somebody else's change before a person resumes."""
    with rollout.controlled():
        rollout.start()
        rollout.wait_for("measuring")
        CliRunner().invoke(
            app,
            ["route", "set", "new=33"],
            env={"XDG_RUNTIME_DIR": str(rollout.base), "NEREID_REPOSITORY": str(rollout.repository)},
        )
        state = rollout.wait_for("paused")
        assert state.reasons == ("the route was changed outside the rollout: variants[new].weight: 10 → 33",)
        assert rollout.weights()["new"] == 33
        assert nereid("resume").exit_code == 0
        wait_until(lambda: rollout.weights() == {"old": 90, "new": 10})


def test_edit_just_before_a_change_is_not_overwritten(rollout):
    """Here the hook is the other person: it edits the route after the controller has read it."""
    words = f"-m nereid route set new=77 --repository {rollout.repository}"
    edit = f"env XDG_RUNTIME_DIR={rollout.base} {sys.executable} {words}"
    with rollout.controlled():
        rollout.start(hooks={"before_step": edit})
        state = rollout.wait_for("paused")

    assert state.reasons == ("the route was changed outside the rollout: see nereid route history",)
    assert rollout.weights() == {"old": 100, "new": 77}


@pytest.mark.slow
def test_second_abort_does_not_end_a_rollback(rollout, nereid):
    """An impatient caller must not leave the traffic at the candidate."""
    with rollout.controlled():
        rollout.start()
        rollout.wait_for("measuring")
    orders.order(rollout.location, "abort")

    refused = nereid("abort")

    assert refused.exit_code == 1
    assert "cannot abort: rollout" in refused.stderr
    assert "rolling back from step 10 %" in refused.stderr
    orders.finish(rollout.location, lambda: rollout.record, print)
    assert rollout.weights() == {"old": 100, "new": 0}


@pytest.mark.slow
def test_plan_measures_the_traffic(rollout, nereid):
    """Each step has its requests and its time; without traffic it says so."""
    with Load(rollout.served, ROUTE, CALLERS):
        busy = nereid("plan", "new", "--steps", "shadow,25,100", "--hold-s", "5").stdout
    time.sleep(2 * FLUSH_S)  # the counts of the last requests come later
    idle = nereid("plan", "new", "--steps", "25,100").stdout

    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in busy.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["shadow", "25 %", "100 %"]
    assert all(int(row[1].replace(",", "")) >= 100 and row[2].endswith(" s") for row in rows)
    assert rows[1][3] == "error"
    assert idle.count("unknown (no traffic)") == 2


@pytest.mark.slow
def test_controller_command_carries_out_a_rollout(rollout):
    """`nereid rollout controller` is the controller of a server that `nereid serve` did not start."""
    words = ["-m", "nereid", "rollout", "controller", "--repository", str(rollout.repository)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(rollout.base)}
    process = subprocess.Popen([sys.executable, *words], env=environment)
    try:
        with Load(rollout.served, ROUTE, CALLERS):
            rollout.start()
            state = rollout.wait_for("ended", "paused")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(WATCHDOG_S) == 0
    assert state.result == "promoted", state.reasons


@pytest.mark.slow
def test_abort_works_without_a_controller(rollout, nereid):
    """The command itself withdraws the candidate."""
    with rollout.controlled():
        rollout.start()
        rollout.wait_for("measuring")
    done = nereid("abort", "--reason", "second thoughts")

    assert done.exit_code == 0, done.stderr
    assert (rollout.state.result, rollout.weights()) == ("aborted", {"old": 100, "new": 0})
    assert nereid("abort").exit_code == 1


def test_second_rollout_is_refused(rollout, nereid):
    """A second candidate would disturb the comparison."""
    rollout.start()
    refused = nereid("start", "new")
    assert refused.exit_code == 1
    assert (
        "cannot start a rollout of 'new': the rollout of 'new' on route 'r' is at step 10 %" in refused.stderr
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"candidate": "v9"}, "unknown candidate 'v9': expected a variant of the route, old, new"),
        ({"candidate": "old"}, "expected one variant with traffic as the control of 'old', got none"),
    ],
)
def test_impossible_rollouts_are_refused(rollout, plan, message):
    """The message has what was expected and what came."""
    with pytest.raises(WrongUsage, match=message):
        rollout.start(**plan)


def test_hooks_run_and_a_failing_one_pauses(rollout):
    """A hook before a step gets the rollout as JSON; one that fails stops the rollout before the step."""
    seen = rollout.base / "seen.json"
    code = f"import sys, pathlib; pathlib.Path('{seen}').write_text(sys.stdin.read()); sys.exit('not yet')"
    with rollout.controlled():
        rollout.start(hooks={"before_step": f'{sys.executable} -c "{code}"'})
        state = rollout.wait_for("paused")
    assert state.reasons == ("the hook before_step failed, see the log",)
    assert any("ended with status 1: not yet" in line for line in rollout.log)
    assert json.loads(seen.read_text())["rollout"]["plan"]["candidate"] == "new"
    assert rollout.weights() == {"old": 100, "new": 0}


def test_publication_waits_for_the_end_of_a_rollout(rollout):
    """A third version would disturb the comparison; the message names the rollout."""
    rollout.start()
    with pytest.raises(
        RolloutActive, match="cannot publish a version of 'net': the rollout of 'new' on route 'r'"
    ):
        publish(rollout.repository, "net", rollout.base / "any.onnx", rollout.record)


# The moments, in this order, at which controllers die: before or after a line. Lines of the route's history
# have no event. Once the route file is written, its change is not repeated, so the history gets one line.
KILLS = {
    "promoted": "-change change- -history -begin begin- -look look- -pass pass- history- -end end-",
    "rolled back": "-change change- history- -begin begin- -look look- -fail fail- -history -end end-",
}
FAILING = {"error": "planted", "error_share": 0.3}
KILLED = """
import os, signal, sys, threading
from pathlib import Path
from nereid import json_lines
from nereid.rollout import service
from nereid.server import run_dir

kill, append = sys.argv[3], json_lines.append

def dying(file, line):
    event = getattr(line, "event", "history")
    if kill == f"-{event}":
        os.kill(os.getpid(), signal.SIGKILL)
    append(file, line)
    if kill == f"{event}-":
        os.kill(os.getpid(), signal.SIGKILL)

json_lines.append = dying
repository, base = map(Path, sys.argv[1:3])
find = lambda: run_dir.find(run_dir.root({"XDG_RUNTIME_DIR": str(base)}), repository)
service.run(repository, find, threading.Event(), print)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("result", "kills"), KILLS.items(), ids=KILLS)
def test_killed_controller_is_continued(rollout, result, kills):
    """Controllers are killed before and after each kind of line; file, server and result agree at the end."""
    promoted = result == "promoted"
    order(rollout.repository, "net_new", delay_ms=DELAY_MS, **({} if promoted else FAILING))
    with Load(rollout.served, ROUTE, CALLERS) as load:
        rollout.start()
        for kill in kills.split():
            assert rollout.state.is_active
            words = [str(rollout.repository), str(rollout.base), kill]
            done = subprocess.run([sys.executable, "-c", KILLED, *words], timeout=ROLLOUT_S, check=False)
            assert done.returncode == -signal.SIGKILL, kill

    assert (rollout.state.phase, rollout.state.result) == ("ended", result)
    assert rollout.weights() == {"old": 100 * (not promoted), "new": 100 * promoted}
    served = RunningServer(rollout.record).served(ROUTE)
    assert served.sha256s == {read_state(rollout.location).sha256}
    assert all("planted" in str(error) for error in errors(load))


@pytest.mark.slow
def test_restarted_server_continues_the_rollout(tmp_path):
    """`nereid serve` replaces a killed `tritonserver`, whose counters begin anew; the rollout goes on."""
    repository = tmp_path / "models"
    repository.mkdir()
    for name in ("old", "new"):
        store_puppet(repository, f"net_{name}", delay_ms=DELAY_MS)
    store_router(repository, ROUTE)
    replace(repository / f"{ROUTE}.route.json", json.dumps(before()).encode())
    with serving(repository, tmp_path / "run") as served:
        state = orders.start(find_route(repository), make_plan(**QUICK | {"hold_s": 5}), served.record)
        logs = Journals.of(find_route(repository))

        with sending(served):
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


@contextlib.contextmanager
def sending(served: Served):
    """Send requests to the route of a supervised server; failures while it is away do not count."""
    over = threading.Event()

    def send():
        data = json.dumps({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [0, 5, 1]}]})
        while not over.is_set():
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                contextlib.closing(
                    http.client.HTTPConnection("127.0.0.1", served.ports["http"], timeout=WATCHDOG_S)
                ) as connection,
            ):
                while not over.is_set():
                    connection.request("POST", f"/v2/models/{ROUTE}/infer", data)
                    connection.getresponse().read()
            time.sleep(0.1)

    threads = [threading.Thread(target=send) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(WATCHDOG_S)
