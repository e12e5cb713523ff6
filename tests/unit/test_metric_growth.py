"""Growth between two metrics pages, and quantiles of histograms."""

import math

from nereid.observe.metric_growth import Growth, MetricsPage, interpolate
from tests.tables import cases


def grown(before: str, after: str, is_restarted: bool = False) -> Growth:
    """Return the growth between two pages that are 2 s apart."""
    return Growth(MetricsPage.parse(before, 10.0), MetricsPage.parse(after, 12.0), is_restarted)


@cases(
    ("share", "buckets", "expected"),
    {
        "no bucket": (0.5, {}, None),
        "no observation": (0.5, {1.0: 0, math.inf: 0}, None),
        "first bucket": (0.25, {1.0: 10, math.inf: 10}, 0.25),
        "empty first": (0.5, {1.0: 0, 2.0: 4, math.inf: 4}, 1.5),
        "later bucket": (0.75, {1.0: 2, 2.0: 4, 8.0: 8, math.inf: 8}, 5.0),
        "all": (1.0, {1.0: 2, 2.0: 4, 4.0: 4, math.inf: 4}, 2.0),
        "beyond the last bound": (0.99, {1.0: 1, 2.0: 1, math.inf: 10}, 2.0),
    },
)
def test_quantile_is_interpolated(share, buckets, expected):
    assert interpolate(share, buckets) == expected


@cases(
    ("before", "after", "total"),
    {
        "series ended": ('c{a="x"} 5', "", 0.0),
        "first event": ("", 'c{a="x"} 5', 5.0),
        "growth": ('c{a="x"} 5', 'c{a="x"} 7', 2.0),
        "one of two reset": ('c{a="x"} 5\nc{a="y"} 100', 'c{a="x"} 6\nc{a="y"} 1', 2.0),
    },
)
def test_growth_of_a_counter(before, after, total):
    assert grown(before, after).total("c") == total
    assert grown(before, after).rate("c") == total / 2


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
