"""What a rollout counts, and the breakers of candidate and control in the measurement of a step."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from nereid.base.prometheus_text import MetricSamples
from nereid.models.rollout import measurement, plan
from nereid.models.rollout.judge import EventCount, StepOutcome
from nereid.models.rollout.measurement import REQUESTS as REQUESTS_TOTAL
from nereid.models.rollout.plan import Pair
from nereid.models.rollout.rollout_journal import Rollout
from nereid.models.routes.change import ServedRouteStatus
from tests.tables import cases

CANDIDATE, CONTROL = ("new", "2"), ("old", "1")
HOLD_S, OPEN_S, LOOK_S = 60.0, 5.0, 2.0
# Requests of the control in each look, of which chance gives the candidate a tenth.
MUCH, LITTLE = 100, 1
CLOSED, OPEN = {CANDIDATE: "closed"}, {CANDIDATE: "open"}
BOTH, HALF_OPEN = {CANDIDATE: "open", CONTROL: "open"}, {CANDIDATE: "half-open"}
FAILED = "the breaker of 'new' has not closed in "


def verdicts(
    looks: int,
    *breakers: Mapping[tuple[str, str], str],
    requests: int = MUCH,
    step: float | str = 10,
    open_s: float = OPEN_S,
) -> list[tuple[StepOutcome, str]]:
    """Return outcome and first reason of each look; the last breakers stay as they are."""
    made = plan.make_plan(candidate="new", steps=[*dict.fromkeys([step, 100])], hold_s=HOLD_S)
    state = Rollout(1, made, Pair(CANDIDATE, CONTROL, "shadow"), 0.1, 0.01, datetime.now(UTC), "me")
    measured, decisions = measurement.Measurement(state, 0.0, open_s), []
    for number in range(looks):
        counted = f'{REQUESTS_TOTAL}{{variant="old",version="1",outcome="ok",reason="weight"}} '
        page = MetricSamples.parse(f"{counted}{requests * number}")
        served = ServedRouteStatus(frozenset(), breakers[min(number, len(breakers) - 1)])
        measured.add(measurement.MetricsSnapshot(1, page, served), measurement.SETTLING_S + number * LOOK_S)
        verdict = measured.verdict()
        decisions.append((verdict.outcome, re.sub(r"\d+ s$", "", verdict.reasons[0])))
    return decisions


def outcomes(*words, **options) -> set[StepOutcome]:
    return {outcome for outcome, _ in verdicts(*words, **options)}


NO_COMPARISON = "the breakers of 'new' and 'old' are open: no comparison"
LOOKS_OF_HOLD = int(HOLD_S / LOOK_S)
LOOKS_OF_TRIALS = int(9 * measurement.TRIAL_REQUESTS / LITTLE)
LOOKS_OF_PAUSES = int(measurement.MIN_TRIALS * 2 * HOLD_S / LOOK_S)


def test_breaker_that_opens_fails_the_step():
    expected = StepOutcome.FAIL, "the breaker of 'new' has opened, 0 of 0 requests failed"

    assert verdicts(3, CLOSED, CLOSED, OPEN)[-1] == expected
    # Without requests of the candidate, the page has no breaker of it.
    assert verdicts(3, {}, {}, OPEN)[-1] == expected


def test_breaker_that_was_open_may_close():
    """An earlier failure does not count against a candidate that responds; a trial may fail before."""
    states = OPEN, OPEN, HALF_OPEN, OPEN, OPEN, HALF_OPEN, CLOSED

    assert outcomes(2 * LOOKS_OF_HOLD, *states) == {StepOutcome.CONTINUE}


@cases(
    open=([OPEN], {}, LOOKS_OF_HOLD, (StepOutcome.FAIL, FAILED)),
    failed_trial=([OPEN, HALF_OPEN, OPEN], {}, LOOKS_OF_HOLD, (StepOutcome.FAIL, FAILED)),
    both=([BOTH], {}, LOOKS_OF_HOLD, (StepOutcome.INCONCLUSIVE, NO_COMPARISON)),
    last_step=([OPEN], {"step": 100, "requests": 0}, LOOKS_OF_HOLD, (StepOutcome.FAIL, FAILED)),
    # With a tenth of few requests, nothing could close it before.
    few_requests=([OPEN], {"requests": LITTLE}, LOOKS_OF_TRIALS, (StepOutcome.FAIL, FAILED)),
    long_pauses=([OPEN], {"open_s": 2 * HOLD_S}, LOOKS_OF_PAUSES, (StepOutcome.FAIL, FAILED)),
)
def test_breaker_that_stays_open_decides_after_the_hold_and_trials(states, options, looks, last):
    """A candidate that died before its step gets no request that could fail."""
    decisions = verdicts(looks + 1, *states, **options)

    assert {outcome for outcome, _ in decisions[:-1]} == {StepOutcome.CONTINUE}
    assert decisions[-1] == last


def test_open_breaker_of_a_shadow_decides_nothing():
    """Copies of requests do not pass it, so they cannot close it."""
    assert outcomes(2 * LOOKS_OF_HOLD, OPEN, step="shadow") == {StepOutcome.CONTINUE}


def series(labels: str, *rows: tuple) -> dict[frozenset[tuple[str, str]], float]:
    return {
        frozenset({"version": "1", **dict(zip(labels.split(), words, strict=False))}.items()): count
        for *words, count in rows
    }


def test_only_requests_that_the_route_gave_to_a_variant_count():
    """A failed first attempt is the candidate's; callers that name a variant are not a random sample."""
    requests = series(
        "variant outcome reason",
        *[("new", "unavailable", "weight", 1), ("new", "overloaded", "weight", 2)],
        *[("new", "ok", "route-key", 3), ("old", "ok", "weight", 5)],
        *[("old", "ok", "retry", 9), ("old", "ok", "header", 9), ("spare", "ok", "retry", 9)],
        *[("new", "ok", "breaker", 9), ("old", "ok", "breaker", 9)],
    )
    durations = series(
        "variant le outcome chosen",
        *[("new", "0.25", "ok", "true", 4), ("new", "0.5", "ok", "true", 6)],
        *[("new", "0.25", "ok", "false", 9), ("new", "0.25", "unavailable", "true", 9)],
        ("old", "0.25", "ok", 5),  # an older server
    )
    shadows = series(
        "shadow outcome",
        *[("copy", "agreed", 8), ("copy", "disagreed", 1), ("copy", "failed", 2), ("copy", "shed", 9)],
    )
    page = MetricSamples(
        {REQUESTS_TOTAL: requests, f"{measurement.DURATIONS}_bucket": durations, measurement.SHADOWS: shadows}
    )

    counts = measurement.count_pair(page, Pair(("new", "1"), ("old", "1"), "copy"), 0.25)

    assert counts.events == {
        "error": (EventCount(6, 1), EventCount(5, 0)),
        "slow": (EventCount(6, 2), EventCount(5, 0)),
        "disagreement": (EventCount(11, 3), EventCount(0, 0)),
    }
    assert [[count for count in buckets if count] for buckets in counts.latencies] == [[4, 2], [5]]
    assert counts.drawn == (3, 5)


@cases(
    fast=([(10, 9, 10), (10, 10, 10)], None, [(10, 0), (0, 0)], 10),
    slow=([(10, 10, 9), (20, 20, 20), (20, 20, 21)], [0, 0], [(9, 0), (11, 0), (1, 1)], 21),
)
def test_bucket_that_lags_behind_counts_once(cumulative, carried_slow, slow, counted):
    """A page may be written while the route counts; the next page makes up for it."""
    line = f'{measurement.DURATIONS}_bucket{{{{variant="new",version="2",outcome="ok",le="{{}}"}}}} {{}}\n'
    before, looks = MetricSamples({}), []
    for counts in cumulative:
        page = MetricSamples.parse("".join(map(line.format, ("0.25", "0.5", "+Inf"), counts)))
        looks.append(measurement.count_pair(page - before, Pair(CANDIDATE, CONTROL), 0.25, carried_slow))
        before = page

    assert [counts.events["slow"][0] for counts in looks] == [EventCount(*numbers) for numbers in slow]
    assert sum(sum(counts.latencies[0]) for counts in looks) == counted
