"""A route on the real server: variants and reasons, file, limits, deadlines and shadows."""

import hashlib
import json
import time
from itertools import count

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from nereid.routing.assignment import MAX_MIRRORED, assign, parse_route
from tests.networks import arrays_of
from tests.proof import REQUESTS
from tests.routes import (
    CLASSES,
    NETWORK,
    ROUTE_OUTPUTS,
    Load,
    answered_by,
    document,
    order,
    replace,
    serve_routes,
    store_adding,
    store_ensemble,
    store_puppet,
    store_router,
    together,
    variant,
    wait_until,
    waiting,
    wanted,
)
from tests.tables import cases

PROTOCOLS = ["http", "grpc"]
# Limit for a change of the route file to take effect.
# Ten times what an idle machine needs: the file is read twice a second.
VISIBLE_S = 5.0
UNAVAILABLE = {"http": "503", "grpc": "StatusCode.UNAVAILABLE"}
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
    store_router(repository, "route")
    replace(repository / "route.route.json", json.dumps(BASE).encode())
    with serve_routes(repository, base) as running:
        yield running


@pytest.fixture(scope="module")
def last():
    return {}


@pytest.fixture
def base(served, last):
    path = served.path("route")
    if not path.exists() or path.read_bytes() != last.get("file"):
        served.use("route", BASE)
        last["file"] = path.read_bytes()
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


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("way", ["headers", "parameters"])
def test_route_parameters_are_headers_or_parameters(base, protocol, way):
    """A rule of headers beats a sticky key, and a named variant beats both; HTTP headers have no case."""
    below = RULED | {"x-route-key": KEYS["plain"]}
    name = "x-variant" if (protocol, way) == ("grpc", "headers") else "X-Variant"

    answers = [base.send("route", protocol, **{way: below | more}) for more in ({}, {name: "pinned"})]

    found = [(answer.origin, answer.added) for answer in answers]
    assert found == [(("ruled", "3", "header"), 30), (("pinned", "2", "variant"), 2)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("names", [("route_reason", "scores"), ()], ids="+".join)
def test_only_requested_outputs_are_returned(base, protocol, names):
    got = arrays_of(base.infer("route", protocol, wanted(protocol, *names))).keys()

    assert got == {*names} or ({"scores", *ROUTE_OUTPUTS} if not names else set())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("rows", [1, 8])
def test_every_image_of_a_batch_gets_the_variants_name(base, protocol, rows):
    x = np.arange(rows * CLASSES, dtype=np.float32).reshape(rows, CLASSES)

    result = base.infer("route", protocol, x=x, headers={"x-variant": "ruled"})

    np.testing.assert_array_equal(result.as_numpy("scores"), x + 30)
    found = {name: result.as_numpy(name).tolist() for name in ROUTE_OUTPUTS}
    words = {"variant": b"ruled", "version": b"3", "route_reason": b"variant"}
    assert found == {name: [[word]] * rows for name, word in words.items()}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_classification_works_through_the_route(base, protocol):
    outputs = [*wanted(protocol, "scores", class_count=2), *wanted(protocol, "variant")]

    result = base.infer("route", protocol, outputs, headers={"x-variant": "plain"})

    best = [entry.decode().split(":")[1:] for entry in result.as_numpy("scores").ravel()]
    assert best == [["1", "middle"], ["2", "right"]]
    assert result.as_numpy("variant").tolist() == [[b"plain"]]


# The route file


def changed(**fields) -> bytes:
    first, *rest = BASE["variants"]
    return json.dumps(BASE | {"variants": [first | fields, *rest]}).encode()


@cases(
    ("content", "reason"),
    {
        "version-not-ready": (changed(version=3), "'plain' names version 3 of 'one': not ready"),
        "no-json": (b"weights: none", "JSON"),
        "removed": (None, "No such file"),
    },
)
def test_wrong_file_changes_nothing_and_is_logged(base, content, reason):
    """The metrics still have the hash of the route that is served, and count the refusal."""
    logged, path = len(base.log), base.path("route")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()

    if content is None:
        path.unlink()
    else:
        replace(path, content)

    (line,) = wait_until(lambda: base.logged("is refused", logged))
    assert reason in line
    for name, key in KEYS.items():
        assert base.send("route", headers={"x-route-key": key}).variant == name
    base.wait_metric(len(base.logged("is refused")), "reloads_total", route="route", outcome="refused")
    shown = [each["sha256"] for each, _ in base.series("served_since_seconds") if each["route"] == "route"]
    assert shown == [digest]


@cases(
    ("content", "reason"),
    {"missing": (None, "cannot read"), "unknown-model": (changed(model="nobody"), "nobody")},
)
def test_load_without_a_valid_route_fails_with_the_reason(served, unique, content, reason):
    store_router(served.repository, unique)
    if content is not None:
        replace(served.path(unique), content)

    with pytest.raises(InferenceServerException, match=f"load failed for model '{unique}'") as failed:
        served.grpc.load_model(unique)

    assert reason in failed.value.message()
    assert not served.grpc.is_model_ready(unique)


def test_changes_under_load_fail_no_request(served):
    names, waited = list(ADDED), []
    served.use("route", BASE)
    pids, logged = served.stubs("route"), len(served.log)
    with Load(served, "route", 16) as load:
        for number in range(max(REQUESTS // 100, len(names))):
            name = names[number % len(names)]
            weights = [each | {"weight": int(each["name"] == name)} for each in BASE["variants"]]
            begin = time.monotonic()
            replace(served.path("route"), json.dumps(BASE | {"variants": weights}).encode())
            load.wait_for(answered_by(name), 1, begin)
            ends = [outcome.end for outcome in load.begun_after(begin) if answered_by(name)(outcome)]
            waited.append(min(ends) - begin)

    assert [outcome.answer for outcome in load.outcomes if outcome.is_failed] == []
    assert max(waited) <= VISIBLE_S, waited
    assert (served.stubs("route"), served.logged("loading", logged)) == (pids, [])


# Limits and deadlines


def test_one_instance_holds_64_requests_and_rejects_the_next(puppets, unique):
    puppets.use("route", document(variant(unique, "puppet", 1), max_in_flight=64))
    labels = {"route": "route", "variant": unique}
    for _ in range(2):
        order(puppets.repository, "puppet", hold=True)
        pending = together(64, lambda number: puppets.send("route", PROTOCOLS[number % 2]))
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


@pytest.mark.parametrize("protocol", PROTOCOLS)
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


# Shadows


@cases(
    ("orders", "outcome", "distance"),
    {
        # x is [0, 5, 1], the answer x + 1: 0.05 away from x + 1.05, and 11 from -x.
        "near": ({"add": 1.05}, "agreed", 0.05),
        "far": ({"factor": -1}, "disagreed", 11),
        "broken": ({"error": "boom"}, "failed", None),
    },
)
def test_shadow_is_compared_with_the_answer(puppets, unique, orders, outcome, distance):
    """The answer itself is that of the variant, whatever the shadow does."""
    order(puppets.repository, "shadow", **orders)
    shadow = {"name": f"{unique}s", "model": "shadow", "version": 1, "percent": 100}
    route = document(variant(unique, "one", 1), shadows=[shadow], shadow_max_in_flight=MAX_MIRRORED)
    puppets.use("route", route)

    answers = [puppets.send("route", PROTOCOLS[number % 2]) for number in range(10)]

    assert {(answer.origin, answer.added) for answer in answers} == {((unique, "1", "weight"), 1)}
    puppets.wait_metric(10, "shadow_requests_total", shadow=f"{unique}s", outcome=outcome)
    assert puppets.metric("shadow_requests_total", shadow=f"{unique}s") == 10
    if distance is not None:
        for name in ("shadow_score_distance", "shadow_duration_seconds", "shadowed_duration_seconds"):
            puppets.wait_metric(10, f"{name}_count", shadow=f"{unique}s")
        found = puppets.metric("shadow_score_distance_sum", shadow=f"{unique}s") / 10
        assert found == pytest.approx(distance, abs=1e-5)
