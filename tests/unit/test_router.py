"""The router, with functions as variants and a clock that the test moves."""

import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from msgspec.structs import replace

from nereid.backends.routing.assignment import Route, Salts, Shadow, Variant
from nereid.backends.routing.attempts import DEATH_COUNTS_S, MAX_ABANDONED, MAX_SUSPECTS
from nereid.backends.routing.router import CHECK_CLIENTS_S, MAX_UNCHECKED_WAIT_S, Router
from nereid.base import errors
from nereid.base.contract import PROBE_HEADER
from nereid.tasks.classify.outputs import ClassificationOutputs
from tests.proof import REQUESTS
from tests.tables import cases
from tests.variants import (
    CAT,
    DOG,
    KEY_V1,
    KEY_V2,
    ROUTE,
    TO_V1,
    TO_V2,
    V1,
    V2,
    WITH_SHADOW,
    Request,
    World,
    dead,
    in_use,
)


@pytest.fixture
def world() -> World:
    return World()


def test_each_request_is_counted_once(world):
    labels = {"variant": "v2", "version": "12", "reason": "route-key", "outcome": "ok"}

    assert world.send(KEY_V2).outcome == ("v2", "12", "route-key")
    assert world.count("requests_total") == world.count("requests_total", **labels) == 1
    assert world.count("request_duration_seconds", variant="v2", outcome="ok") == 1

    unknown = "invalid request: unknown x-variant 'v9': expected one of v1, v2"
    assert world.send({"x-variant": "v9"}).outcome == unknown
    assert world.count("requests_total", variant="", outcome="invalid_request") == 1
    assert (world.count("requests_total"), world.count("in_flight")) == (2, 0)


@cases(
    image=(errors.InvalidImage("x"), "invalid image: x", "invalid_image"),
    overload=(errors.Overloaded("x"), "overloaded: x", "overloaded"),
    late=(errors.DeadlineExceeded("x"), "deadline exceeded: x", "deadline_exceeded"),
    any_exception=(KeyError("x"), "inference failed: KeyError: 'x'", "inference_failed"),
)
def test_error_reaches_the_client_and_frees_the_slot(error, text, outcome):
    world = World(max_in_flight=1)
    world.fail("m2", error)

    assert [world.send(TO_V2).outcome for _ in range(3)] == [text] * 3
    assert world.count("requests_total", variant="v2", outcome=outcome) == 3


def test_slots_of_clients_that_left_are_freed():
    """Only a rejection makes the router check its clients, and not more often than every quarter second."""
    world, overloaded = World(max_in_flight=1), "overloaded: 1 in flight, limit 1"
    for number in range(MAX_ABANDONED + 1):
        request, finish = world.hang_v2()
        request.is_gone, world.wakes = True, 0

        world.router.free_abandoned()
        assert (world.send().outcome, world.wakes) == (overloaded, 0 if number else 1)
        if number:  # it has just checked them
            world.router.free_abandoned()
            assert world.send().outcome == overloaded
            world.now += CHECK_CLIENTS_S
        world.router.free_abandoned()
        assert world.send().outcome == ("v1", "11", "weight")
        finish()

    assert world.count("in_flight", variant="v2") == 0
    assert world.count("shed_total") == 2 * MAX_ABANDONED + 1


def test_client_is_not_checked_after_its_response():
    """The response waits for the end of a check, because Triton frees a request with its response."""
    world = World(max_in_flight=1)
    request, finish = world.hang_v2()
    answered: list[int] = []

    def check() -> bool:
        finish(0.2)  # time to respond, if the thread could
        answered.append(len(request.answers))
        return False

    request.is_cancelled = check
    assert world.send().outcome == "overloaded: 1 in flight, limit 1"
    world.router.free_abandoned()
    finish()

    assert (answered, len(request.answers)) == ([0], 1)


