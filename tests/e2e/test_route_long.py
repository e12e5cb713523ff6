"""The long tests of a route: shares, sticky keys and changes under load; counts are cut by SLOW_REQUESTS."""

import json
import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from statistics import NormalDist

import pytest

from nereid.routing.assignment import assign, parse_route
from tests.proof import REQUESTS
from tests.routes import (
    Load,
    answered_by,
    document,
    replace,
    serve_routes,
    store_adding,
    store_router,
    variant,
    wait_until,
)

KEYS = [f"caller-{number}" for number in range(REQUESTS // 2)]
CHANGES = REQUESTS // 100
CALLERS = 16
# Ten times what an idle machine needs: the file is read twice a second.
VISIBLE_S = 5.0
PROTOCOLS = ["http", "grpc"]
ADDED = {"control": 1, "candidate": 10, "third": 100}
MODELS = {"control": "one", "candidate": "ten", "third": "hundred"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Two running servers, each with the same networks and a route of its own."""
    bases = [tmp_path_factory.mktemp(f"long{number}") for number in range(2)]
    for base in bases:
        for name, model in MODELS.items():
            store_adding(base / "repository", model, ADDED[name])
        store_router(base / "repository", "route")
        replace(base / "repository" / "route.route.json", json.dumps(weighing(90, 10)).encode())
    with (
        serve_routes(bases[0] / "repository", bases[0]) as first,
        serve_routes(bases[1] / "repository", bases[1]) as second,
    ):
        yield first, second


@pytest.fixture
def served(both):
    """The first of the two servers."""
    return both[0]


def weighing(*weights: float) -> dict:
    """Return a route with these weights; further variants have weight 0."""
    padded = [*weights, 0, 0][:3]
    return document(*(variant(*pair, weight) for pair, weight in zip(MODELS.items(), padded, strict=True)))


def send_all(served, requests: list[dict]) -> list:
    """Send a request with each of these headers, over both protocols; returns the responses."""

    def send(number: int):
        answer = served.send("route", PROTOCOLS[number % 2], headers=requests[number])
        assert answer.added == ADDED[answer.variant]
        return answer

    with ThreadPoolExecutor(CALLERS) as pool:
        return list(pool.map(send, range(len(requests))))


def variants_of(served, keys: list[str]) -> list[str]:
    """Return the variant that serves each key."""
    answers = send_all(served, [{"x-route-key": key} for key in keys])
    assert {answer.reason for answer in answers} == {"route-key"}
    return [answer.variant for answer in answers]


def assigned(content: dict, keys: list[str]) -> list[str]:
    """Return the computed variant of each key."""
    route = parse_route(json.dumps(content).encode())
    return [assign(route, key).name for key in keys]


def half_width(count: int, share: float, confidence: float) -> float:
    """Return the maximum deviation of a binomial count from its mean, by the normal approximation."""
    return NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(count * share * (1 - share)) + 0.5


def test_shares_by_chance_are_the_weights(served):
    """Of requests at 90:10 over both protocols, each variant has its share.

    The server's draws have no seed, so a correct server leaves the interval once in 10,000 runs.
    """
    served.use("route", weighing(90, 10))

    counts = Counter(answer.origin for answer in send_all(served, [{}] * REQUESTS))

    assert set(counts) == {("control", "1", "weight"), ("candidate", "1", "weight")}
    missed = abs(counts["candidate", "1", "weight"] - REQUESTS * 0.1)
    assert missed <= half_width(REQUESTS, 0.1, 0.9999)


def test_sticky_keys_are_the_same_on_two_servers_and_after_a_reload(both):
    """Each key gets one variant, also on another server and after a reload of the router."""
    first, second = both
    content = first.use("route", weighing(60, 30, 10))
    second.use("route", weighing(60, 30, 10))
    before, pids = variants_of(first, KEYS), first.stubs("route")

    first.repair("route")
    wait_until(lambda: first.stubs("route") and not {*first.stubs("route")} & {*pids})

    assert before == assigned(content, KEYS)
    assert variants_of(first, KEYS) == before
    assert variants_of(second, KEYS) == before


def test_changes_under_load_fail_no_request_and_are_visible_soon(served):
    """At concurrency 16, the route changes repeatedly: no request fails, each change takes effect soon."""
    served.use("route", weighing(0, 1))
    waited = []
    with Load(served, "route", CALLERS) as load:
        for number in range(CHANGES):
            name, weights = [("control", (1, 0)), ("candidate", (0, 1)), ("third", (0, 0, 1))][number % 3]
            changed = time.monotonic()
            replace(served.path("route"), json.dumps(weighing(*weights)).encode())
            load.wait_for(answered_by(name), 1, changed)
            seen = [outcome.end for outcome in load.begun_after(changed) if answered_by(name)(outcome)]
            waited.append(min(seen) - changed)

    assert [outcome.answer for outcome in load.outcomes if outcome.is_failed] == []
    assert len(waited) == CHANGES
    assert max(waited) <= VISIBLE_S, max(waited)
