"""A route whose variants fail: breakers, retries, repair and cancellation, on the real server."""

import contextlib
import json
import time

import pytest
from tritonclient.utils import InferenceServerException

from tests.routes import (
    Load,
    X,
    answered_by,
    document,
    given,
    order,
    replace,
    serve_routes,
    store_adding,
    store_puppet,
    store_router,
    together,
    variant,
    wait_until,
    waiting,
)
from tests.tables import cases

PROTOCOLS = ["http", "grpc"]
UNAVAILABLE = {"http": "503", "grpc": "StatusCode.UNAVAILABLE"}
INVALID = {"http": "400", "grpc": "StatusCode.INVALID_ARGUMENT"}
INTERNAL = {"http": "500", "grpc": "StatusCode.INTERNAL"}
CLOSED = 0
CALLERS = 16
# Limit for moving traffic away from a dead variant.
MOVED_S = 2.0
# Keeps a breaker open for a whole test.
LONG = {"open_s": 600}
pytestmark = pytest.mark.slow
# gRPC's retry throttling, which the budget follows: 5 tokens, and one for each ten successes.
TOKENS, PER_SUCCESS = 5, 0.1


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    base = tmp_path_factory.mktemp("failures")
    repository = base / "repository"
    for name, number in {"steady": 1, "victim": 2, "absent": 3}.items():
        store_adding(repository, name, number)
    store_puppet(repository, "puppet", add=4)
    store_router(repository, "route")
    replace(repository / "route.route.json", json.dumps(document(variant("steady", "steady", 1))).encode())
    with serve_routes(repository, base) as running:
        yield running


@pytest.fixture
def puppet(served):
    """Set the puppet's behaviour: `puppet(error="boom")`; before and after the test it returns x + 4."""

    def set_orders(**orders):
        order(served.repository, "puppet", **{"add": 4} | orders)

    set_orders()
    yield set_orders
    set_orders()


def pair(name: str, model: str, weight: float = 1, other: float = 0, **more) -> dict:
    """Return a route with the variant NAME of `model`, and the default `NAMEd` of the steady network."""
    settings = {"breaker": LONG} | more
    return document(
        variant(name, model, weight), variant(f"{name}d", "steady", other), default=f"{name}d", **settings
    )


@cases(
    ("text", "statuses"),
    {
        "image": ("invalid image: no picture", INVALID),
        "behind-an-ensemble": ("in ensemble 'e', invalid image: no picture", INVALID),
        "overloaded": ("overloaded: 9 in flight", UNAVAILABLE),
        "other": ("boom", INTERNAL),
    },
)
def test_error_of_a_variant_keeps_its_class(served, puppet, request, text, statuses):
    served.use("route", pair(f"says-{request.node.callspec.id}", "puppet"))
    puppet(error=text)

    for protocol, expected in statuses.items():
        status, message = served.refusal("route", protocol)

        assert (status, text.rpartition("', ")[2] in message) == (expected, True)


def test_killed_variant_is_replaced_within_two_seconds_and_comes_back(served):
    """Under load a variant's processes are killed: traffic moves to the default, and back after a repair.

    Requests sent before the breaker opened may fail, but soon: Triton 24.10 takes a second per request to see
    that a process is dead, one request after the other.
    """
    served.use("route", pair("dies", "victim", 50, 50, breaker={"open_s": 1}))
    with Load(served, "route", CALLERS) as load:
        load.wait_for(answered_by("dies"), 50)
        killed = time.monotonic()
        served.kill("victim")
        load.wait_for(lambda outcome: outcome.begin > killed + 2 * MOVED_S, 100)
        served.repair("victim")
        repaired = time.monotonic()
        load.wait_for(answered_by("dies"), 50, repaired)
        back = time.monotonic()
        load.wait_for(lambda outcome: True, 100, back)

    replaced = [outcome for outcome in load.outcomes if not outcome.is_failed]
    replaced = [outcome for outcome in replaced if outcome.answer.origin == ("diesd", "1", "breaker")]
    moved_s = min(outcome.begin for outcome in replaced) - killed
    slowest_s = max(outcome.end - outcome.begin for outcome in load.begun_after(killed - 1, repaired))
    # Each trial of the breaker costs one request.
    later = [outcome.is_failed for outcome in load.begun_after(killed + 2 * MOVED_S)]
    assert (moved_s <= MOVED_S, slowest_s <= 2 * MOVED_S) == (True, True), (moved_s, slowest_s)
    assert sum(outcome.is_failed for outcome in load.outcomes) <= 2 * CALLERS
    assert sum(later) <= 1 + (repaired - killed) / 1
    assert not any(outcome.is_failed for outcome in load.begun_after(back))
    assert not any(outcome.is_failed for outcome in load.outcomes if outcome.end < killed)
    served.wait_metric(CLOSED, "breaker_state", variant="dies")
    served.wait_metric(0, "in_flight", variant="dies")


