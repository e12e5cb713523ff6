"""Traces on the real server: one connected tree for each request, received over OTLP."""

import json
import random
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from nereid.base.assets import COFFEE, PARCEL_LABEL, REPOSITORY, TEXT_REPOSITORY
from nereid.base.tracing.collector import HOLD_S
from nereid.server.model_control import ModelControl
from nereid.tasks.classify.client import Classifier
from tests.otlp import receiving, root_of
from tests.routes import WATCHDOG_S, document, replace, variant, wait_until
from tests.supervised import gateway_of, serving

ROUTE, ATTEMPT, PINNED = "route classify", "attempt v1", "classify_v1"
STAGES = {"cpu": {PINNED: ["decode", "resize", "network"]}}
STAGES["ensemble"] = {"imagenet_preprocess": ["decode", "resize"], "efficientnet_lite0": ["network"]}
NETWORKS = ("text_detect", "text_direction", "text_recognise")
READING_STAGES = ("decode", "barcodes", "detect", "boxes", "crops", "direction", "recognise")
SHADOW = {"name": "s", "model": "classify_v2", "version": 1, "percent": 100, "deadline_ms": 5000}
SLOW_MS = 100_000
PHOTO, JPEG = COFFEE.read_bytes(), {"content-type": "image/jpeg"}
# The body is the image, without JSON.
BINARY = {"Inference-Header-Content-Length": "0"}


class Traced:
    """A served repository whose route has a shadow, a gateway of it, and the spans of both."""

    def __init__(self, served, ports, receiver, profile) -> None:
        self.served, self.ports, self.receiver, self.profile = served, ports, receiver, profile

    def post(self, path, body, headers, port="gateway"):
        trace, span = f"{random.getrandbits(128):032x}", f"{random.getrandbits(64):016x}"
        sent = {"traceparent": f"00-{trace}-{span}-01", **headers}
        where = self.ports["http"] if port == "gateway" else self.served.ports[port]
        address, method = f"http://127.0.0.1:{where}{path}", "POST" if body else "GET"
        answer = httpx.request(method, address, content=body, headers=sent, timeout=WATCHDOG_S)
        return answer.status_code, answer.content, trace, span

    def tree(self, trace, span, *names):
        spans = self.receiver.wait_for(trace, *names)
        root_of(spans, span)
        return {node.name: node for node in spans}

    def names(self, gateway="", attempts=(ATTEMPT,)):
        stages = STAGES[self.profile]
        outer = [gateway, "receive", "admission", "inference"] if gateway else []
        return [*outer, ROUTE, *attempts, *stages, *(name for names in stages.values() for name in names)]


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("ensemble", marks=pytest.mark.nightly(minutes=2))]
)
def traced(request, tmp_path_factory):
    """A served copy of the default repository, in each shape, and its gateway; nothing is sampled."""
    folder = tmp_path_factory.mktemp(request.param)
    repository = shutil.copytree(REPOSITORY, folder / "models")
    rule = {"x-route-test": ["retry"]}
    variants = variant("v1", "classify_v1", 1), variant("v2", "classify_v2", headers=rule)
    route = document(*variants, shadows=[SHADOW])
    replace(repository / "classify.route.json", json.dumps(route).encode())
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=shop")
        receiver = stack.enter_context(receiving())
        words = "--otlp", receiver.endpoint, "--trace-share", "0", "--objective-ms", str(SLOW_MS)
        served = stack.enter_context(
            serving(repository, folder / "run", *words, "--profile", request.param, "--access-log")
        )
        ports = stack.enter_context(gateway_of(served, folder / "run" / "gateway.log", "--grpc-port", "0"))
        yield Traced(served, ports, receiver, request.param)


@pytest.mark.nightly(minutes=2)
@pytest.mark.parametrize("port", ["gateway", "http"])
def test_v2_request_is_one_tree(traced, port):
    status, _, *ids = traced.post("/v2/models/classify/infer", PHOTO, BINARY, port)

    assert status == 200
    gateway_name = "gateway /v2/models/{model}/infer" if port == "gateway" else ""
    spans = traced.tree(*ids, *traced.names(gateway_name))
    route = spans[ROUTE].attributes
    attributes = [route[f"nereid.{name}"] for name in ("variant", "outcome", "reason")]
    assert attributes == ["v1", "ok", "weight"]
    decode = spans["decode"].attributes
    assert (decode["nereid.format"], decode["nereid.width"], decode["nereid.height"]) == ("JPEG", 600, 400)
    assert decode["nereid.bytes"] == len(PHOTO)
    for model in STAGES[traced.profile]:
        attributes = spans[model].attributes
        assert (attributes["nereid.batch_size"], attributes["nereid.device"]) == (1, "CPU")
        assert attributes["nereid.queue_ms"] >= 0
    assert spans["network"].begin_ns >= spans["decode"].end_ns
    assert "shop-gateway" in {span.service for span in spans.values()} or port == "http"


