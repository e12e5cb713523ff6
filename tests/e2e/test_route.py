"""A route on the real server: reasons, file, limits, deadlines and shadows; variants that fail or die."""

import contextlib
import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from nereid.backends.routing.assignment import MAX_MIRRORED, assign, parse_route
from tests.networks import CLIENTS, arrays_of, client_input
from tests.proof import REQUESTS
from tests.routes import (
    CLASSES,
    NETWORK,
    ROUTE_OUTPUTS,
    Load,
    X,
    answered_by,
    document,
    order,
    replace,
    serve_routes,
    store_adding,
    store_ensemble,
    store_puppet,
    store_router,
    variant,
    wait_until,
    waiting,
)

PROTOCOLS = ["http", "grpc"]
# Limit for a change of the route file to take effect.
# Ten times what an idle machine needs: the file is read twice a second.
VISIBLE_S = 5.0
UNAVAILABLE = {"http": "503", "grpc": "StatusCode.UNAVAILABLE"}
CLOSED = 0
CALLERS = 16
# Limit for moving traffic away from a dead variant.
MOVED_S = 2.0
# `plain` and `pinned` share the traffic; a header or a forced variant selects `ruled`.
RULES = {"x-route-group": ["beta", "staff"], "x-route-region": ["eu"]}
BASE = document(
    variant("plain", "one", 50, version=1),
    variant("pinned", "ensemble", 50),
    variant("ruled", "ten", 0, version=3, headers=RULES),
)
ROUTE = parse_route(json.dumps(BASE).encode())
ADDED = {"plain": 1, "pinned": 2, "ruled": 30}
KEYS = {
    name: next(f"key-{n}" for n in count() if assign(ROUTE, f"key-{n}").name == name)
    for name in ("plain", "pinned")
}
RULED = {"x-route-group": "beta", "x-route-region": "eu"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    base = tmp_path_factory.mktemp("route")
    repository = base / "repository"
    store_adding(
        repository, "one", 1, 2, 3, config=NETWORK + "version_policy { specific { versions: [1, 2] } }\n"
    )
    store_adding(repository, "ten", 10, 20, 30)
    store_ensemble(repository, "ensemble", "one", 2)
    for name in ("puppet", "shadow"):
        store_puppet(repository, name)
    for name, number in {"steady": 1, "victim": 2}.items():
        store_adding(repository, name, number)
    store_router(repository, "route", BASE)
    with serve_routes(repository, base) as running:
        yield running


@pytest.fixture
def base(served):
    served.use("route", BASE)
    return served


@pytest.fixture
def puppets(served):
    """The server whose puppets do nothing but return x after the test."""
    for name in ("puppet", "shadow"):
        order(served.repository, name)
    yield served
    for name in ("puppet", "shadow"):
        order(served.repository, name)


@pytest.fixture
def unique(request):
    """A name that no other test has, for a variant whose metrics start at zero."""
    return "t" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]


@pytest.mark.parametrize("way", ["headers", "parameters"])
def test_route_parameters_are_headers_or_parameters(base, protocol, way):
    below = RULED | {"x-route-key": KEYS["plain"]}
    name = "x-variant" if (protocol, way) == ("grpc", "headers") else "X-Variant"

    answers = [base.send("route", protocol, **{way: below | more}) for more in ({}, {name: "pinned"})]

    outcomes = [(answer.origin, answer.added) for answer in answers]
    assert outcomes == [(("ruled", "3", "header"), 30), (("pinned", "2", "variant"), 2)]


@pytest.mark.parametrize("names", [("route_reason", "scores"), ()], ids="+".join)
def test_every_image_of_a_batch_gets_the_requested_outputs(base, protocol, names):
    rows, words = 8, {"variant": b"ruled", "version": b"3", "route_reason": b"variant"}
    x = np.arange(rows * CLASSES, dtype=np.float32).reshape(rows, CLASSES)

    outputs = [CLIENTS[protocol].InferRequestedOutput(name) for name in names]
    got = arrays_of(base.infer("route", protocol, outputs, x=x, headers={"x-variant": "ruled"}))

    assert {*got} == {*(names or ("scores", *ROUTE_OUTPUTS))}
    np.testing.assert_array_equal(got["scores"], x + 30)
    for name in {*got} - {"scores"}:
        assert got[name].tolist() == [[words[name]]] * rows