# An unreachable variant opens its breaker immediately; here each request tries it again.
IMMEDIATELY = {"open_s": 0.001}


@pytest.fixture
def doomed(served):
    """The name of a puppet that holds its requests, behind a route with a full retry budget."""
    name = f"doomed{len(served.log)}"
    store_puppet(served.repository, name, hold=True, blocks=True)
    served.grpc.load_model(name)
    served.use("route", pair(name, name, breaker=IMMEDIATELY))
    for _ in range(int(TOKENS / PER_SUCCESS) * 2):
        served.send("route", headers={"x-variant": f"{name}d"})
    served.wait_metric(100, "requests_total", variant=f"{name}d")
    return name


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_request_that_dies_with_its_variant_fails_alone(served, doomed, protocol):
    """A request in flight at the dying variant is not retried, since it may be the cause; later ones are."""
    (pending,) = together(1, lambda _: served.refusal("route", protocol))
    wait_until(lambda: waiting(served.repository, doomed) == 1)

    served.kill(doomed)

    status, message = pending.result()
    assert (status, "unavailable: " in message) == (UNAVAILABLE[protocol], True)
    assert served.metric("requests_total", variant=f"{doomed}d") == 100
    assert served.send("route", protocol).origin == (f"{doomed}d", "1", "retry")


def test_slots_of_cancelled_requests_are_freed(served, puppet):
    """Others are admitted while the variant still computes requests whose clients have left."""
    busy = variant("busy", "puppet", 1, deadline_ms=3_600_000)
    route = document(busy, variant("busyd", "steady"), default="busyd", max_in_flight=4)
    served.use("route", route)
    puppet(hold=True)
    pending = [
        served.grpc.async_infer("route", [given("grpc", X)], lambda result, error: None) for _ in range(4)
    ]
    wait_until(lambda: waiting(served.repository, "puppet") == 4)
    to_other = {"headers": {"x-variant": "busyd"}}
    assert served.refusal("route", **to_other)[1].startswith("overloaded: 4 in flight")

    for each in pending:
        each.cancel()

    def is_admitted() -> bool:
        with contextlib.suppress(InferenceServerException):
            return served.send("route", **to_other).variant == "busyd"
        return False

    wait_until(is_admitted, "a free slot")
    assert waiting(served.repository, "puppet") == 4
    puppet()
    served.wait_metric(0, "in_flight", variant="busy")


def test_tracing_does_not_end_the_server(tmp_path):
    """Triton 24.10 ends with SIGSEGV if a request is forwarded with its trace; the route drops the trace."""
    repository = tmp_path / "repository"
    store_adding(repository, "steady", 1)
    store_adding(repository, "other", 2)
    store_router(repository, "route")
    shadow = {"name": "dark", "model": "other", "version": 1, "percent": 100}
    route = document(variant("steady", "steady", 1), shadows=[shadow])
    replace(repository / "route.route.json", json.dumps(route).encode())
    tracing = ["mode=triton", "rate=1", "level=TIMESTAMPS", f"triton,file={tmp_path / 'trace.json'}"]
    with serve_routes(repository, tmp_path, *(f"--trace-config={each}" for each in tracing)) as running:
        for number in range(20):
            assert running.send("route", PROTOCOLS[number % 2]).origin == ("steady", "1", "weight")
        running.wait_metric(20, "shadow_requests_total")


def test_instances_of_a_route_have_their_own_series(served):
    store_router(served.repository, "twice")
    config = served.repository / "twice" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    replace(served.path("twice"), json.dumps(document(variant("steady", "steady", 1), generation=7)).encode())
    served.grpc.load_model("twice")
    for number in range(20):
        served.send("twice", PROTOCOLS[number % 2])

    served.wait_metric(20, "requests_total", route="twice", outcome="ok")
    shown = served.metrics().sums("nereid_route_generation", "model_instance", labels={"route": "twice"})
    assert shown == {("twice_0_0",): 7, ("twice_0_1",): 7}