@pytest.mark.parametrize(("timeout_s", "wakes"), [(0.5, 1), (0.9, 0)], ids=["earlier", "later"])
def test_rest_ends_at_the_next_deadline(world, timeout_s, wakes):
    assert world.router.sleep_s(0.8) == pytest.approx(0.8)

    _, finish = world.hang_v2(timeout_s=timeout_s)

    assert world.wakes == wakes
    assert world.router.sleep_s(2.0) == pytest.approx(timeout_s)
    world.now += timeout_s + 1
    assert world.router.sleep_s(2.0) == 0.0
    world.router.expire()
    assert world.router.sleep_s(2.0) == pytest.approx(2.0)
    finish()


@pytest.mark.parametrize("timeout_s", [0.0, 0.5], ids=["variant's", "caller's"])
def test_late_variant_is_not_awaited(timeout_s):
    """At the deadline the client gets an error; a later response is counted, not sent, and frees no slot."""
    world = World(max_in_flight=1)
    request, finish = world.hang_v2(timeout_s=timeout_s)
    assert request.timeouts == [pytest.approx(timeout_s or 1.0)]
    world.router.expire()
    assert (request.answers, request.errors) == ([], [])

    world.now += timeout_s or 1.0
    world.router.expire()
    world.router.expire()

    assert request.outcome.startswith("deadline exceeded: variant 'v2' has not responded in ")
    assert world.count("in_flight", variant="v2") == 1
    finish()
    assert request.outcome.startswith("deadline exceeded")
    assert (world.count("in_flight"), world.count("late_total", variant="v2")) == (0, 1)
    assert world.count("requests_total") == 1
    assert world.router.admit(Request(world, {}))
    assert world.send().outcome == "overloaded: 1 in flight, limit 1"


def test_hung_variant_does_not_fill_the_route():
    """A late attempt frees its slot, and a variant with eight late attempts gets no further ones."""
    world = World(max_in_flight=2, breaker=replace(ROUTE.breaker, min_requests=3, open_s=2.0))
    hung = []
    for _ in range(8):
        hung.append(world.hang_v2())
        world.now += 1.0
        world.router.expire()
        world.now += 2.0

    assert {request.outcome[:17] for request, _ in hung} == {"deadline exceeded"}
    assert world.send(TO_V2).outcome == "unavailable: no healthy variant: 'v2'; retried every 2 s"
    assert world.send(KEY_V2).outcome == ("v1", "11", "breaker")
    assert world.count("in_flight", variant="v2") == 8

    for _, finish in hung:
        finish()
    world.now += 2.0
    world.models["m2"] = lambda: CAT
    assert world.send(KEY_V2).outcome == ("v2", "12", "route-key")
    assert (world.count("in_flight", variant="v2"), world.count("late_total", variant="v2")) == (0, 8)


@cases(
    failure=(errors.InferenceFailed("x"), 0.0, 2),
    variants_deadline=(errors.DeadlineExceeded("x"), 0.0, 2),
    callers_deadline=(errors.DeadlineExceeded("x"), 0.001, 0),
    callers_image=(errors.InvalidImage("x"), 0.0, 0),
    overload=(errors.Overloaded("x"), 0.0, 0),
)
def test_only_a_fault_of_the_variant_opens_its_breaker(error, timeout_s, state, world):
    world.fail("m2", error)
    for _ in range(50):
        world.send(TO_V2, timeout_s=timeout_s)

    assert world.count("breaker_state", variant="v2") == state


@cases("others", answers_others=True, answers_nobody=False)
def test_late_variant_is_at_fault_only_if_it_is_silent(world, others):
    """A caller whose requests take too long must not take the variant from the others."""

    def late() -> np.ndarray:
        world.now += 0.5
        if others:
            world.models["m2"] = lambda: CAT
            world.send(TO_V2)
            world.models["m2"] = late
        world.now += 0.5
        raise errors.DeadlineExceeded("x")

    world.models["m2"] = late
    for _ in range(10):
        world.send(TO_V2)

    assert world.count("breaker_state", variant="v2") == (0 if others else 2)


