"""Report of the gateway's load test with few or no responses."""

import pytest

from loadtest import gateway, route


def load(answered: float, p50_ms: float | None = 10.0) -> dict:
    row = {"offered": 100, "load": 2.0, "answered": answered, "refused": 0, "lost": 0}
    return row | {"p50_ms": p50_ms, "p99_ms": p50_ms}


@pytest.mark.parametrize(
    ("loads", "share"),
    [([load(80), load(60)], 0.75), ([load(80), load(0, None)], 0.0), ([load(0, None)] * 2, 0.0)],
    ids=["some", "none at last", "none at all"],
)
def test_goodput_at_the_highest_load_is_compared(loads, share):
    assert gateway.kept(loads) == share
    assert gateway.missed([], loads)


def test_lost_requests_miss_the_target():
    assert gateway.missed([], [load(80), load(80) | {"lost": 2}]) == [
        "2 requests neither answered nor refused"
    ]


@pytest.mark.parametrize(("compared", "is_missed"), [(0.89, True), (0.9, False)])
def test_route_is_judged_by_its_share_of_the_throughput(compared, is_missed):
    row = {"profile": "cpu", "path": route.ROUTE, "unit": route.RATE, "compared": compared}

    assert bool(route.missed([row])) is is_missed
    assert route.missed([row | {"unit": route.P50, "compared": -0.2}]) == []
