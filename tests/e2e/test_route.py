"""A route on the real server: variants and reasons, file, limits, deadlines and shadows."""

import hashlib
import json
import time
from itertools import count

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from nereid.routing.assignment import MAX_MIRRORED, assign, parse_route
from tests.proof import REQUESTS
from tests.routes import (
    CLASSES,
    NETWORK,
    ROUTE_OUTPUTS,
    Load,
    answered_by,
    document,
    order,
    publish_config,
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
# Interval at which the server reads the file.
POLL_S = 0.5
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
    # As Kubernetes mounts a ConfigMap: a link to a file in a folder that is a link.
    store_router(repository, "linked", "../config/route.json")
    publish_config(base / "config" / "route.json", document(variant("plain", "one", 1)))
    with serve_routes(repository, base) as running:
        yield running


@pytest.fixture(scope="module")
def last():
    """The route file that `base` wrote last."""
    return {}


@pytest.fixture
def base(served, last):
    """The server whose `route` is BASE."""
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
def test_chance_decides_when_nothing_else_does(base, protocol):
    answers = [base.send("route", protocol) for _ in range(40)]

    # 40 fair draws are all on one side with p < 1e-11.
    assert {answer.origin for answer in answers} == {("plain", "1", "weight"), ("pinned", "2", "weight")}
    assert all(answer.added == ADDED[answer.variant] for answer in answers)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("names", [("route_reason", "scores"), ()], ids="+".join)
def test_only_requested_outputs_are_returned(base, protocol, names):
    response = base.infer("route", protocol, wanted(protocol, *names)).get_response()

    outputs = response["outputs"] if protocol == "http" else response.outputs
    got = {output["name"] if protocol == "http" else output.name for output in outputs}
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
    logged, path = len(base.log), base.path("route")

    if content is None:
        path.unlink()
    else:
        replace(path, content)

    (line,) = wait_until(lambda: base.logged("is refused", logged))
    assert reason in line
    for name, key in KEYS.items():
        assert base.send("route", headers={"x-route-key": key}).variant == name


def test_wrong_file_is_logged_once(base):
    """A reason is logged and counted once, though the file is read repeatedly; the old hash stays."""
    digest = hashlib.sha256(base.path("route").read_bytes()).hexdigest()
    logged = len(base.log)

    replace(base.path("route"), b"{")
    wait_until(lambda: base.logged("is refused", logged))
    time.sleep(5 * POLL_S)  # no event marks the absence of a second line
    assert len(base.logged("is refused", logged)) == 1

    replace(base.path("route"), changed(model="nobody"))
    wait_until(lambda: len(base.logged("is refused", logged)) == 2)
    base.wait_metric(len(base.logged("is refused")), "reloads_total", route="route", outcome="refused")
    assert hashes(base) == [digest]


def hashes(served) -> list[str]:
    shown = served.series("served_since_seconds")
    return [labels["sha256"] for labels, _ in shown if labels["route"] == "route"]


def test_version_that_becomes_ready_is_served_without_a_new_file(base, unique):
    """A route whose model is not loaded is rejected, and accepted once the model is ready."""
    store_adding(base.repository, unique, 7)
    logged, path = len(base.log), base.path("route")
    replace(path, json.dumps(document(variant(unique, unique, 1))).encode())
    wait_until(lambda: base.logged("not ready", logged))
    before = path.stat().st_mtime_ns
    assert base.send("route", headers={"x-variant": "plain"}).added == 1

    base.grpc.load_model(unique)

    wait_until(lambda: base.send("route").origin == (unique, "1", "weight"), timeout_s=10 * VISIBLE_S)
    assert path.stat().st_mtime_ns == before


def test_metrics_show_the_route_that_is_served(base):
    before = hashlib.sha256(base.path("route").read_bytes()).hexdigest()
    wait_until(lambda: hashes(base) == [before])
    accepted = base.metric("reloads_total", route="route", outcome="accepted")

    content = base.use("route", BASE | {"max_in_flight": 33})

    base.wait_metric(content["generation"], "generation", route="route")
    digest = hashlib.sha256(base.path("route").read_bytes()).hexdigest()
    wait_until(lambda: hashes(base) == [digest])
    base.wait_metric(accepted + 1, "reloads_total", route="route", outcome="accepted")


def test_swapped_link_is_read(served):
    """A file behind links, as Kubernetes mounts a ConfigMap, is read again when a link changes."""
    assert served.send("linked").origin == ("plain", "1", "weight")

    publish_config(served.repository.parent / "config" / "route.json", document(variant("other", "ten", 1)))

    wait_until(lambda: served.send("linked").origin == ("other", "1", "weight"), timeout_s=10 * VISIBLE_S)


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


def test_variant_receives_the_remaining_time(puppets, unique):
    """A variant receives the rest of the shorter of its deadline and the request's timeout."""
    puppets.use("route", document(variant(unique, "puppet", 1, deadline_ms=40_000)))
    order(puppets.repository, "puppet", return_timeout=True)

    for timeout, limit in ((None, 40), (20_000_000, 20), (60_000_000, 40)):
        left = puppets.send("route", timeout=timeout).scores[0, 0]
        assert limit / 2 < left <= limit  # half of it is far more than a request takes here


# Shadows


def mirroring(name: str, percent: float, **more) -> dict:
    """Return a route of the network `one`, with the names NAME for the variant and NAMEs for the shadow."""
    shadow = {"name": f"{name}s", "model": "shadow", "version": 1, "percent": percent}
    settings = {"shadow_max_in_flight": MAX_MIRRORED} | more
    shadow |= {key: settings.pop(key) for key in ("model", "version", "deadline_ms") if key in settings}
    return document(variant(name, "one", 1), shadows=[shadow], **settings)


def mirrored(served, name: str, outcome: str = "") -> float:
    return served.metric(
        "shadow_requests_total", shadow=f"{name}s", **({"outcome": outcome} if outcome else {})
    )


@pytest.mark.parametrize(("orders", "outcome"), [({"add": 1.05}, "agreed"), ({"factor": -1}, "disagreed")])
def test_shadow_is_compared_with_the_answer(puppets, unique, orders, outcome):
    order(puppets.repository, "shadow", **orders)
    puppets.use("route", mirroring(unique, 100))

    answers = [puppets.send("route", PROTOCOLS[number % 2]) for number in range(10)]

    assert {(answer.origin, answer.added) for answer in answers} == {((unique, "1", "weight"), 1)}
    puppets.wait_metric(10, "shadow_requests_total", shadow=f"{unique}s", outcome=outcome)
    assert mirrored(puppets, unique) == 10
    puppets.wait_metric(10, "shadow_score_distance_count", shadow=f"{unique}s")
    # x is [0, 5, 1], the answer x + 1: 0.05 away from x + 1.05, and 11 from -x.
    distance = puppets.metric("shadow_score_distance_sum", shadow=f"{unique}s") / 10
    assert distance == pytest.approx(0.05 if outcome == "agreed" else 11, abs=1e-5)
    for kind in ("shadow", "shadowed"):
        puppets.wait_metric(10, f"{kind}_duration_seconds_count", shadow=f"{unique}s")


def answers_of(served, name: str) -> set:
    """Send 20 requests, 4 at a time; returns the distinct responses."""
    pending = together(4, lambda number: [served.send("route", PROTOCOLS[number % 2]) for _ in range(5)])
    answers = {(answer.origin, answer.added) for future in pending for answer in future.result()}
    served.wait_metric(20, "requests_total", variant=name, outcome="ok")
    return answers


@pytest.mark.parametrize("orders", [{"error": "boom"}, {"classes": 2}], ids=["failing", "wrong-shape"])
def test_broken_shadow_never_harms_the_answer(puppets, unique, orders):
    order(puppets.repository, "shadow", **orders)
    puppets.use("route", mirroring(unique, 100))

    assert answers_of(puppets, unique) == {((unique, "1", "weight"), 1)}
    puppets.wait_metric(20, "shadow_requests_total", shadow=f"{unique}s", outcome="failed")
    assert puppets.send("route").origin == (unique, "1", "weight")
    # Otherwise the next test could hold this request instead of its own.
    puppets.wait_metric(21, "shadow_requests_total", shadow=f"{unique}s", outcome="failed")


def test_hanging_shadow_never_delays_the_answer(puppets, unique):
    """While a shadow hangs, every response arrives and is right; the others are shed."""
    order(puppets.repository, "shadow", hold=True)
    puppets.use("route", mirroring(unique, 100))

    assert answers_of(puppets, unique) == {((unique, "1", "weight"), 1)}
    wait_until(lambda: waiting(puppets.repository, "shadow") == MAX_MIRRORED)
    order(puppets.repository, "shadow")
    puppets.wait_metric(MAX_MIRRORED, "shadow_requests_total", shadow=f"{unique}s", outcome="agreed")
    assert mirrored(puppets, unique, "shed") == 20 - MAX_MIRRORED