def test_late_large_image_is_no_fault_of_the_variant(world):
    """A large image may take long, and a variant is not to blame for requests that wait behind one."""

    def send_ten(**options) -> float:
        world.fail("m2", errors.DeadlineExceeded("x"))
        for _ in range(10):
            world.now += 1
            world.send(TO_V2, **options)
        return world.count("breaker_state", variant="v2")

    def busy() -> np.ndarray:
        world.now += 20
        world.router.expire()  # it is late, and goes on
        assert send_ten() == 0
        return CAT

    assert send_ten(is_large=True) == 0
    world.models["m2"] = busy
    world.send(TO_V2, is_large=True)
    assert send_ten() == 2


NONE_HEALTHY = "unavailable: no healthy variant: {}; retried every 5 s"


@cases(
    default_replaces=(["v2"], KEY_V2, ("v1", "11", "breaker"), ["m1"]),
    forced=(["v2"], TO_V2, NONE_HEALTHY.format("'v2'"), []),
    default=(["v1"], KEY_V1, NONE_HEALTHY.format("'v1'"), []),
    other_than_the_default=(["v1"], KEY_V2, ("v2", "12", "route-key"), ["m2"]),
    both=(["v2", "v1"], KEY_V2, NONE_HEALTHY.format("'v2', 'v1'"), []),
)
def test_open_breaker_keeps_requests_away(failing, parameters, outcome, called, world):
    """The default replaces a failing variant, unless the request forces it; nothing replaces the default."""
    for name in failing:
        world.break_variant(name)
    world.called.clear()

    assert world.send(parameters).outcome == outcome
    assert world.called == called
    assert world.log == [f"variant '{name}': breaker open" for name in failing]
    if isinstance(outcome, str):
        assert world.count("requests_total", variant=failing[0], outcome="unavailable") == 1


def test_one_trial_at_a_time_closes_the_breaker(world):
    """Until the trial has succeeded, other requests go to the default."""
    world.break_variant()
    world.now += 5.0
    request, finish = world.hang_v2()

    assert world.send(KEY_V2).outcome == ("v1", "11", "breaker")
    finish()
    assert request.outcome == ("v2", "12", "variant")
    assert [world.send(KEY_V2).outcome[2] for _ in range(3)] == ["route-key"] * 3
    assert world.count("breaker_state", variant="v2") == 0
    assert world.log[-1] == "variant 'v2': breaker closed"


def test_trial_that_hangs_opens_the_breaker_again(world):
    """A trial past its deadline has failed, though its attempt has not returned."""
    world.break_variant()
    world.now += 5.0
    _, finish = world.hang_v2()
    world.now += 1.0

    world.router.expire()

    for _ in range(2):
        assert world.count("breaker_state", variant="v2") == 2
        finish()


def test_request_that_may_have_killed_its_variant_is_not_retried(world):
    """The first request that finds a process dead may be the cause; a later one cannot be."""
    world.fail("m2", errors.StubDied("x"))

    assert world.send(KEY_V2).outcome == "inference failed: x"
    world.now += 5.0
    assert world.send(KEY_V2).outcome == ("v1", "11", "retry")
    assert world.called == ["m2", "m2", "m1"]

    world.models["m2"] = lambda: CAT
    world.now += 5.0
    world.send(KEY_V2)
    world.fail("m2", errors.StubDied("x"))
    assert world.send(KEY_V2).outcome == "inference failed: x"


