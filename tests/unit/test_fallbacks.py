"""Fallbacks of a route: further variants after the default one, and the configured answer."""

import json
import re
import threading

import numpy as np
import pytest
from msgspec.structs import replace

from nereid.backends.routing.assignment import BreakerSettings, LoadedRoute, Variant, parse_route
from nereid.backends.routing.attempts import MAX_SUSPECTS
from nereid.backends.routing.configured_answer import read_answer
from nereid.base import errors
from nereid.base.config.model_config import TensorSpec
from tests.routes import document, variant
from tests.tables import cases
from tests.variants import CAT, KEY_V1, KEY_V2, ROUTE, TO_V2, V1, V2, Request, World, dead, in_use

V3 = Variant("v3", "m3", 1, 0)
CHAIN = replace(ROUTE, variants=(V1, V2, V3), fallbacks=("v3",))
PATIENT = replace(CHAIN, variants=(V1, replace(V2, deadline_ms=60_000), V3))


class SlowlyChecked(Request):
    """A request for which the check of its client takes time, so that its next attempt begins later."""

    def is_cancelled(self) -> bool:
        self._world.now += 0.001
        return super().is_cancelled()


def answering(route=ROUTE) -> World:
    world = World(route)
    loaded = in_use(replace(route, answer={"scores": 0}))
    world.router.use(
        LoadedRoute(loaded.route, "", loaded.network_versions, {"scores": np.zeros(2, np.float32)})
    )
    return world


def counted(world: World, family: str, *names: str) -> dict[tuple[str, ...], float]:
    counts = {labels: n for (name, labels), n in world.counts.items() if name == family}
    return {tuple(dict(labels)[name] for name in names): n for labels, n in counts.items()}


def fallbacks(world: World) -> dict[tuple[str, ...], float]:
    return counted(world, "fallbacks_total", "from", "to", "reason")


def attempts(world: World) -> dict[tuple[str, ...], float]:
    return counted(world, "requests_total", "variant", "outcome", "reason")


def test_variants_are_tried_in_order():
    world = World(CHAIN)
    world.fail("m1", errors.Unavailable("x"))
    world.fail("m2", errors.Unavailable("x"))

    assert world.send(KEY_V2).outcome == ("v3", "13", "retry")
    assert world.called == ["m2", "m1", "m3"]
    expected = ("v2", "unavailable", "route-key"), ("v1", "unavailable", "retry"), ("v3", "ok", "retry")
    assert attempts(world) == dict.fromkeys(expected, 1)
    assert world.send(KEY_V2).outcome == ("v3", "13", "breaker")
    assert world.send().outcome == ("v3", "13", "breaker")
    assert world.called == ["m2", "m1", "m3", "m3", "m3"]
    expected = ("v2", "v3", "retry"), ("v2", "v3", "breaker"), ("v1", "v3", "breaker")
    assert fallbacks(world) == dict.fromkeys(expected, 1)
    world.fail("m3", errors.Unavailable("no m3"))
    assert world.send(KEY_V2).outcome == "unavailable: no m3"
    refused = world.send(KEY_V2).outcome
    assert refused.startswith("unavailable: no healthy variant: 'v2', 'v1', 'v3'")
    assert sum(fallbacks(world).values()) == 3


def test_exhausted_request_counts_for_its_own_variant():
    world = World(CHAIN)
    for model in ("m1", "m3"):
        world.fail(model, errors.Unavailable("x"))
    world.send(KEY_V1)
    world.counts.clear()

    world.send(KEY_V1)
    assert attempts(world) == {("v1", "unavailable", "route-key"): 1}
    world.fail("m2", errors.Unavailable("x"))
    world.send(KEY_V2)
    assert attempts(world) == {
        ("v1", "unavailable", "route-key"): 1,
        ("v2", "unavailable", "route-key"): 1,
        ("v1", "unavailable", "retry"): 1,
    }


def test_durations_of_replacements_are_apart():
    """A response in place of another variant, perhaps after a wait for it, is not compared in rollouts."""
    world = World(CHAIN)
    world.fail("m1", errors.Unavailable("x"))
    world.send(KEY_V1)
    world.send(KEY_V1)
    world.send({"x-variant": "v3"})

    name = "request_duration_seconds"
    assert world.count(name, variant="v3", outcome="ok", chosen="false") == 2
    assert world.count(name, variant="v3", outcome="ok", chosen="true") == 1
    assert world.count(name, variant="v1", outcome="unavailable", chosen="true") == 1
    assert world.count(name) == 4


