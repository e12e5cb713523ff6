"""The judge of a rollout: its tests keep their risk at any number of looks, and verdicts name the reasons."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats  # only here: the oracle of the rank test

from nereid.models.rollout import judge
from nereid.models.rollout.judge import BettingTest, EventCount, EventLimit, StepJudge, StepOutcome
from tests.tables import cases

BOUNDS = (0.005, 0.01, 0.02, 0.05)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("margin", [0.0, 0.01, -0.02])
@pytest.mark.parametrize("against_smaller", [True, False])
def test_capital_does_not_grow_on_average_at_the_edge_of_the_hypothesis(share, margin, against_smaller):
    """The exact expectation over all counts of a look is at most 1, for every rate of the control."""
    ours = 9 if share == 0.9 else 3
    theirs = round(ours * (1 - share) / share)
    for base in (0.03, 0.2, 0.6):
        expected = 0.0
        for mine, other in itertools.product(range(ours + 1), range(theirs + 1)):
            evidence = BettingTest(margin, against_smaller)
            evidence.add(EventCount(ours, mine), EventCount(theirs, other))
            chance = stats.binom.pmf(mine, ours, base + margin) * stats.binom.pmf(other, theirs, base)
            expected += chance * math.exp(evidence.log_capital)
        assert expected <= 1 + 1e-9


@pytest.mark.parametrize("margin", [0.0, 0.05, -0.1])
@pytest.mark.parametrize("against_smaller", [True, False])
def test_block_capital_does_not_grow_on_average(margin, against_smaller):
    """At the edge of the hypothesis its expectation is 1, also if all requests of a block agree."""
    for base in (0.15, 0.6):
        expected = 0.0
        for mine, other in itertools.product((0, 4), (0, 9)):
            evidence = BettingTest(margin, against_smaller, is_in_blocks=True)
            evidence.add(EventCount(4, mine), EventCount(9, other))
            ours, theirs = base + margin, base
            chance = (ours if mine else 1 - ours) * (theirs if other else 1 - theirs)
            expected += chance * math.exp(evidence.log_capital)
        assert expected == pytest.approx(1.0)


def test_candidate_without_control_is_compared_with_the_margin():
    over, below = BettingTest(0.1, against_smaller=True), BettingTest(0.1, against_smaller=False)

    for evidence in (over, below):
        evidence.add(EventCount(300, 75), None)

    assert over.rejects(0.001)
    assert not below.rejects(0.5)


def test_counts_without_control_compare_nothing():
    """A look may be so short that only one of both had requests."""
    evidence = BettingTest(0.01, against_smaller=True)

    evidence.add(EventCount(5, 5), EventCount(0, 0))
    evidence.add(EventCount(0, 0), EventCount(5, 0))

    assert evidence.log_capital == 0.0


@pytest.mark.parametrize(("requests", "events"), [(1, 2), (3, -1)])
def test_impossible_counts_are_rejected(requests, events):
    """Such counts come from a server that restarted, whose counters began anew."""
    with pytest.raises(ValueError, match=f"got {events} of {requests}"):
        EventCount(requests, events)


def test_rank_test_is_that_of_scipy():
    """Samples of whole numbers have ties, as the requests of a bucket."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        one, other = rng.poisson(3, 80).clip(0, 9), rng.poisson(2.6, 130).clip(0, 9)
        counts = [np.bincount(sample, minlength=10).tolist() for sample in (one, other)]
        expected = stats.mannwhitneyu(one, other, alternative="greater", method="asymptotic").pvalue
        assert judge.slower_p_value(*counts) == pytest.approx(expected)


def test_split_test_is_that_of_scipy():
    expected = stats.chisquare([130, 870], [100, 900]).pvalue
    assert judge.split_p_value(130, 1000, 0.1) == pytest.approx(expected)


LIMIT = EventLimit("error", max_rate=0.2, increase=0.01)
LIMITS = judge.StepLimits((LIMIT,), max_latency_ratio=1.2, risk=0.01, miss_risk=0.01, min_requests=100)


def look(candidate: tuple[int, int], control: tuple[int, int], ours: int = 1) -> judge.PairCounts:
    """Return counts of requests and errors; those of the candidate are in the bucket `ours` of latency."""
    latencies = [0] * 5, [0] * 5
    latencies[0][ours], latencies[1][1] = candidate[0], control[0]
    events = {"error": (EventCount(*candidate), EventCount(*control))}
    return judge.PairCounts(events, latencies, (candidate[0], control[0]))


def test_good_candidate_passes_when_the_step_is_over():
    step, said = StepJudge(LIMITS, 0.5, BOUNDS), []
    for _ in range(200):
        step.add(look((50, 0), (50, 0)))
        said.append(step.verdict(is_over=False).reasons[0].split(", ")[-1])

    assert [*dict.fromkeys(said)] == [
        "50 of at least 100 requests of the candidate",
        "no decision yet",
        "the minimum duration has not elapsed",
    ]
    assert step.verdict(is_over=True).outcome == StepOutcome.PASS


WORSE = "error 10.00% of 3,000 against 1.00% of 3,000: worse than the control"


@cases(
    over_the_limit=(look((400, 160), (400, 160)), StepOutcome.FAIL, "over the limit of 20.00%"),
    worse=(look((3000, 300), (3000, 30)), StepOutcome.FAIL, WORSE),
    slower=(look((9000, 0), (9000, 0), ours=2), StepOutcome.FAIL, "is 2.00 times the control's"),
    broken_split=(look((9000, 0), (8000, 0)), StepOutcome.INCONCLUSIVE, "expected 50.0%"),
)
def test_verdict_names_what_decided(seen, outcome, words):
    step = StepJudge(LIMITS, 0.5, BOUNDS)
    step.add(seen)

    verdict = step.verdict(is_over=True)

    assert verdict.outcome == outcome
    assert words in verdict.reasons[0]


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.5])
def test_needed_requests_are_enough_for_an_equal_candidate(share):
    rng = np.random.default_rng(5)
    total = judge.requests_needed(LIMIT, share, 0.002, 0.01)
    ours = round(total * share)
    passed = 0
    for _ in range(200):
        evidence = BettingTest(0.01, against_smaller=False)
        mine, other = rng.binomial(ours, 0.002), rng.binomial(total - ours, 0.002)
        evidence.add(EventCount(ours, int(mine)), EventCount(total - ours, int(other)))
        passed += evidence.rejects(0.01)
    assert passed > 80  # the forecast is that of the expected counts, which half of all samples exceed
