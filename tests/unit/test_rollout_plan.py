"""Plans of rollouts, their steps as routes, and the states that follow from a journal."""

import contextlib
import json
from datetime import UTC, datetime

import pytest
from jsonschema import Draft202012Validator

from nereid.backends.routing.assignment import LoadedRoute, assign, format_route, parse_route
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish.add import AddRequest, add
from nereid.models.publish.drop_folder import TemporaryFailure
from nereid.models.publish.publisher import retire
from nereid.models.publish.remove import remove
from nereid.models.publish.watch import publication
from nereid.models.rollout import controller, plan, rollout_journal
from nereid.models.rollout.controller import find_pair, first_step, propose_step, propose_withdrawal
from nereid.models.rollout.plan import Pair
from nereid.models.rollout.rollout_journal import Rollout, RolloutActive, RolloutEvent, RolloutJournals
from nereid.models.rollout.service import metrics
from nereid.models.routes.location import RouteFileSnapshot
from tests.http_receiver import receiving
from tests.publishing import NET, OTHER_ANSWERS, ROUTE, candidate, publish_number
from tests.routes import document, variant
from tests.tables import cases, rows

KEYS = [f"key-{number}" for number in range(2000)]
PAIR = Pair(("new", "2"), ("old", "1"), "rollout-new")


def loaded(*variants, **more) -> LoadedRoute:
    route = parse_route(json.dumps(document(*variants, **more)).encode())
    versions = {entry.name: str(number) for number, entry in enumerate(route.variants, start=1)}
    return LoadedRoute(route, "", versions)


def rollout(**changed) -> Rollout:
    """Return a rollout after its start."""
    made = plan.make_plan(candidate="new", steps=changed.pop("steps", [1, 25, 100]))
    return Rollout(1, made, PAIR, 0.1, 0.01, datetime.now(UTC), "me", **changed)


def test_plan_of_the_documentation_is_valid(root):
    schema = json.loads((root / "docs" / "rollout.schema.json").read_text())
    example = (root / "docs" / "rollouts.md").read_text().split("```json\n")[1].split("```")[0]

    Draft202012Validator(schema).validate(json.loads(example))
    assert plan.parse_plan(example.encode(), "page").candidate == "v3"


@cases(
    falling=({"steps": [5, 1, 100]}, "steps must increase up to 100, got 5, 1, 100"),
    not_all=({"steps": [5, 50]}, "steps must increase up to 100, got 5, 50"),
    late_shadow=({"steps": [5, "shadow", 100]}, "only the first step may be `shadow`, got 5, shadow"),
    only_a_shadow=({"steps": ["shadow"]}, "steps must increase up to 100, got shadow"),
    patience=({"hold_s": 90, "patience_s": 60}, "patience_s must be at least hold_s 90, got 60"),
    risk=({"risk": 0.9}, "Expected `float` <= 0.5 for risk"),
    field=({"candidates": 1}, "unknown field `candidates`"),
    hook=({"hooks": {"before_step": "https://x"}}, "URL that begins with http://, got https:"),
)
def test_invalid_plans_are_refused(values, message):
    with pytest.raises(WrongUsage, match=f"(?i){message}"):
        plan.make_plan(**{"candidate": "new"} | values)


def test_steps_are_read_from_words():
    assert plan.read_steps("shadow, 0.5,100") == ["shadow", 0.5, 100]
    with pytest.raises(WrongUsage, match="got 'all'"):
        plan.read_steps("1,all")


@cases(
    one=([("old", 100), ("new", 0)], ""),
    two=([("old", 100), ("third", 50), ("new", 0)], "got old, third"),
    none=([("new", 100), ("old", 0)], "expected one variant with traffic as the control .*, got none"),
    name_of_the_shadow=([("old", 100), ("new", 0), ("rollout-new", 0)], "expected no variant 'rollout-new'"),
)
def test_control_is_the_only_other_variant_with_traffic(variants, message):
    """Otherwise the comparison would have no meaning."""
    base = loaded(*(variant(name, f"net_{name}", weight) for name, weight in variants))
    with pytest.raises(WrongUsage, match=message) if message else contextlib.nullcontext():
        assert find_pair(base, "new") == PAIR


def test_steps_up_to_the_present_share_are_left_out():
    """A candidate with 10 % never goes back to 1 %, so no sticky key moves back."""
    made = plan.make_plan(candidate="new", steps=["shadow", 1, 5, 25, 100])
    for weight, step in {0: 0, 4: 2, 5: 3, 10: 3, 25: 4}.items():
        base = loaded(variant("old", "net_old", 100 - weight), variant("new", "net_new", weight))
        assert first_step(base.route, made) == step
    with pytest.raises(WrongUsage, match="all traffic"):
        first_step(loaded(variant("old", "net_old", 0), variant("new", "net_new", 1)).route, made)


