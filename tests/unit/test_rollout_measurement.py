"""The breakers of candidate and control in the measurement of a step."""

from datetime import UTC, datetime

import pytest

from nereid.rollout import plan
from nereid.rollout.counts import Counts, Pair
from nereid.rollout.judge import Outcome
from nereid.rollout.measurement import RECOVERY_S, SETTLE_S, Measurement, Page
from nereid.rollout.rollout_journal import State

CANDIDATE, CONTROL = ("new", "2"), ("old", "1")
HOLD_S, STEP_S = 60.0, 2.0
NO_COUNTS = Counts({}, {}, {}, {})


def outcomes(looks: int, *open_breakers: frozenset[tuple[str, str]]) -> list[tuple[Outcome, str]]:
    """Return verdict and first reason of each of `looks` looks; the last breakers stay as they are."""
    made = plan.make_plan(candidate="new", steps=[50, 100], hold_s=HOLD_S)
    state = State(1, made, Pair(CANDIDATE, CONTROL, "shadow"), 0.1, 0.01, datetime.now(UTC), "me")
    measured, found = Measurement(state, 0.0), []
    for number in range(looks):
        opened = open_breakers[min(number, len(open_breakers) - 1)]
        measured.add(Page(1, NO_COUNTS, frozenset(), opened), SETTLE_S + number * STEP_S)
        verdict = measured.verdict()
        found.append((verdict.outcome, verdict.reasons[0]))
    return found


NONE, NEW, BOTH = frozenset(), frozenset({CANDIDATE}), frozenset({CANDIDATE, CONTROL})


def test_breaker_that_opens_fails_the_step():
    """It was closed in the step."""
    assert outcomes(3, NONE, NONE, NEW)[-1] == (
        Outcome.FAIL,
        "the breaker of 'new' has opened, 0 of 0 requests failed",
    )


def test_breaker_that_was_open_may_close():
    """An earlier failure does not count against a candidate that responds."""
    enough = int(HOLD_S / STEP_S) + 2
    assert {outcome for outcome, _ in outcomes(enough, *[NEW] * 5, NONE)} == {Outcome.CONTINUE}


@pytest.mark.parametrize(
    ("opened", "last"),
    [
        (NEW, (Outcome.FAIL, "the breaker of 'new' was open during the whole step")),
        (BOTH, (Outcome.INCONCLUSIVE, "the breakers of 'new' and 'old' are open: no comparison")),
    ],
)
def test_breaker_that_stays_open_decides_after_the_hold(opened, last):
    """A candidate that died before its step gets no request that could fail."""
    first = int(max(HOLD_S, RECOVERY_S) / STEP_S)
    found = outcomes(first + 1, opened)

    assert {outcome for outcome, _ in found[:-1]} == {Outcome.CONTINUE}
    assert found[-1] == last
