"""Distances of histograms against their definitions, and the rate of false alarms of their limits."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid.insight.drift.scores import MIN_IMAGES, MIN_SHARE, PRIOR, add_up, distance, joined, limit

histograms = st.integers(2, 20).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(0, 500), min_size=size, max_size=size),
        st.lists(st.integers(0, 500), min_size=size, max_size=size),
    )
)
counts = st.lists(st.integers(0, 500), min_size=2, max_size=25).filter(any)


def shares(histogram: list[int]) -> list[float]:
    total = sum(histogram) + PRIOR * len(histogram)
    return [(count + PRIOR) / total for count in histogram]


def entropy(values: list[float]) -> float:
    return -sum(value * math.log2(value) for value in values)


@given(histograms)
def test_distances_are_those_of_the_definitions(pair):
    p, q = map(shares, pair)

    found = distance(*pair)

    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    divergence = entropy(middle) - (entropy(p) + entropy(q)) / 2
    assert found.psi == pytest.approx(
        sum((a - b) * math.log(a / b) for a, b in zip(p, q, strict=True)), abs=1e-9
    )
    assert found.js == pytest.approx(math.sqrt(max(0.0, divergence)), abs=1e-6)


@given(counts, st.booleans())
def test_groups_have_every_bucket_once(histogram, is_ordered):
    groups = joined(histogram, is_ordered)

    assert sorted(place for group in groups for place in group) == list(range(len(histogram)))
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
    truth = rng.dirichlet(np.full(buckets, 3.0))
    old = rng.multinomial(size, truth)
    groups = joined(old.tolist())
    reference = add_up(old.tolist(), groups)
    most = limit(reference, images, 0.01)

    drawn = rng.multinomial(images, np.array(reference) / size, 5_000)
    refs = rng.multinomial(size, np.array(reference) / size, 5_000)
    found = [distance(a.tolist(), b.tolist()) for a, b in zip(refs, drawn, strict=True)]

    for measure in ("psi", "js"):
        over = np.mean([getattr(each, measure) > getattr(most, measure) for each in found])
        assert 0.003 <= over <= 0.02, measure
