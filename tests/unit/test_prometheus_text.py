"""Samples of a metrics page, their increase since an earlier page, and quantiles of histograms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid.base.prometheus_text import MetricSamples, counter, gauge, quantile, render, without_lag
from tests.tables import cases

X, Y = 'c{a="x"}', 'c{a="y"}'


def increase_between(before: str, after: str) -> MetricSamples:
    return MetricSamples.parse(after) - MetricSamples.parse(before)


@cases(
    increase=(f"{X} 5\n{Y} 1", f"{X} 7\n{Y} 1", {"x": 2, "y": 0}),
    one_of_two_was_reset=(f"{X} 5\n{Y} 100", f"{X} 6\n{Y} 1", {"x": 1, "y": 1}),
    a_series_appears=(f"{X} 5", f"{X} 5\n{Y} 3", {"x": 0, "y": 3}),
    a_series_goes=(f"{X} 5\n{Y} 3", f"{X} 6", {"x": 1}),
    the_server_restarted=(f"{X} 5\n{Y} 3", f"{X} 2\n{Y} 0", {"x": 2, "y": 0}),
    first_page=("", f"{X} 5", {"x": 5}),
    empty_page=(f"{X} 5", "", {}),
)
def test_increase_of_a_counter(before, after, increase):
    samples = increase_between(before, after)

    assert samples.sums("c", "a") == {(name,): value for name, value in increase.items()}
    assert samples.total("c") == sum(increase.values())


@given(
    st.lists(st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9)), min_size=1, max_size=9),
    st.sets(st.integers(0, 9)),
)
def test_no_event_is_lost_or_counted_twice(looks, restarts):
    """The increase of all looks together is the number of events, if each restart shows in each counter."""
    counts, events, before, total = dict[str, int](), 0, MetricSamples({}), 0.0
    for number, look in enumerate(looks):
        if number in restarts:
            counts = dict.fromkeys(counts, 0)
            now = MetricSamples.parse("".join(f'c{{a="{name}"}} 0\n' for name in counts))
            total, before = total + (now - before).total("c"), now
        for name, count in look.items():
            counts[name] = counts.get(name, 0) + count
            events += count
        now = MetricSamples.parse("".join(f'c{{a="{name}"}} {count}\n' for name, count in counts.items()))
        total, before = total + (now - before).total("c"), now

    assert total == events


@cases(
    same=(f"{X} 5\n{Y} 0\nd 4", False),
    grown=(f"{X} 6\n{Y} 1\nd 4", False),
    fallen=(f"{X} 4\n{Y} 9\nd 4", True),
    gone=(f"{Y} 9\nd 4", True),
    gone_without_events=(f"{X} 5\nd 4", False),
    another_counter=(f"{X} 5\n{Y} 0\nd 3", False),
)
def test_reset_shows_in_a_smaller_count(after, is_reset):
    before = MetricSamples.parse(f"{X} 5\n{Y} 0\nd 4")

    assert MetricSamples.parse(after).was_reset(before, ["c", "absent"]) is is_reset


PAGE = """# TYPE c counter
c{a="x",b="1"} 1
c{a="x",b="2"} 2
c{a="y",b="2"} 4
c 8
cc{a="x"} 16
"""


@cases(
    all=({}, {}, 15),
    one_label=({"a": "x"}, {}, 3),
    two_labels=({"a": "x", "b": "2"}, {}, 2),
    one_of_several_values=({"b": ("1", "2")}, {}, 7),
    without=({}, {"a": "x"}, 12),
    without_several=({}, {"a": "y", "b": ("1", "3")}, 10),
    none=({"a": "z"}, {}, 0),
)
def test_sums_over_labels(labels, excluding, total):
    page = MetricSamples.parse(PAGE)

    assert page.total("c", labels, excluding) == total
    assert sum(page.sums("c", "b", labels=labels, excluding=excluding).values()) == total
    assert page.gauge("c", labels) == (page.total("c", labels) if labels != {"a": "z"} else None)


def test_page_is_parsed_in_part():
    assert [*MetricSamples.parse(PAGE, ("cc",)).samples] == ["cc"]
    assert MetricSamples.parse(PAGE, labels={"b": "2"}).sums("c", "a") == {("x",): 2, ("y",): 4}
    assert MetricSamples.parse(PAGE).sums("c", "a") == {("x",): 3, ("y",): 4, ("",): 8}


def test_rendered_page_has_the_same_samples():
    kinds = {"c": counter("C."), "g": gauge("G.")}

    page = MetricSamples.parse(render({("c", (("a", "x y"),)): 1.5, ("g", ()): 2.0}, "p_", kinds))

    assert (page.sums("p_c", "a"), page.gauge("p_g"), len(page.samples)) == ({("x y",): 1.5}, 2.0, 2)


def histogram(labels: str, *cumulative: int) -> str:
    rows = [f'h_bucket{{{labels},le="{bound}"}} ' for bound in ("1", "2", "+Inf")]
    rows += [f"h_count{{{labels}}} ", f"h_sum{{{labels}}} "]
    values = (*cumulative, cumulative[-1], 7)
    return "".join(f"{row}{value}\n" for row, value in zip(rows, values, strict=True))


def test_histogram_has_the_growth_of_each_bucket():
    before = histogram('a="x"', 1000, 1000, 1000) + histogram('a="y"', 0, 0, 0)
    increase = increase_between(before, histogram('a="x"', 1000, 1002, 1002) + histogram('a="y"', 0, 2, 5))

    assert increase.buckets("h", "a") == {
        ("x",): {1: 0, 2: 2, math.inf: 0},
        ("y",): {1: 0, 2: 2, math.inf: 3},
    }
    assert increase.buckets("h") == {(): {1: 0, 2: 4, math.inf: 3}}
    assert increase.quantile(0.5, "h", {"a": "x"}) == increase.quantile(0.5, "h", excluding={"a": "y"}) == 1.5
    assert math.isnan(increase.quantile(0.5, "h", {"a": "z"}))


def test_histogram_is_reset_as_a_whole():
    """One smaller value shows the reset, even if other series have grown beyond their old values."""
    increase = increase_between(
        histogram('a="x"', 2, 3, 3) + histogram('a="y"', 1, 1, 1), histogram('a="x"', 1, 5, 5)
    )

    assert increase.buckets("h") == {(): {1: 1, 2: 4, math.inf: 0}}
    assert (increase.total("h_count"), increase.total("h_sum")) == (5, 7)


def test_bucket_that_lags_behind_is_empty():
    page = MetricSamples.parse(histogram('a="x"', 4, 3, 5))

    assert without_lag(page.buckets("h")[()]) == {1: 4, 2: 0, math.inf: 1}
    assert page.quantile(1.0, "h") == 2
    assert page.quantile(0.8, "h") == 1


def test_fallen_gauge_resets_no_counter():
    """A gauge `jobs` falls when a job ends; the counter `jobs_count` goes on, and so does its increase."""
    page = "# TYPE jobs gauge\njobs {}\n# TYPE jobs_count counter\njobs_count {}\n"

    increase = increase_between(page.format(3, 100), page.format(2, 101))

    assert increase.total("jobs_count") == 1
    assert increase.gauge("jobs") is None


@cases(
    no_bucket=(0.5, {}, math.nan),
    no_observation=(0.5, {1.0: 0, math.inf: 0}, math.nan),
    first_bucket=(0.25, {1.0: 10, math.inf: 0}, 0.25),
    empty_first=(0.5, {1.0: 0, 2.0: 4, math.inf: 0}, 1.5),
    all=(1.0, {1.0: 2, 2.0: 2, 4.0: 0, math.inf: 0}, 2.0),
    beyond_the_last_bound=(0.99, {1.0: 1, 2.0: 0, math.inf: 9}, 2.0),
)
def test_quantile_at_the_edges(share, buckets, expected):
    assert quantile(share, buckets) == pytest.approx(expected, nan_ok=True)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=12).filter(
        lambda rows: any(count for _, count in rows)
    ),
    st.floats(0.01, 0.99),
)
def test_quantile_is_linear_inside_a_bucket(rows, share):
    bounds = np.cumsum([width for width, _ in rows]).astype(float)
    counts = [count for _, count in rows]
    filled = [index for index, count in enumerate(counts) if count]
    # From the lower bound of each filled bucket to its upper one.
    points = [(([0.0, *bounds])[index], sum(counts[:index])) for index in filled]
    points += [(bounds[index], sum(counts[: index + 1])) for index in filled]
    values, below = zip(*sorted(points, key=lambda point: (point[1], point[0])), strict=True)

    estimate = quantile(share, dict(zip(bounds, counts, strict=True)))

    rank = share * sum(counts)
    assert estimate == pytest.approx(np.interp(rank, below, values) if rank not in below else estimate)