@pytest.mark.parametrize("port", ["gateway", "http"])
def test_grpc_request_is_one_tree(traced, port):
    where = traced.ports["grpc"] if port == "gateway" else traced.served.ports["grpc"]
    trace, span = f"{random.getrandbits(128):032x}", "b" * 16
    with Classifier(f"127.0.0.1:{where}", "grpc", "classify") as classifier:
        classifier.classify(COFFEE, headers={"traceparent": f"00-{trace}-{span}-01"})

    traced.tree(trace, span, *traced.names("gateway ModelInfer" if port == "gateway" else ""))


def test_rest_request_is_one_tree_and_its_shadow_a_linked_one(traced):
    status, _, trace, span = traced.post("/predict", PHOTO, JPEG)

    assert status == 200
    spans = traced.tree(trace, span, *traced.names("gateway /predict"))
    assert spans[ROUTE].parent == spans["inference"].span
    link = (trace, spans[ROUTE].span)
    (shadow,) = wait_until(lambda: [span for span in traced.receiver.spans if link in span.links], "a shadow")
    assert shadow.trace != trace
    assert root_of(traced.receiver.wait_for(shadow.trace, "shadow s", "network")) == shadow


@pytest.mark.nightly(minutes=2)
def test_bad_image_is_an_error_in_one_tree(traced):
    status, _, *ids = traced.post("/predict", b"not an image", JPEG)

    assert status == 400
    first = next(iter(STAGES[traced.profile]))
    spans = traced.tree(*ids, "gateway /predict", ROUTE, ATTEMPT, first, "decode")
    failed = {name for name, span in spans.items() if span.is_error}
    assert failed == {"gateway /predict", ROUTE, ATTEMPT, first}


@pytest.mark.nightly(minutes=2)
def test_retry_is_a_second_attempt(traced):
    model_control = ModelControl(traced.served.server_info)
    model_control.unload("classify_v2")
    try:
        status, body, *ids = traced.post("/predict", PHOTO, JPEG | {"x-route-test": "retry"})
    finally:
        model_control.load("classify_v2")

    assert status == 200, body
    spans = traced.tree(*ids, *traced.names("gateway /predict", ("attempt v2", ATTEMPT)))
    assert (spans["attempt v2"].is_error, spans[ATTEMPT].is_error) == (True, False)
    assert spans[ROUTE].attributes["nereid.reason"] == "retry"


@pytest.mark.nightly(minutes=2)
def test_unsampled_requests_are_kept_only_for_a_reason(traced):
    before = len(traced.receiver.spans)
    headers = JPEG | {"traceparent": ""}
    traced.post("/predict", PHOTO, headers)
    traced.post("/predict?variant=v1", PHOTO, headers)
    traced.post("/predict", b"damaged", headers)

    def roots():
        return [span for span in traced.receiver.spans[before:] if span.name == "gateway /predict"]

    wait_until(lambda: len(roots()) >= 2, "two traces")
    attributes = [(span.is_error, span.attributes.get("nereid.outcome")) for span in roots()]
    assert sorted(attributes) == [(False, "ok"), (True, "invalid_image")]
    for root in roots():
        assert root_of(traced.receiver.of(root.trace)) == root


def test_line_of_a_request_has_its_stages_and_no_secret(traced):
    secret, name = "a-secret-key-of-somebody", 'x"\\n{"forged":1}'
    headers = JPEG | {"x-request-id": name, "cookie": secret}
    _, _, trace, _ = traced.post("/predict", PHOTO, headers)

    line = traced.served.access_line(trace)
    assert (line["request_id"], line["variant"], line["outcome"]) == (name, "v1", "ok")
    stages = {name for names in STAGES[traced.profile].values() for name in names}
    assert {"receive", "admission", "transport", "route", "queue", "response", *stages} <= {
        *line["stages_ms"]
    }
    assert sum(line["stages_ms"].values()) <= line["ms"] * 1.01
    assert line["images"] == [{"format": "JPEG", "bytes": len(PHOTO), "width": 600, "height": 400}]
    assert secret not in traced.served.log