@cases(
    key=(KEY_V2, 1, ("v2", "12", "route-key")),
    forced=(TO_V2, 1, ("v2", "12", "variant")),
    # The request had each of the instances when they died; a third one might be the last.
    both=(KEY_V2, 2, "inference failed: Stub process 'm2_0_1' is not healthy."),
)
def test_one_dead_instance_is_not_a_dead_variant(parameters, deaths, outcome, world):
    world.replaced |= {"m2_0_0", "m2_0_1"}
    world.fail_once_each("m2", *(dead(f"m2_0_{number}") for number in range(deaths)))

    assert world.send(parameters).outcome == outcome
    assert world.called == ["m2", "m2"]
    if deaths == 1:
        assert world.count("breaker_state", variant="v2") == 0


def test_request_after_a_death_is_sent_three_times_more(world):
    """It cannot be the cause of a death before it; the breaker opens if the other processes do not answer."""
    world.replaced.add("m2_0_0")
    world.fail_once_each("m2", dead())
    world.send(KEY_V2)
    world.now += 1.0
    world.called.clear()
    world.fail_once_each("m2", *[dead()] * 4)

    assert world.send(KEY_V2).outcome == "unavailable: Stub process 'm2_0_0' is not healthy."
    assert world.called == ["m2"] * 4
    assert world.count("breaker_state", variant="v2") == 2


def test_retry_has_the_rest_of_the_time(world):
    """Past the deadline nothing is sent again."""
    world.replaced.add("m2_0_0")
    world.fail("m2", dead(), after_s=0.3)
    assert world.send(KEY_V2, timeout_s=0.5).timeouts == [pytest.approx(0.5), pytest.approx(0.2)]

    world.fail("m2", dead(), after_s=1.0)
    late = world.send(KEY_V2)
    assert (late.outcome[:12], len(late.timeouts)) == ("unavailable:", 1)


def test_few_possible_causes_are_sent_again(world):
    """Requests that kill one instance each must not kill two each for long."""
    world.replaced.add("m2_0_0")
    outcomes = []
    for _ in range(MAX_SUSPECTS + 3):
        world.fail_once_each("m2", dead(f"m2_0_{len(outcomes)}"))
        world.replaced.add(f"m2_0_{len(outcomes)}")
        outcomes.append(isinstance(world.send(KEY_V2).outcome, tuple))
    assert outcomes == [True] * MAX_SUSPECTS + [False] * 3

    world.now += DEATH_COUNTS_S + 1
    world.fail_once_each("m2", dead())
    world.replaced.add("m2_0_0")
    assert world.send(KEY_V2).outcome == ("v2", "12", "route-key")


def test_replaced_process_gets_a_trial_at_once(world):
    world.fail_once_each("m2", dead())
    world.send(KEY_V2)
    world.now += 0.5
    world.router.revive()
    assert world.send(KEY_V2).outcome == ("v1", "11", "breaker")

    world.replaced.add("m2_0_0")
    world.router.revive()

    assert world.send(KEY_V2).outcome == ("v2", "12", "route-key")
    assert world.count("breaker_state", variant="v2") == 0


def test_queue_of_a_dead_variant_fails_soon():
    """Requests queued at a dead process fail within a second, and none follows until they return."""
    world = World(variants=(V1, replace(V2, deadline_ms=10_000)))
    request, finish = world.hang_v2(KEY_V2)
    world.fail("m2", errors.StubDied("x"))
    world.send(TO_V2)

    world.now += 0.9
    world.router.expire()
    assert request.errors == []
    world.now += 0.1
    world.router.expire()

    assert request.outcome.startswith("deadline exceeded")
    world.now += 60.0
    assert world.send(KEY_V2).outcome == ("v1", "11", "breaker")
    finish()
    world.models["m2"] = lambda: CAT
    assert world.send(KEY_V2).outcome == ("v2", "12", "route-key")


def test_retries_have_a_budget(world):
    """Each failed trial costs a token; without tokens, requests fail without a retry."""
    world.fail("m2", errors.Unavailable("x"))

    outcomes = []
    for _ in range(30):
        outcomes.append(world.send(KEY_V2).outcome)
        world.now += 5.0

    # Of ten tokens five may be spent, and every success returns a tenth of one.
    assert outcomes[:4] == [("v1", "11", "retry")] * 4
    assert outcomes.count(("v1", "11", "retry")) <= 7
    assert outcomes[-1] == "unavailable: x"