def test_fallbacks_need_no_retry_budget():
    """All requests that were in flight when a device failed are answered."""
    world = World(CHAIN)
    requests = []
    for _ in range(40):
        world.fail("m2", errors.Unavailable("device failed: x"))
        world.now += 5.0  # the breaker lets a trial through
        requests.append(world.send(KEY_V2).outcome)
    assert requests == [("v1", "11", "retry")] * 40


@cases(
    forced=(TO_V2, errors.Unavailable("x")),
    invalid=(KEY_V2, errors.InvalidImage("x")),
    failed=(KEY_V2, errors.InferenceFailed("x")),
    overload=(KEY_V2, errors.Overloaded("x")),
    late=(KEY_V2, errors.DeadlineExceeded("x")),
)
def test_other_errors_have_no_fallback(parameters, error):
    """Another variant would fail for the same reason, or has its own work to do."""
    world = answering(CHAIN)
    world.fail("m2", error)

    assert world.send(parameters).outcome == str(error)
    assert world.called == ["m2"]


def test_request_that_kills_processes_kills_two():
    """It may be the cause of a death; further fallbacks are not risked."""
    world = World(CHAIN)
    world.fail("m1", errors.StubDied("x"))
    world.fail("m2", errors.StubDied("x"))

    assert world.send(KEY_V2).outcome == "inference failed: x"
    assert world.called == ["m2", "m1"]


def test_few_possible_causes_go_on():
    """A stream of requests that kill processes does not kill the processes of the fallbacks for long."""
    world = World(replace(CHAIN, breaker=BreakerSettings(open_s=0.01)))
    outcomes = []
    for _ in range(MAX_SUSPECTS + 3):
        world.models["m2"] = lambda: CAT
        world.now += 0.02
        world.send(KEY_V2)  # the process was replaced
        world.fail("m2", errors.StubDied("x"))
        outcomes.append(isinstance(world.send(KEY_V2).outcome, tuple))
    assert outcomes == [True] * MAX_SUSPECTS + [False] * 3


def test_queue_of_a_dead_process_goes_on():
    """Triton answers requests in the queue of a dead process late; the route does not wait for that."""
    world = World(PATIENT)
    request, finish = world.hang_v2(KEY_V2)
    world.fail("m2", errors.StubDied("x"))
    world.send(KEY_V2)

    world.now += 1.0
    world.router.expire()
    assert request.outcome == ("v1", "11", "retry")
    world.now += 60.0
    finish()
    assert request.outcome == ("v1", "11", "retry")


def test_repeated_request_waits_briefly():
    """The replacement of a dead process may only be starting, and the queue is still that of the dead one."""
    world = World(PATIENT)
    world.replaced.add("m2_0_0")
    reached, release = threading.Event(), threading.Event()

    def wait() -> np.ndarray:
        world.models["m2"] = wait_longer
        raise dead()

    def wait_longer() -> np.ndarray:
        reached.set()
        assert release.wait(60)
        raise dead()

    world.models["m2"] = wait
    request = SlowlyChecked(world, KEY_V2)
    thread = threading.Thread(target=world.router.handle, args=(world.router.admit(request),))
    thread.start()
    assert reached.wait(60)
    world.now += 1.0
    world.router.expire()
    # Longer than a death counts.
    world.now += 11.0
    release.set()
    thread.join()

    assert request.outcome == ("v1", "11", "retry")
    assert world.called == ["m2", "m2", "m1"]


@cases(
    another_process=(KEY_V2, 60.0, ["m2", "m2"]),
    only_the_replacement=(KEY_V2, 0.5, ["m2", "m1"]),
    only_the_replacement_and_no_fallback_may_respond=(TO_V2, 0.5, ["m2", "m2"]),
)
def test_starting_replacement_is_no_other_process(parameters, age_s, called):
    """Requests to it join the queues of the dead processes, and would then have been at two deaths."""
    world = World(CHAIN)
    world.replaced.add("m2_0_0")
    world.age_s = age_s

    def die() -> np.ndarray:
        world.now += 0.6
        world.models["m2"] = lambda: CAT
        raise dead()

    world.models["m2"] = die
    world.send(parameters)

    assert world.called == called


