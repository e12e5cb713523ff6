"""The circuit breaker, with a clock of the test's own."""

from nereid.backends.routing.assignment import BreakerSettings
from nereid.backends.routing.attempts import Breaker, BreakerState
from tests.tables import cases

SETTINGS = BreakerSettings(window_s=1.0, min_requests=5, error_ratio=0.5, open_s=5.0)
GOOD, BAD, NEITHER = False, True, None


def feed(breaker: Breaker, outcomes, start: float = 0.0, step: float = 0.01) -> None:
    for number, outcome in enumerate(outcomes):
        breaker.record(outcome, start + number * step)


@cases(
    too_few=([BAD] * 4, 0.01, BreakerState.CLOSED),
    enough=([BAD] * 5, 0.01, BreakerState.OPEN),
    just_not_half_of_the_window=([GOOD] * 50 + [BAD] * 49, 0.01, BreakerState.CLOSED),
    half_of_the_window=([GOOD] * 50 + [BAD] * 50, 0.01, BreakerState.OPEN),
    too_few_verdicts=([BAD, NEITHER] * 4, 0.01, BreakerState.CLOSED),
    # With one request every ten seconds, the window is empty, so the last five requests count.
    two_of_the_last_five=([GOOD] * 5 + [BAD] * 2, 10.0, BreakerState.CLOSED),
    three_of_the_last_five=([GOOD] * 5 + [BAD] * 3, 10.0, BreakerState.OPEN),
    old_failures=([BAD] * 2 + [GOOD] * 5 + [BAD], 10.0, BreakerState.CLOSED),
)
def test_opens_on_ratio_with_a_minimum(outcomes, step_s, state):
    breaker = Breaker(SETTINGS)

    feed(breaker, outcomes, step=step_s)

    assert breaker.state is state


def test_old_successes_do_not_hide_failures():
    breaker = Breaker(SETTINGS)

    feed(breaker, [GOOD] * 1000, step=0.001)
    feed(breaker, [BAD] * 3, start=2.1)

    assert breaker.state is BreakerState.OPEN


def test_trip_opens_immediately_and_a_second_one_does_not_extend_the_wait():
    breaker = Breaker(SETTINGS)
    feed(breaker, [GOOD] * 100)

    breaker.trip(2.0)
    breaker.trip(6.0)

    assert [breaker.allows(at) for at in (2.1, 6.9, 7.0)] == [False, False, True]


def test_only_a_verdict_on_the_trial_decides():
    """Requests from before the trial end during it."""
    breaker = Breaker(SETTINGS)
    feed(breaker, [BAD] * 5)
    assert breaker.allows(6.0)

    breaker.record(BAD, 6.1)
    breaker.record(GOOD, 6.1)
    assert (breaker.state, breaker.allows(6.2)) == (BreakerState.HALF_OPEN, False)

    breaker.record(NEITHER, 6.3, is_trial=True)
    assert (breaker.state, breaker.allows(6.4)) == (BreakerState.HALF_OPEN, True)


def test_good_trial_starts_afresh_and_reports_its_changes():
    states: list[BreakerState] = []
    breaker = Breaker(SETTINGS, states.append)
    feed(breaker, [BAD] * 5)
    assert [breaker.allows(at) for at in (0.05, 5.03, 5.05, 5.06, 60.0)] == [False, False, True, False, False]

    breaker.record(GOOD, 6.1, is_trial=True)
    feed(breaker, [BAD] * 4, start=6.2)

    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]