def test_wrong_file_changes_nothing_and_is_logged(base):
    logged, path = len(base.log), base.path("route")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    first, *rest = BASE["variants"]

    replace(path, json.dumps(BASE | {"variants": [first | {"version": 3}, *rest]}).encode())

    (line,) = wait_until(lambda: base.logged("is refused", logged))
    assert "'plain' names version 3 of 'one': not ready" in line
    for name, key in KEYS.items():
        assert base.send("route", headers={"x-route-key": key}).variant == name
    base.wait_metric(len(base.logged("is refused")), "reloads_total", route="route", outcome="refused")
    shown = [*base.metrics().sums("nereid_route_served_since_seconds", "sha256", labels={"route": "route"})]
    assert shown == [(digest,)]


def test_load_without_a_valid_route_fails_with_the_reason(served, unique):
    store_router(served.repository, unique)

    with pytest.raises(InferenceServerException, match=f"load failed for model '{unique}'") as failed:
        served.grpc.load_model(unique)

    assert "cannot read" in failed.value.message()
    assert not served.grpc.is_model_ready(unique)


def test_changes_under_load_fail_no_request(served):
    names, waited = list(ADDED), []
    served.use("route", BASE)
    pids, logged = served.stubs("route"), len(served.log)
    with Load(served, "route", 16) as load:
        for number in range(max(REQUESTS // 100, len(names))):
            name = names[number % len(names)]
            weights = [entry | {"weight": int(entry["name"] == name)} for entry in BASE["variants"]]
            begin = time.monotonic()
            replace(served.path("route"), json.dumps(BASE | {"variants": weights}).encode())
            load.wait_for(answered_by(name), 1, begin)
            ends = [outcome.end for outcome in load.begun_after(begin) if answered_by(name)(outcome)]
            waited.append(min(ends) - begin)

    assert [outcome.answer for outcome in load.outcomes if outcome.is_failed] == []
    assert max(waited) <= VISIBLE_S, waited
    assert (served.stubs("route"), served.logged("loading", logged)) == (pids, [])


def test_one_instance_holds_64_requests_and_rejects_the_next(puppets, unique):
    puppets.use("route", document(variant(unique, "puppet", 1), max_in_flight=64))
    labels = {"route": "route", "variant": unique}
    for _ in range(2):
        order(puppets.repository, "puppet", hold=True)
        pool = ThreadPoolExecutor(64)
        pending = [pool.submit(puppets.send, "route", PROTOCOLS[number % 2]) for number in range(64)]
        wait_until(lambda: waiting(puppets.repository, "puppet") == 64, "64 requests at the variant", 20)
        puppets.wait_metric(64, "in_flight", **labels)

        begin = time.monotonic()
        refusals = {protocol: puppets.refusal("route", protocol) for protocol in PROTOCOLS}
        waited = time.monotonic() - begin
        order(puppets.repository, "puppet")

        assert {protocol: status for protocol, (status, _) in refusals.items()} == UNAVAILABLE
        assert all("overloaded: 64 in flight, limit 64" in message for _, message in refusals.values())
        assert waited < 5
        assert {future.result().origin for future in pending} == {(unique, "1", "weight")}
        puppets.wait_metric(0, "in_flight", **labels)
        assert waiting(puppets.repository, "puppet") == 0
    puppets.wait_metric(4, "shed_total", route="route")
    puppets.wait_metric(128, "requests_total", outcome="ok", **labels)


@pytest.mark.parametrize("owner", ["variant", "request"])
def test_late_response_is_an_error_in_time(puppets, unique, protocol, owner):
    more = {"deadline_ms": 300} if owner == "variant" else {}
    sent = {"timeout": 300_000} if owner == "request" else {}
    puppets.use("route", document(variant(unique, "puppet", 1, **more)))
    order(puppets.repository, "puppet", hold=True)

    begin = time.monotonic()
    status, message = puppets.refusal("route", protocol, **sent)
    waited = time.monotonic() - begin

    assert status == UNAVAILABLE[protocol]
    assert "deadline exceeded: " in message
    assert 0.3 <= waited < 10
    assert puppets.metric("late_total", variant=unique) == 0
    order(puppets.repository, "puppet")
    puppets.wait_metric(1, "late_total", variant=unique)
    puppets.wait_metric(0, "in_flight", variant=unique)
    assert puppets.send("route", protocol).origin == (unique, "1", "weight")


@pytest.mark.slow
def test_slots_of_cancelled_requests_are_freed(puppets):
    """Others are admitted while the variant still computes requests whose clients have left."""
    busy = variant("busy", "puppet", 1, deadline_ms=3_600_000)
    route = document(busy, variant("busyd", "steady"), default="busyd", max_in_flight=4)
    puppets.use("route", route)
    order(puppets.repository, "puppet", hold=True)
    x = client_input("grpc", "x", X)
    pending = [puppets.grpc.async_infer("route", [x], lambda result, error: None) for _ in range(4)]
    wait_until(lambda: waiting(puppets.repository, "puppet") == 4)
    to_other = {"headers": {"x-variant": "busyd"}}
    assert puppets.refusal("route", **to_other)[1].startswith("overloaded: 4 in flight")

    for call in pending:
        call.cancel()

    def is_admitted() -> bool:
        with contextlib.suppress(InferenceServerException):
            return puppets.send("route", **to_other).variant == "busyd"
        return False

    wait_until(is_admitted, "a free slot")
    assert waiting(puppets.repository, "puppet") == 4
    order(puppets.repository, "puppet")
    puppets.wait_metric(0, "in_flight", variant="busy")


def test_shadow_is_compared_with_the_answer(puppets, unique):
    """`x` is [0, 5, 1], and the answer x + 1."""
    order(puppets.repository, "shadow", add=1.05)
    shadow = {"name": f"{unique}s", "model": "shadow", "version": 1, "percent": 100}
    route = document(variant(unique, "one", 1), shadows=[shadow], shadow_max_in_flight=MAX_MIRRORED)
    puppets.use("route", route)

    answers = [puppets.send("route", PROTOCOLS[number % 2]) for number in range(10)]

    assert {(answer.origin, answer.added) for answer in answers} == {((unique, "1", "weight"), 1)}
    puppets.wait_metric(10, "shadow_requests_total", shadow=f"{unique}s", outcome="agreed")
    assert puppets.metric("shadow_requests_total", shadow=f"{unique}s") == 10
    for name in ("shadow_score_distance", "shadow_duration_seconds", "shadowed_duration_seconds"):
        puppets.wait_metric(10, f"{name}_count", shadow=f"{unique}s")
    distance = puppets.metric("shadow_score_distance_sum", shadow=f"{unique}s") / 10
    assert distance == pytest.approx(0.05, abs=1e-5)


@pytest.mark.slow
def test_killed_variant_is_replaced_within_two_seconds_and_comes_back(served):
    """Under load a variant's processes are killed: traffic moves to the default, and back after a repair.

    Requests sent before the breaker opened may fail, but soon: Triton 24.10 takes a second per request to see
    that a process is dead, one request after the other.
    """
    variants = variant("dies", "victim", 50), variant("diesd", "steady", 50)
    served.use("route", document(*variants, default="diesd", breaker={"open_s": 1}))
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


@pytest.mark.slow
def test_tracing_does_not_end_the_server(tmp_path):
    """Triton 24.10 ends with SIGSEGV if a request is forwarded with its trace; the route drops the trace."""
    repository = tmp_path / "repository"
    store_adding(repository, "steady", 1)
    store_adding(repository, "other", 2)
    shadow = {"name": "dark", "model": "other", "version": 1, "percent": 100}
    store_router(repository, "route", document(variant("steady", "steady", 1), shadows=[shadow]))
    tracing = ["mode=triton", "rate=1", "level=TIMESTAMPS", f"triton,file={tmp_path / 'trace.json'}"]
    with serve_routes(repository, tmp_path, *(f"--trace-config={setting}" for setting in tracing)) as running:
        for number in range(20):
            assert running.send("route", PROTOCOLS[number % 2]).origin == ("steady", "1", "weight")
        running.wait_metric(20, "shadow_requests_total")


@pytest.mark.slow
def test_instances_of_a_route_have_their_own_series(served):
    store_router(served.repository, "twice", document(variant("steady", "steady", 1), generation=7))
    config = served.repository / "twice" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 1", "count: 2"))
    served.grpc.load_model("twice")
    for number in range(20):
        served.send("twice", PROTOCOLS[number % 2])

    served.wait_metric(20, "requests_total", route="twice", outcome="ok")
    shown = served.metrics().sums("nereid_route_generation", "model_instance", labels={"route": "twice"})
    assert shown == {("twice_0_0",): 7, ("twice_0_1",): 7}
