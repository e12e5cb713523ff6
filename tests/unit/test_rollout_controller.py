"""The controller of a rollout in simulated time: real files, commands and pages, requests by arithmetic."""

import json
import sys
import threading
from collections import Counter
from dataclasses import dataclass

import pytest

from nereid.base import files
from nereid.base.errors import WrongUsage
from nereid.models.rollout import commands
from nereid.models.rollout.controller import Controller
from nereid.models.rollout.plan import BOUNDS
from nereid.models.rollout.rollout_journal import folder_of
from nereid.models.routes.change import change, propose_weights, served_status
from nereid.models.routes.location import read_route_file
from nereid.server import run_dir
from tests.fake_server import FakeServer, killed_at, running
from tests.rollouts import ROUTE, Rollouts, before
from tests.routes import document, replace, store_adding, store_router, variant
from tests.tables import cases

pytestmark = pytest.mark.process
REQUESTS, LOOKS = 400, 400


@dataclass
class Behaviour:
    """How a variant answers: the part of its requests that fail, its latency, and its breaker."""

    errors: float = 0.0
    latency_s: float = 0.006
    breaker: int = 0
    shadow: str = "agreed"


class Simulation(Rollouts):
    """A route with variants `old` and `new`, a fake server of it, and a controller with its own clock."""

    def __init__(self, server, server_info) -> None:
        super().__init__(server.repository, server_info, hold_s=5, slo_ms=32)
        self.server, self.log, self.now_s, self.requests = server, [], 0.0, REQUESTS
        self.behaviour = {"old": Behaviour(), "new": Behaviour()}
        self.is_up = True
        self.replace_controller()

    def use(self, **more) -> None:
        """Make the route that of before a rollout, with these fields."""
        replace(self.location.path, json.dumps(before(**more)).encode())

    def replace_controller(self) -> None:
        self.controller = Controller(
            self.location,
            lambda: self.server_info if self.is_up else None,
            self.log.append,
            lambda: self.now_s,
        )

    def look(self, count: int = 1) -> None:
        for _ in range(count):
            self.now_s += 1
            self.answer(self.requests)
            self.controller.step()

    def run(self, *phases: str):
        """Poll until the rollout has one of these phases; returns its state."""
        for _ in range(LOOKS):
            self.look()
            if self.state.phase in phases:
                return self.state
        raise AssertionError(f"none of {phases}: {self.state}, {self.log}")

    def start_measuring(self, **changed) -> None:
        self.start(**changed)
        self.run("measuring")

    def answer(self, requests: int) -> None:
        """Count requests on the page, by weight; an open breaker gives those of its variant to the other."""
        route = read_route_file(self.location).route()
        total = sum(entry.weight for entry in route.variants)
        for entry in route.variants:
            traits, labels = self.behaviour[entry.name], f'route="{ROUTE}",variant="{entry.name}",version="1"'
            self.server.counts[f"breaker_state{{{labels}}}"] = traits.breaker
            drawn = round(requests * entry.weight / total)
            if traits.breaker == 2:
                other = labels.replace(entry.name, {"old": "new", "new": "old"}[entry.name])
                self.count(other, drawn, 0, "breaker", 0.006)
            else:
                self.count(labels, drawn, round(drawn * traits.errors), "weight", traits.latency_s)
        for shadow in route.shadows:
            labels = f'route="{ROUTE}",shadow="{shadow.name}",outcome="{self.behaviour["new"].shadow}"'
            self.server.counts[f"shadow_requests_total{{{labels}}}"] += requests

    def count(self, labels: str, requests: int, failed: int, reason: str, latency_s: float) -> None:
        for outcome, number in (("ok", requests - failed), ("inference_failed", failed)):
            series = f'{labels},outcome="{outcome}",reason="{reason}"'
            self.server.counts[f"requests_total{{{series}}}"] += number
        chosen = "false" if reason == "breaker" else "true"
        for bound in (*BOUNDS, float("inf")):
            if latency_s <= bound:
                series = f'{labels},outcome="ok",chosen="{chosen}",le="{bound}"'
                self.server.counts[f"request_duration_seconds_bucket{{{series}}}"] += requests - failed