def test_client_that_left_is_not_retried(world):
    world.fail("m2", errors.Unavailable("x"))

    assert world.send(KEY_V2, is_gone=True).outcome == str(errors.Cancelled("the client has disconnected"))
    assert world.called == ["m2"]
    assert world.count("cancelled_total") == 1


@cases(("waited_s", "called"), immediately=(0.0, ["m1"]), waited=(2 * MAX_UNCHECKED_WAIT_S, []))
def test_client_that_left_while_waiting_is_not_dispatched(world, waited_s, called):
    admitted = world.router.admit(Request(world, {}, is_gone=True))
    world.now += waited_s

    world.router.handle(admitted)

    assert world.called == called


@cases(
    close=(CAT, CAT * 0.9, "agreed"),
    other_class=(CAT, DOG, "disagreed"),
    one_of_a_batch=(np.concatenate([CAT, CAT]), np.concatenate([CAT, DOG]), "disagreed"),
    shadow_not_a_number=(CAT, np.array([[0.5, np.nan]], np.float32), "failed"),
    variant_not_a_number=(CAT * np.nan, CAT, "failed"),
    other_batch=(CAT, np.concatenate([CAT, CAT]), "failed"),
)
def test_shadow_is_compared(ours, theirs, outcome):
    """Top-1 agreement is counted, with distance and durations; scores that do not compare have failed."""
    world = World(WITH_SHADOW)
    world.models["m1"], world.models["m3"] = lambda: ours, lambda: theirs

    assert world.send(KEY_V1).outcome == ("v1", "11", "route-key")

    assert world.count("shadow_requests_total", shadow="dark", outcome=outcome) == 1
    assert world.count("shadow_requests_total") == 1
    for name in ("shadow_score_distance", "shadow_duration_seconds", "shadowed_duration_seconds"):
        assert world.count(name, shadow="dark") == (outcome != "failed")


def test_failing_shadow_is_logged_once():
    world = World(WITH_SHADOW)
    world.fail("m3", errors.Unavailable("gone"))

    assert {world.send(KEY_V1).outcome for _ in range(20)} == {("v1", "11", "route-key")}
    assert world.log == ["shadow 'dark' failed: unavailable: gone"]
    assert world.count("shadow_requests_total", outcome="failed") == 20


def test_shadow_needs_a_response_of_another_model():
    world = World(shadows=(Shadow("same", "m2", 1, 100),))
    world.send(KEY_V1)
    world.send(KEY_V2)
    world.fail("m1", errors.InvalidImage("x"))
    world.send(KEY_V1)

    assert world.called == ["m1", "m2", "m2", "m1"]


def test_shadow_is_shed_while_others_wait():
    world = World(WITH_SHADOW)
    waiting = world.router.admit(Request(world, {}))

    assert world.send(KEY_V1).outcome == ("v1", "11", "route-key")
    assert world.count("shadow_requests_total", outcome="shed") == 1
    assert world.called == ["m1"]

    world.router.handle(waiting)
    assert world.count("shadow_requests_total", outcome="agreed") == 1


def test_hung_shadow_is_given_up():
    """At its deadline a shadow has failed and frees its slot; with eight late ones it gets no requests."""
    world = World(WITH_SHADOW, shadow_max_in_flight=1)
    release, reached = threading.Event(), threading.Semaphore(0)
    world.models["m3"] = lambda: reached.release() or (release.wait(60) and CAT)
    with ThreadPoolExecutor(9) as pool:
        for _ in range(8):
            pool.submit(world.send, KEY_V1)
            assert reached.acquire(timeout=60)
            assert world.send(KEY_V1).outcome == ("v1", "11", "route-key")
            world.now += 10.0
            world.router.expire()
        assert world.count("shadow_requests_total", outcome="failed") == 8
        assert world.send(KEY_V1).outcome == ("v1", "11", "route-key")
        assert world.count("shadow_requests_total", outcome="shed") == 9
        release.set()

    world.send(KEY_V1)
    assert world.count("shadow_requests_total", outcome="agreed") == 1
    assert world.log[0] == "shadow 'dark' failed: deadline exceeded: no response in 10000 ms"


