"""Growth between two metrics pages, and quantiles of histograms."""

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid.observe.metric_growth import Growth, MetricsPage, interpolate

COUNTS = st.lists(st.integers(0, 50), min_size=1, max_size=8)


def grown(before: str, after: str, is_restarted: bool = False) -> Growth:
    """Return the growth between two pages that are 2 s apart."""
    return Growth(MetricsPage.parse(before, 10.0), MetricsPage.parse(after, 12.0), is_restarted)


def observed_up_to(value: float, bounds: list[int], counts: list[int]) -> float:
    """Return how many observations are at most `value` if those of a bucket are spread evenly over it."""
    lowers = [0, *bounds[:-1]]
    parts = ((value - low) / (high - low) for low, high in zip(lowers, bounds, strict=True))
    return sum(count * min(1.0, max(0.0, part)) for count, part in zip(counts, parts, strict=True))


@given(COUNTS, st.floats(0, 1), st.data())
def test_quantile_has_its_share_of_evenly_spread_observations(counts, share, data):
    widths = data.draw(st.lists(st.integers(1, 100), min_size=len(counts), max_size=len(counts)))
    bounds = list(accumulate(widths))
    cumulative = dict(zip(map(float, bounds), accumulate(counts), strict=True))
    cumulative[math.inf] = sum(counts)

    found = interpolate(share, cumulative)

    if not sum(counts):
        assert found is None
        return
    assert found is not None
    assert 0 <= found <= bounds[-1]
    # Rounding of a share, times at most 400 observations.
    assert observed_up_to(found, bounds, counts) == pytest.approx(share * sum(counts), abs=1e-6)


@pytest.mark.parametrize(
    ("share", "buckets", "expected"),
    [
        (0.5, {}, None),
        (0.5, {1.0: 0, math.inf: 0}, None),
        (0.5, {1.0: 10, math.inf: 10}, 0.5),
        (0.5, {1.0: 0, 2.0: 4, math.inf: 4}, 1.5),
        (1.0, {1.0: 2, 2.0: 4, 4.0: 4, math.inf: 4}, 2.0),
        (0.99, {1.0: 1, 2.0: 1, math.inf: 10}, 2.0),
    ],
    ids=["no bucket", "no observation", "first bucket", "empty first", "all", "beyond the last bound"],
)
def test_edges_of_the_interpolation(share, buckets, expected):
    assert interpolate(share, buckets) == expected


@pytest.mark.parametrize(
    ("before", "after", "total"),
    [
        ("", "", 0.0),
        ('c{a="x"} 5', "", 0.0),
        ("", 'c{a="x"} 5', 5.0),
        ('c{a="x"} 5', 'c{a="x"} 7', 2.0),
        ('c{a="x"} 5', 'c{a="x"} 3', 3.0),
        ('c{a="x"} 5\nc{a="y"} 100', 'c{a="x"} 6\nc{a="y"} 1', 2.0),
    ],
    ids=["nothing", "series ended", "first event", "growth", "reset", "one of two reset"],
)
def test_growth_of_a_counter(before, after, total):
    assert grown(before, after).total("c") == total
    assert grown(before, after).rate("c") == total / 2


def test_after_a_restart_all_counts_are_new():
    """A fast new server may already have more requests than the old one."""
    assert grown("c 5", "c 7", is_restarted=True).total("c") == 7


def test_series_are_selected_by_their_labels():
    growth = grown("", 'c{a="x",b="1"} 1\nc{a="x",b="2"} 2\nc{a="y",b="1"} 4')

    assert growth.total("c", {"a": "x"}) == 3
    assert growth.total("c", without={"b": "1"}) == 2
    assert growth.total("c", {"a": "z"}) == 0
    assert growth.after.values("c", "b", {"a": "x"}) == {"1", "2"}
    assert growth.after.total("c", {"a": "z"}) is None


def histogram(labels: str, *cumulative: int) -> str:
    """Return the series of a histogram with bounds of 1, 2 and infinity."""
    bounds = ("1", "2", "+Inf")
    return "\n".join(
        f'h_bucket{{{labels},le="{bound}"}} {count}' for bound, count in zip(bounds, cumulative, strict=True)
    )


def test_quantile_is_of_the_growth_alone():
    before = histogram('a="x"', 1000, 1000, 1000) + "\n" + histogram('a="y"', 0, 0, 0)
    after = histogram('a="x"', 1000, 1002, 1002) + "\n" + histogram('a="y"', 0, 2, 2)

    growth = grown(before, after)

    assert growth.quantile(0.5, "h") == 1.5
    assert growth.quantile(0.5, "h", {"a": "x"}) == 1.5
    assert growth.quantile(0.5, "h", {"a": "z"}) is None
    assert growth.quantile(0.5, "h", without={"a": "y"}) == 1.5


def test_a_reset_histogram_counts_as_a_whole():
    """One bucket that fell shows the reset, even if others have grown beyond their old value."""
    growth = grown(histogram('a="x"', 2, 10, 10), histogram('a="x"', 4, 4, 4))

    assert growth.quantile(0.5, "h") == 0.5