@pytest.fixture
def repository(tmp_path):
    for name in ("old", "new"):
        store_adding(tmp_path / "models", f"net_{name}", 1)
    store_router(tmp_path / "models", ROUTE, before())
    return tmp_path / "models"


@pytest.fixture
def rollout(repository, tmp_path):
    """A simulation whose candidate is as good as its control."""
    with (
        run_dir.occupy(run_dir.root({"XDG_RUNTIME_DIR": str(tmp_path)}), repository) as folder,
        running(server := FakeServer(repository)) as server_info,
    ):
        run_dir.write(folder, server_info)
        yield Simulation(server, server_info)


def is_rolled_back(rollout) -> bool:
    return (rollout.state.result, rollout.weights()) == ("rolled back", {"old": 100, "new": 0})


SHADOW = ["shadow", 50, 100]


@cases(
    errors=(Behaviour(errors=0.2), [10, 100], "error 20.00% of "),
    slow=(Behaviour(latency_s=0.06), [10, 100], "slow 100.00% of "),
    slower=(Behaviour(latency_s=0.011), [10, 100], "the median latency is "),
    breaker=(Behaviour(breaker=2), [10, 100], "the breaker of 'new' has not closed in "),
    other_answers=(Behaviour(shadow="disagreed"), SHADOW, "disagreement 100.00%"),
    no_answers=(Behaviour(shadow="failed"), SHADOW, "disagreement 100.00%"),
)
def test_bad_candidate_loses_the_traffic(behaviour, steps, reason, rollout):
    """It stays loaded. One that a shadow finds never has a weight, and its shadow is removed."""
    rollout.behaviour["new"] = behaviour
    rollout.start_measuring(steps=steps, max_slow_increase=0.2)
    assert rollout.weights()["new"] == (0 if steps == SHADOW else 10)

    state = rollout.run("ended", "paused")

    assert is_rolled_back(rollout)
    assert state.reasons[0].startswith(reason), state.reasons
    assert not read_route_file(rollout.location).route().shadows
    assert rollout.server.loaded["net_new"] == {1}


def test_candidate_that_is_a_fallback_is_judged_by_its_own_requests(rollout):
    """What it answers for the control counts for neither: the step pauses, and its repetition decides."""
    rollout.use(fallbacks=["new"])
    rollout.start_measuring(hold_s=8)
    rollout.behaviour["old"].breaker = 2
    rollout.look(7)
    rollout.behaviour["old"].breaker = 0
    state = rollout.run("ended", "paused")

    assert (state.phase, state.reasons[0][:16]) == ("paused", "traffic does not"), state
    # Chance gave it 40 of the 400 requests of each second.
    assert {state.look.events["error"][0].requests, sum(state.look.latencies[0])} == {40 * state.elapsed_s}
    commands.issue(rollout.location, "resume")
    state = rollout.run("ended", "paused")
    assert (state.result, rollout.weights()) == ("promoted", {"old": 0, "new": 100}), state.reasons
    assert read_route_file(rollout.location).route().fallbacks == ("new",)


def test_candidate_that_is_not_loaded_gets_no_traffic(rollout):
    rollout.start()
    rollout.server.loaded.pop("net_new")

    state = rollout.run("ended", "paused")

    assert is_rolled_back(rollout)
    assert state.reasons == ("the candidate is not ready: 'new' names version 1 of 'net_new': not ready",)


def test_too_little_traffic_pauses_and_says_so(rollout, nereid):
    """Nothing is decided without requests, also in a step begun anew by `resume`, and after `promote`."""
    rollout.requests = 0
    rollout.start(patience_s=8)
    state = rollout.run("paused")
    assert state.reasons == ("no decision within 8 s", "0 of at least 50 requests of the candidate")
    assert rollout.weights() == {"old": 90, "new": 10}
    assert "paused at step 10 %: no decision within 8 s" in nereid("rollout", "status").stdout

    with files.locked_file(folder_of(rollout.server.repository) / commands.CONTROLLER_LOCK, "a controller"):
        assert nereid("rollout", "resume").exit_code == 0
        rollout.run("measuring")
        assert nereid("rollout", "promote", "--reason", "tested elsewhere").exit_code == 0
    rollout.look()
    assert rollout.weights() == {"old": 0, "new": 100}
    assert rollout.run("paused").reasons[1] == "0 of at least 50 requests of the candidate"


