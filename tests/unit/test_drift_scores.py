"""Distances of histograms, the rate of false alarms of their limits, and usage of `nereid drift`."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nereid.cli.drift import print_report
from nereid.cli.main import app
from nereid.insight.drift.comparison import SignalDrift, VariantDrift
from nereid.insight.drift.drift_report import Accuracy, Agreement, DriftReport
from nereid.insight.drift.monitor import RouteDrift
from nereid.insight.drift.scores import (
    MIN_IMAGES,
    MIN_SHARE,
    PRIOR,
    add_up,
    chance_limit,
    distance,
    group_buckets,
)
from tests.tables import rows

histograms = st.integers(2, 20).flatmap(
    lambda size: st.tuples(*[st.lists(st.integers(0, 500), min_size=size, max_size=size)] * 2)
)


def entropy(values: list[float]) -> float:
    return -sum(value * math.log2(value) for value in values)


@given(histograms)
def test_distances_are_those_of_the_definitions(pair):
    totals = [sum(histogram) + PRIOR * len(histogram) for histogram in pair]
    p, q = ([(n + PRIOR) / total for n in counts] for counts, total in zip(pair, totals, strict=True))

    score = distance(*pair)

    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    divergence = entropy(middle) - (entropy(p) + entropy(q)) / 2
    psi = sum((a - b) * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert score.psi == pytest.approx(psi, abs=1e-9)
    assert score.js == pytest.approx(math.sqrt(max(0.0, divergence)), abs=1e-6)


@given(st.lists(st.integers(0, 500), min_size=2, max_size=25).filter(any), st.booleans())
def test_groups_have_every_bucket_once(histogram, is_ordered):
    groups = group_buckets(histogram, is_ordered)

    assert sorted(bucket for group in groups for bucket in group) == list(range(len(histogram)))
    sizes = add_up(histogram, groups)
    assert sum(sizes) == sum(histogram)
    if len(groups) > 1:
        assert min(sizes) >= max(MIN_SHARE * sum(histogram), MIN_IMAGES)
    if is_ordered:
        assert all(group == list(range(group[0], group[-1] + 1)) for group in groups)


@pytest.mark.parametrize(("size", "images"), [(300, 200), (300, 10_000), (5_000, 1_000)])
@pytest.mark.parametrize("buckets", [3, 12, 30])
def test_chance_rarely_exceeds_a_limit(size, images, buckets):
    """At a risk of 1 % per comparison, 0.3 to 2 % of 5,000 pairs of samples exceed the limit."""
    rng = np.random.default_rng(buckets)
    old = rng.multinomial(size, rng.dirichlet(np.full(buckets, 3.0)))
    groups = group_buckets(old.tolist())
    reference = add_up(old.tolist(), groups)
    most = chance_limit(reference, images, 0.01)

    drawn = rng.multinomial(images, np.array(reference) / size, 5_000)
    refs = rng.multinomial(size, np.array(reference) / size, 5_000)
    scores = [distance(a.tolist(), b.tolist()) for a, b in zip(refs, drawn, strict=True)]

    for measure in ("psi", "js"):
        over = np.mean([getattr(score, measure) > getattr(most, measure) for score in scores])
        assert 0.003 <= over <= 0.02, measure


@rows(
    (["baseline", "classify"], 2, "expected one of --images DIR and --from-traffic DURATION"),
    (["baseline", "classify", "--images", "x", "--from-traffic", "1h"], 2, "expected one of --images"),
    (["baseline", "classify", "--from-traffic", "1h"], 1, "fix: nereid serve"),
    (["show", "classify"], 1, "fix: nereid serve"),
    (["show", "missing"], 2, "no route 'missing'"),
)
def test_errors_name_the_fix(words, status, message, tmp_path):
    done = CliRunner().invoke(app, ["drift", *words], env={"XDG_RUNTIME_DIR": str(tmp_path)})

    assert done.exit_code == status
    assert message in done.stderr


def test_table_has_everything_that_is_known(capsys):
    numbers = {"psi": 0.5, "js": 0.25}
    signals = (SignalDrift("warmth", 300, "drift", numbers, numbers), SignalDrift("class", 9, "too few"))
    variants = (
        VariantDrift("v1", "net", 2, 300, 5.0, 7200.0, "", signals),
        VariantDrift("v2", "net", 3, 0, None, None, "the reference does not have this variant"),
    )
    agreement, accuracy = (Agreement("dark", 1800, 200, 190),), (Accuracy("v1", 10, 9, 0.6, 0.98),)

    print_report(DriftReport(1e9, 3600, 600, RouteDrift("r", "photos", variants), agreement, accuracy))
    lines = capsys.readouterr().out

    for text in (
        "v1 (version 2 of net): drift; 300 images in the window, reference 2 h 0 min old",
        "v2 (version 3 of net): not compared: the reference does not have this variant",
        "last 1 h 0 min, of which 10 min are recorded",
        "95.0%",
        "60.0% to 98.0%",
    ):
        assert text in lines
    assert "too few" in lines