@pytest.mark.nightly(minutes=2)
def test_probes_of_gateway_and_supervisor_are_neither_traffic_nor_traces(traced):
    probes, requests = (f"nereid_route_{name}_total" for name in ("probes", "requests"))
    time.sleep(2 * HOLD_S)  # the lines of earlier requests
    lines = len(traced.served.access_lines)
    count = traced.served.triton_metric
    before = count(requests), count(probes)

    assert traced.post("/readyz", None, {"traceparent": ""})[0] == 200
    wait_until(lambda: count(probes) >= before[1] + 2, "two probes")

    assert count(requests) == before[0]
    time.sleep(2 * HOLD_S)
    assert len(traced.served.access_lines) == lines


def test_damaged_headers_fail_only_their_own_request(traced):
    if traced.profile != "cpu":
        pytest.skip("the models of an ensemble are not called directly")
    path = f"/v2/models/{PINNED}/infer"

    def send(number):
        bad = {"x-route-foo": b"\xff\xfe"} if number % 4 == 0 else {}
        return number % 4 == 0, traced.post(path, PHOTO, BINARY | bad, "http")[0]

    with ThreadPoolExecutor(8) as pool:
        outcomes = [*pool.map(send, range(48))]

    assert {status for is_bad, status in outcomes if not is_bad} == {200}
    assert {status for is_bad, status in outcomes if is_bad} == {400}


def test_requests_that_end_early_have_lines(traced):
    direct = f"/v2/models/{next(iter(STAGES[traced.profile]))}/infer"

    of_model = traced.served.access_line(traced.post(direct, PHOTO, BINARY)[2])
    of_gateway = traced.served.access_line(traced.post("/predict", b"x", {"content-type": "text/plain"})[2])

    assert ("decode" in of_model["stages_ms"], of_gateway["name"].startswith("gateway")) == (True, True)


@pytest.mark.nightly(minutes=2)
def test_why_explains_recorded_requests(traced):
    trace = traced.post("/predict", PHOTO, JPEG | {"x-request-id": "look-at-me"})[2]
    traced.served.access_line(trace)

    summary = json.loads(traced.served.run("why", "--since", "1h", "--json").stdout)
    one = json.loads(traced.served.run("why", "--request", "look-at-me", "--json").stdout)

    lines = [line for line in traced.served.access_lines if line.get("route") == "classify"]
    assert summary["requests"] >= len(lines)
    bad = sum(line["outcome"] == "invalid_image" for line in lines)
    assert summary["outcomes"].get("invalid_image", 0) == bad
    assert 0 < summary["p50_ms"] <= summary["p99_ms"]
    assert "network" in summary["slow_ms"]
    assert summary["contention"]["cores"] >= 1
    assert (one["trace_id"], one["label"]) == (trace, "espresso")
    assert 0.9 < one["confidence"] <= 1
    assert "cause:" in traced.served.run("why", "--since", "1h").stdout
    assert "network" in traced.served.run("why", "--request", trace).stdout


@pytest.mark.slow
def test_networks_of_a_reader_are_in_its_trace(tmp_path):
    """The networks of a reader are models of the server: their spans are below its own."""
    pytest.importorskip("cv2", reason="opencv is not installed: extra text")
    repository = shutil.copytree(TEXT_REPOSITORY, tmp_path / "models")
    trace, caller = f"{random.getrandbits(128):032x}", "b" * 16
    headers = {"traceparent": f"00-{trace}-{caller}-01", "Inference-Header-Content-Length": "0"}
    with receiving() as receiver:
        words = "--otlp", receiver.endpoint, "--trace-share", "0", "--access-log", "--profile", "ensemble"
        with serving(repository, tmp_path / "run", *words) as served:
            address = f"http://127.0.0.1:{served.ports['http']}/v2/models/read_text/infer"
            image = PARCEL_LABEL.read_bytes()
            answer = httpx.post(address, content=image, headers=headers, timeout=WATCHDOG_S)
            assert answer.status_code == 200
            names = ("route read_text", "attempt v1", "read_text_v1", *READING_STAGES, *NETWORKS)
            spans = receiver.wait_for(trace, *names)
            line = served.access_line(trace)

    root_of(spans, caller)
    (reader,) = (span for span in spans if span.name == "read_text_v1")
    networks = [span for span in spans if span.name in NETWORKS]
    assert {span.parent for span in networks} == {reader.span}
    assert all(reader.begin_ns <= span.begin_ns <= span.end_ns <= reader.end_ns for span in networks)
    assert all(span.attributes["nereid.queue_ms"] >= 0 for span in networks)
    assert Counter(span.name for span in spans)["network"] == len(networks)
    assert line["name"] == "route read_text"
    assert {*READING_STAGES} <= {*line["stages_ms"]}
    assert sum(line["stages_ms"].values()) == pytest.approx(line["ms"], rel=0.01)