def test_inconclusive_step_can_roll_back(rollout, tmp_path):
    seen, rollout.requests = tmp_path / "decision.json", 0
    rollout.start(patience_s=8, if_inconclusive="rollback", hooks={"after_decision": f"tee {seen}"})
    rollout.run("ended", "paused")
    assert is_rolled_back(rollout)
    for thread in threading.enumerate():
        if thread.name == "hook":
            thread.join()
    decision = json.loads(seen.read_text())
    assert (decision["event"], decision["rollout"]["result"]) == ("after_decision", "rolled back")


def test_edited_route_pauses_and_names_the_edit(rollout):
    """The controller never overwrites somebody else's change before a person resumes."""
    rollout.start_measuring()
    change(rollout.location, propose_weights({"new": 33}), rollout.server_info)

    state = rollout.run("paused")

    assert state.reasons == ("the route was changed outside the rollout: variants[new].weight: 10 → 33",)
    assert rollout.weights()["new"] == 33
    commands.issue(rollout.location, "resume")
    rollout.look()
    assert rollout.weights() == {"old": 90, "new": 10}


def test_edit_just_before_a_change_is_not_overwritten(rollout, tmp_path):
    """Here the hook is the other person: it edits the route after the controller has read it."""
    new = tmp_path / "edited.json"
    new.write_text(json.dumps(document(variant("old", "net_old", 100), variant("new", "net_new", 77))))
    rollout.start(hooks={"before_step": f"cp {new} {rollout.location.path}"})

    assert rollout.run("paused").reasons[0].startswith("the route was changed outside the rollout: ")
    assert rollout.weights() == {"old": 100, "new": 77}


def test_order_just_before_a_change_counts(rollout, tmp_path):
    """Here the hook is the other person, who pauses the rollout that the controller is about to begin."""
    environment = f"XDG_RUNTIME_DIR={tmp_path} NEREID_REPOSITORY={rollout.server.repository}"
    rollout.start(hooks={"before_step": f"env {environment} {sys.executable} -m nereid rollout pause"})

    rollout.look(3)

    assert (rollout.state.phase, rollout.weights()) == ("paused", {"old": 100, "new": 0})


def test_order_in_the_moment_of_a_decision_counts(rollout):
    """Here the page itself is late: a person pauses while the controller reads the one that decides."""
    rollout.start_measuring()
    rollout.look(4)
    rollout.behaviour["new"].errors, page = 1.0, rollout.server.page

    def pause_and_answer() -> str:
        rollout.server.page = page
        commands.issue(rollout.location, "pause")
        rollout.answer(100 * REQUESTS)
        return page()

    rollout.server.page = pause_and_answer
    rollout.look()

    assert (rollout.state.phase, rollout.weights()) == ("paused", {"old": 90, "new": 10})


def test_hooks_run_and_a_failing_one_pauses(rollout, tmp_path):
    seen = tmp_path / "seen.json"
    code = f"import sys, pathlib; pathlib.Path('{seen}').write_text(sys.stdin.read()); sys.exit('not yet')"
    rollout.start(hooks={"before_step": f'{sys.executable} -c "{code}"'})

    assert rollout.run("paused").reasons == ("the hook before_step failed, see the log",)
    assert any("ended with status 1: not yet" in line for line in rollout.log)
    assert json.loads(seen.read_text())["rollout"]["plan"]["candidate"] == "new"
    assert rollout.weights() == {"old": 100, "new": 0}


def test_abort_works_without_a_controller_and_only_once(rollout, nereid):
    """The command itself withdraws the candidate; a second one does not end a rollback that is under way."""
    rollout.start_measuring()
    commands.issue(rollout.location, "abort", "second thoughts")

    refused = nereid("rollout", "abort")
    assert (refused.exit_code, "cannot abort: rollout" in refused.stderr) == (1, True)
    assert "rolling back from step 10 %" in refused.stderr
    commands.finish(rollout.location, lambda: rollout.server_info, print)
    assert (rollout.state.result, rollout.weights()) == ("aborted", {"old": 100, "new": 0})

    rollout.start_measuring()
    assert nereid("rollout", "abort").exit_code == 0
    assert (rollout.state.result, rollout.weights()) == ("aborted", {"old": 100, "new": 0})
    assert nereid("rollout", "abort").exit_code == 1