@cases(
    without_fallbacks=(ROUTE, KEY_V2, ("v2", "12", "route-key")),
    with_fallbacks=(CHAIN, KEY_V2, ("v1", "11", "retry")),
    no_fallback_may_respond=(CHAIN, TO_V2, ("v2", "12", "variant")),
)
def test_variant_that_answers_others_is_tried_until_the_deadline(route, parameters, outcome):
    """Its other process answers, although Triton gives this request to the dead one six times."""
    world, deaths = World(route), iter(range(6))
    world.replaced.add("m2_0_0")

    def die() -> np.ndarray:
        world.models["m2"] = lambda: CAT
        world.now += 0.1
        world.send(TO_V2)
        world.models["m2"] = die
        if next(deaths, None) is None:
            return CAT
        raise dead()

    world.fail_once_each("m2", dead())
    world.send(KEY_V2)
    world.now += 1.0
    world.models["m2"] = die

    assert world.send(parameters).outcome == outcome
    assert world.count("breaker_state", variant="v2") == 0


def test_answer_is_the_last_rung():
    world = answering(CHAIN)
    for model in ("m1", "m2", "m3"):
        world.fail(model, errors.Unavailable("x"))

    assert [world.send(KEY_V2).outcome, world.send().outcome] == [("answer", "scores", "")] * 2
    assert fallbacks(world) == {("v2", "answer", "answer"): 1, ("v1", "answer", "answer"): 1}
    assert world.count("requests_total", variant="answer", outcome="ok", reason="answer") == 2

    world.models["m3"] = lambda: CAT
    world.now += 5.0
    assert world.send().outcome == ("v3", "13", "retry")


@cases(
    unknown=({"fallbacks": ["v9"]}, "fallbacks[0] must be one of v2, v3, got 'v9'"),
    twice=({"fallbacks": ["v2", "v2"]}, "fallbacks[1] must be one of v3, got 'v2'"),
    type=({"answer": [0]}, "Expected `object`, got `array`"),
)
def test_wrong_fallbacks_are_refused(changes, message):
    content = document(variant("v1", "m1", 1), variant("v2", "m2"), variant("v3", "m3"))
    with pytest.raises(errors.InvalidConfig, match=re.escape(message)):
        parse_route(json.dumps(content | changes).encode())


def output(name: str, kind: str, *dims: int) -> TensorSpec:
    return TensorSpec(name, kind, dims, dims)


SCORES, LABEL = output("scores", "TYPE_FP32", 3), output("label", "TYPE_INT32", 1)
TEXT, BOX = output("text", "TYPE_STRING", -1), output("box", "TYPE_FP32", -1, 4)


@cases(
    one_value=(0, SCORES, np.zeros(3, np.float32)),
    integer=(-1, LABEL, np.array([-1], np.int32)),
    no_boxes=([], BOX, np.empty((0, 4), np.float32)),
    text=(["später"], TEXT, np.array(["später".encode()], object)),
)
def test_answer_has_the_shape_and_type_of_the_output(value, output, expected):
    answer = read_answer({output.name: value}, [output])[output.name]

    np.testing.assert_array_equal(answer, expected)
    assert (answer.dtype, answer.shape) == (expected.dtype, expected.shape)


@cases(
    text=("x", SCORES),
    ragged=([[1], 2, 3], SCORES),
    too_large=(1e60, SCORES),
    fraction=(1.5, LABEL),
    too_large_an_integer=(2**40, LABEL),
    one_text=("x", TEXT),
    number=([1], TEXT),
    rank=([1, 2, 3, 4], BOX),
)
def test_wrong_answer_is_refused(value, output):
    message = re.escape(f"answer '{output.name}': expected {output.type_and_dims}, got ")

    with pytest.raises(errors.InvalidConfig, match=f"^{message}"):
        read_answer({output.name: value}, [output])


def test_answer_names_all_outputs():
    with pytest.raises(errors.InvalidConfig, match="answer: expected the outputs text, box, got text"):
        read_answer({"text": []}, [TEXT, BOX])