def test_response_that_cannot_be_built_is_an_error(world):
    request = Request(world, {})
    request.respond = lambda *arguments: 1 / 0

    world.router.handle(world.router.admit(request))

    assert request.outcome == "inference failed: ZeroDivisionError: division by zero"


def test_request_of_before_a_change_does_not_restore_old_settings(world):
    admitted = world.router.admit(Request(world, TO_V2))
    world.router.use(in_use(replace(ROUTE, breaker=replace(ROUTE.breaker, min_requests=2))))
    world.router.handle(admitted)
    world.fail("m2", errors.InferenceFailed("no"))

    for _ in range(2):
        world.send(TO_V2)

    assert world.count("breaker_state", variant="v2") == 2


@cases(
    weight=({"variants": (V1, replace(V2, weight=5))}, 2),
    version=({"variants": (V1, replace(V2, version=2))}, 0),
)
def test_breaker_outlives_a_change_of_weights_only(changes, state, world):
    world.break_variant()
    world.models["m2"] = lambda: CAT

    world.router.use(in_use(replace(ROUTE, **changes)))

    assert world.count("breaker_state", variant="v2") == state
    assert world.send(KEY_V2).outcome[2] == ("breaker" if state else "route-key")


def test_series_are_bounded(world):
    for number in range(1000):
        variant = Variant(f"v{number}", "m1", 1, 1)
        world.router.use(in_use(Route((variant,), variant.name, Salts("a", "b"))))
        assert world.send().outcome[0] == variant.name

    labels = {dict(pairs)["variant"] for family, pairs in world.counts if family == "requests_total"}
    assert "other" in labels
    assert len(labels) <= 65


@pytest.mark.slow
def test_routing_leaks_nothing():
    total = 50 * REQUESTS
    world = World(WITH_SHADOW)
    world.fail("m3", errors.Unavailable("gone"))
    kinds = [{}, KEY_V1, KEY_V2, TO_V1, TO_V2, {"x-variant": "v9"}, {"x-route-key": "€" * 50}]

    def work(count: int) -> None:
        for number in range(count):
            world.called.clear()
            world.now += 0.001
            world.send(kinds[number % len(kinds)])
            if number % 500 == 0:
                world.router.use(in_use(WITH_SHADOW))
                world.models["m2"] = lambda: CAT
                if number % 1000:
                    world.fail("m2", errors.InferenceFailed("no"))
                world.router.expire()

    def memory() -> int:
        world.now += 100  # the breakers' windows, which vary in size, become short
        for kind in 20 * kinds:
            world.send(kind)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, [5000] * 4))
            before = memory()
            list(pool.map(work, [total // 4] * 4))
            after = memory()
    finally:
        tracemalloc.stop()

    assert world.count("request_duration_seconds") >= total / 2
    # A leak of four bytes per request would exceed this limit.
    assert after - before < 4 * total


def test_each_response_is_observed_after_it_was_sent(world):
    seen = []

    def observe(request, response, labels):
        seen.append((list(request.answers), response is CAT, labels))
        return {}

    world.router = Router(
        in_use(ROUTE), ClassificationOutputs(), world, random_unit=lambda: 0.0, observe=observe
    )
    world.fail("m1", errors.InferenceFailed("no"))
    for parameters in (TO_V2, TO_V1, {**TO_V2, PROBE_HEADER: "1"}):
        world.send(parameters)

    assert seen == [([("v2", "12", "variant")], True, {"variant": "v2", "version": "12"})]