@contextlib.contextmanager
def started(repository, route=ROUTE):
    with RolloutJournals(repository, route).writing(1) as writer:
        writer.write("start", plan=rollout().plan, pair=PAIR, slow_s=0.1, risk=0.01)
        yield writer


def present(found: LoadedRoute) -> RouteFileSnapshot:
    return RouteFileSnapshot(None, format_route(found.route), (), None)


def test_sticky_keys_move_only_to_the_candidate():
    base = loaded(variant("old", "net_old", 100), variant("new", "net_new", 0))
    moved: set[str] = set()
    for step in range(3):
        route = propose_step(rollout(step=step))(present(base)).route
        now = {key for key in KEYS if assign(route, key).name == "new"}
        assert moved <= now
        moved = now
    assert moved == {*KEYS}
    assert {entry.weight for entry in propose_withdrawal(rollout())(present(base)).route.variants} == {100, 0}


def test_shadow_step_adds_a_shadow_that_the_next_step_removes():
    existing = [{"name": "own", "model": "m", "version": 1, "percent": 5}]
    base = loaded(variant("old", "net_old", 100), variant("new", "net_new", 0, 3), shadows=existing)
    first = propose_step(rollout(steps=["shadow", 100]))(present(base)).route
    shadows = [(shadow.name, shadow.model, shadow.version) for shadow in first.shadows]
    assert shadows == [("own", "m", 1), ("rollout-new", "net_new", 3)]
    later = propose_step(rollout(steps=["shadow", 100], step=1))(present(LoadedRoute(first, "", {}))).route
    assert [shadow.name for shadow in later.shadows] == ["own"]


def test_waiting_keeps_the_reasons_of_a_decision():
    """A rollback that the server does not serve yet still names its cause; the next event ends the wait."""
    waiting = rollout(phase="measuring")
    for event, reason in [("fail", "worse"), ("wait", "no server runs")]:
        waiting = waiting.after(RolloutEvent(datetime.now(UTC), event, reasons=(reason,)))

    counting = rollout(phase="measuring").after(RolloutEvent(datetime.now(UTC), "look", reasons=("so far",)))
    assert str(counting).endswith("measuring step 1 %, after 0 s: so far")
    assert (waiting.phase, waiting.reasons, waiting.waiting) == ("withdrawing", ("worse",), "no server runs")
    assert str(waiting).endswith("rolling back from step 1 %: worse; waiting: no server runs")
    ended = waiting.after(RolloutEvent(datetime.now(UTC), "end", reasons=waiting.reasons))
    assert (ended.result, ended.waiting) == ("rolled back", "")


def test_publications_wait_for_the_end_of_a_rollout(repository, tmp_path):
    """Commands are rejected with the step; `nereid watch` tries the file again later."""
    with started(repository):
        pass
    message = f"the rollout of 'new' on route '{ROUTE}' is at step 1 %; fix: wait, or nereid rollout abort"

    with pytest.raises(RolloutActive, match=message):
        publish_number(repository, tmp_path, None, 2)
    with pytest.raises(RolloutActive, match=message):
        retire(repository, NET, 1, None)
    with pytest.raises(RolloutActive, match=message):
        remove(repository, ROUTE, None)
    with pytest.raises(RolloutActive, match=message):
        add(repository, AddRequest(candidate(tmp_path, 2), ROUTE, {}, is_replacing=True), None)
    publishing = publication(repository, lambda: None, OTHER_ANSWERS, 0, print)
    with pytest.raises(TemporaryFailure, match=message):
        publishing(NET, candidate(tmp_path, 3))


def test_only_an_active_rollout_of_a_present_route_has_metrics(tmp_path):
    models = tmp_path / "models"
    with started(models, 'a"b') as writer:
        assert (rollout_journal.active_rollouts(models), metrics(models)) == ({}, "")
        (models / 'a"b').mkdir(parents=True)
        assert 'nereid_rollout_share{route="a\\"b",candidate="new"} 0.01' in metrics(models)
        writer.write("end")
        assert metrics(models) == ""


@rows((204, ""), (500, "hook before_step 'http://.*' failed: HTTP Error 500"))
def test_hook_is_posted_as_json(status, message):
    received = []

    def answer(path, headers, body):
        received.append((path, headers["Content-Type"], json.loads(body)))
        return status, b""

    with (
        receiving(answer) as address,
        pytest.raises(OperationFailed, match=message) if message else contextlib.nullcontext(),
    ):
        controller.run_hook(f"http://{address}/hook?token=a", "before_step", rollout())

    ((path, kind, body),) = received
    assert (path, kind, body["event"]) == ("/hook?token=a", "application/json", "before_step")
    assert body["rollout"]["plan"]["candidate"] == "new"