def test_withdrawal_is_written_without_a_server(rollout):
    rollout.start_measuring()
    commands.issue(rollout.location, "abort")
    rollout.is_up = False

    rollout.look()

    assert (rollout.state.phase, rollout.weights()) == ("ended", {"old": 100, "new": 0})


def test_restarted_server_continues_the_rollout(rollout):
    """Counters restart at zero, and no request is counted twice: the controller waits, then continues."""
    rollout.start_measuring(hold_s=20)
    rollout.look(6)
    counted = rollout.state.look.events["error"][0].requests
    rollout.is_up = False
    rollout.look(3)
    assert rollout.state.waiting == "no server is running for this repository"
    rollout.server.counts.clear()
    rollout.is_up = True
    rollout.look()
    assert rollout.state.waiting == "the server has restarted, and its counters were reset"
    rollout.look()
    assert rollout.state.look.events["error"][0].requests == counted + 40

    assert rollout.run("ended", "paused").result == "promoted"


def test_plan_measures_the_traffic(rollout):
    plan = rollout.plan(steps=["shadow", 25, 100])
    rollout.answer(REQUESTS)
    busy = forecast(rollout, plan, REQUESTS)

    assert [need.step for need in busy] == ["shadow", "25 %", "100 %"]
    assert all(need.requests >= 50 and need.seconds >= 5 for need in busy)
    idle = forecast(rollout, plan, 0)
    assert (busy[1].limited_by, {need.seconds for need in idle}) == ("error", {float("inf")})


def forecast(rollout, plan, requests: int):
    """Return the forecast of a measurement of half a second, in which the route answers requests."""
    timer = threading.Timer(0.2, rollout.answer, [requests])
    timer.start()
    needs = commands.forecast(rollout.location, plan, rollout.server_info, 0.5)
    timer.join()
    return needs


def test_impossible_rollouts_are_refused(rollout, nereid):
    with pytest.raises(WrongUsage, match="unknown candidate 'v9': expected a variant of the route, old, new"):
        rollout.start(candidate="v9")
    rollout.start()
    refused = nereid("rollout", "start", "new")
    message = "cannot start a rollout of 'new': the rollout of 'new' on route 'r' is at step 10 %"
    assert (refused.exit_code, message in refused.stderr) == (1, True)


@cases(
    promoted=(0.0, "promoted", {"rollout of new: 50 %", "rollout of new: 100 %"}),
    rolled_back=(0.3, "rolled back", {"rollout of new: 50 %", "rollout of new: rolled back"}),
)
def test_killed_controller_is_continued(errors, result, notes, rollout):
    """A controller is killed before each change of a file; the next one ends as if nothing had happened."""
    rollout.behaviour["new"].errors, rollout.requests, is_killed, kills = errors, 4000, True, 0
    promoted = result == "promoted"
    while is_killed:
        rollout.use()
        rollout.location.history.path.unlink(missing_ok=True)
        rollout.start(steps=[50, 100], hold_s=1)
        rollout.replace_controller()
        with killed_at(kills + 1) as changes:
            rollout.run("ended")
        is_killed = len(changes) > kills
        kills += is_killed
        rollout.replace_controller()
        if rollout.state.is_active:
            rollout.run("ended")

        assert (rollout.state.phase, rollout.state.result) == ("ended", result), kills
        assert rollout.weights() == {"old": 100 * (not promoted), "new": 100 * promoted}
        sha256 = read_route_file(rollout.location).sha256
        assert served_status(rollout.server_info, ROUTE, sha256)[0] == "served"
        # Each change is in the history once, or is first seen by the next one after a kill.
        seen = Counter(entry.note for entry in read_route_file(rollout.location).all_entries)
        assert max(seen[note] for note in notes) == 1, (kills, seen)
    assert kills > 10
