"""Plans of rollouts, their steps as routes, and the states that follow from a journal."""

import json
from datetime import UTC, datetime

import pytest
from jsonschema import Draft202012Validator

from nereid.errors import WrongUsage
from nereid.rollout import plan
from nereid.rollout.counts import Pair
from nereid.rollout.progress import describe
from nereid.rollout.rollout_journal import Journals, Line, State
from nereid.rollout.route_steps import at_step, compared, first_step, withdrawn
from nereid.routes.target import RouteState
from nereid.routing.assignment import Table, assign, format_route, parse_route
from tests.routes import document, variant

KEYS = [f"key-{number}" for number in range(2000)]
PAIR = Pair(("new", "2"), ("old", "1"), "rollout-new")


def table(*variants, **more) -> Table:
    """Return a route in use."""
    found = parse_route(json.dumps(document(*variants, **more)).encode())
    return Table(found, "", {each.name: str(number) for number, each in enumerate(found.variants, start=1)})


def state(**changed) -> State:
    """Return the state after the start of a rollout."""
    made = plan.make_plan(candidate="new", steps=changed.pop("steps", [1, 25, 100]))
    return State(1, made, PAIR, 0.1, 0.01, datetime.now(UTC), "me", **changed)


def test_published_schema_is_the_one_in_use(root):
    """docs/rollout.schema.json is the schema of a plan (`make docs`), and the example on the page fits it."""
    schema = json.loads((root / "docs" / "rollout.schema.json").read_text())
    example = (root / "docs" / "rollouts.md").read_text().split("```json\n")[1].split("```")[0]

    assert schema == json.loads(json.dumps(plan.json_schema()))
    Draft202012Validator(schema).validate(json.loads(example))
    assert plan.parse_plan(example.encode(), "page").candidate == "v3"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": [5, 1, 100]}, "steps must increase up to 100, got 5, 1, 100"),
        ({"steps": [5, 50]}, "steps must increase up to 100, got 5, 50"),
        ({"steps": [5, "shadow", 100]}, "only the first step may be `shadow`, got 5, shadow, 100"),
        ({"steps": ["shadow"]}, "steps must increase up to 100, got shadow"),
        ({"steps": [0, 100]}, "expected `int` >"),
        ({"hold_s": 90, "patience_s": 60}, "patience_s must be at least hold_s 90, got 60"),
        ({"risk": 0.9}, "Expected `float` <= 0.5 for risk"),
        ({"candidates": 1}, "unknown field `candidates`"),
    ],
)
def test_invalid_plans_are_refused(values, message):
    """The message has the field, the expected value and the received one."""
    with pytest.raises(WrongUsage, match="(?i)" + message.replace("(", r"\(")):
        plan.make_plan(**{"candidate": "new"} | values)


def test_steps_are_read_from_words():
    """A word that is neither a number nor `shadow` is refused."""
    assert plan.read_steps("shadow, 0.5,100") == ["shadow", 0.5, 100]
    with pytest.raises(WrongUsage, match="got 'all'"):
        plan.read_steps("1,all")


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ([("old", 100), ("new", 0)], ""),
        ([("old", 100), ("third", 50), ("new", 0)], "got old, third"),
        ([("new", 100), ("old", 0)], "got none"),
    ],
)
def test_control_is_the_only_other_variant_with_traffic(variants, message):
    """Otherwise the comparison would have no meaning."""
    found = table(*(variant(name, f"net_{name}", weight) for name, weight in variants))
    if message:
        with pytest.raises(WrongUsage, match=message):
            compared(found, "new")
    else:
        assert compared(found, "new") == PAIR


def test_steps_up_to_the_present_share_are_left_out():
    """A candidate with 10 % never goes back to 1 %, so no sticky key moves back."""
    made = plan.make_plan(candidate="new", steps=["shadow", 1, 5, 25, 100])
    shares = {0: 0, 4: 2, 5: 3, 10: 3, 25: 4}
    for weight, step in shares.items():
        found = table(variant("old", "net_old", 100 - weight), variant("new", "net_new", weight))
        assert first_step(found.route, made) == step
    with pytest.raises(WrongUsage, match="all traffic"):
        first_step(table(variant("old", "net_old", 0), variant("new", "net_new", 1)).route, made)


def present(found: Table) -> RouteState:
    """Return a route file with this content."""
    return RouteState(None, format_route(found.route), (), None)


def test_sticky_keys_move_only_to_the_candidate():
    """A key that has got the candidate keeps it in all later steps."""
    found = table(variant("old", "net_old", 100), variant("new", "net_new", 0))
    moved: set[str] = set()
    for step in range(3):
        route = at_step(state(step=step))(present(found)).route
        now = {key for key in KEYS if assign(route, key).name == "new"}
        assert moved <= now
        moved = now
    assert moved == {*KEYS}
    assert {each.weight for each in withdrawn(state())(present(found)).route.variants} == {100, 0}


def test_shadow_step_adds_a_shadow_that_the_next_step_removes():
    """Shadows of the route itself stay."""
    own = [{"name": "own", "model": "m", "version": 1, "percent": 5}]
    found = table(variant("old", "net_old", 100), variant("new", "net_new", 0, 3), shadows=own)
    first = at_step(state(steps=["shadow", 100]))(present(found)).route
    assert [(each.name, each.model, each.version) for each in first.shadows] == [
        ("own", "m", 1),
        ("rollout-new", "net_new", 3),
    ]
    later = at_step(state(steps=["shadow", 100], step=1))(present(Table(first, "", {}))).route
    assert [each.name for each in later.shadows] == ["own"]


def test_state_follows_from_the_lines(tmp_path):
    """After each line, the state is that of a controller that has read the file again."""
    logs = Journals(tmp_path / "models", "classify")
    with logs.writing(3) as writer:
        writer.write("start", plan=state().plan, pair=PAIR, slow_s=0.1, risk=0.01, first=1)
        for event, phase in [
            ("change", "stepping"),
            ("begin", "measuring"),
            ("pause", "paused"),
            ("resume", "stepping"),
            ("begin", "measuring"),
            ("pass", "stepping"),
            ("begin", "measuring"),
            ("fail", "withdrawing"),
            ("end", "ended"),
        ]:
            writer.write(event, ("because",))
            assert writer.state.phase == phase
    found = logs.latest()
    assert found == writer.state
    assert (found.number, found.step, found.result) == (3, 2, "rolled back")
    assert describe(found) == "rollout 3 of new: rolled back, ended at step 100 %: because"
    assert logs.active() is None
    assert [each.event for each in logs.lines(3)][:2] == ["start", "change"]
    assert isinstance(logs.lines(3)[0], Line)
