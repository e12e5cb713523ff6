"""The gateway in front of a fake upstream: statuses, limits, keys, headers."""

import asyncio
import base64
import gc
import json
import logging
import re
import threading
import weakref
from typing import Any

import httpx
import pytest
from PIL import Image

from nereid.base.task_registry import DEFAULT_TASK, TASKS
from nereid.client import client_errors as errors
from nereid.gateway.admission import MAX_WAITING_PER_SLOT, Admission
from nereid.gateway.failures import STATUS_BY_CODE, Failure
from nereid.gateway.http.app import create_app, create_gateway
from nereid.gateway.http.operations import OPERATIONS
from nereid.gateway.keys import EXPOSED_WITHOUT_KEYS, KeyRing
from nereid.gateway.models import Models
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.state import Gateway
from tests.gateways import (
    IMAGE,
    NO_KEYS,
    RING,
    SMALL,
    WATCHDOG_S,
    Caller,
    Control,
    Ring,
    Source,
    Upstream,
    Upstreams,
    asynchronous,
    gateway,
    key,
    send,
    until,
)
from tests.pictures import save
from tests.tables import cases, rows

JSON_IMAGE = {"image": base64.b64encode(IMAGE).decode()}
JPEG = {"content-type": "image/jpeg"}


def code(answer) -> tuple[int, str]:
    body = answer.json()
    assert {*body} == {"error", "request_id"}
    assert body["request_id"] == answer.headers["x-request-id"]
    assert answer.status_code == STATUS_BY_CODE[body["error"]["code"]]
    return answer.status_code, body["error"]["code"]


@cases(
    "body",
    image={"content": IMAGE, "headers": JPEG},
    no_type={"content": IMAGE},
    octets={"content": IMAGE, "headers": {"content-type": "application/octet-stream"}},
    curl={"content": IMAGE, "headers": {"content-type": "application/x-www-form-urlencoded"}},
    form={"files": {"file": ("cup.jpg", IMAGE)}},
    json={"json": JSON_IMAGE},
)
def test_image_is_forwarded_unchanged(body):
    upstream = Upstream()

    answer = send(gateway(upstream), "POST", "/predict?top_k=2", **body)

    assert answer.status_code == 200, answer.text
    document = answer.json()
    classes = [(prediction["label"], prediction["index"]) for prediction in document["predictions"]]
    assert classes == [("espresso", 967), ("cup", 968)]
    assert (document["variant"], document["version"], document["reason"]) == ("v1", "1", "weight")
    assert {*document["timings_ms"]} == {"receive", "admission", "inference", "total"}
    ((image, sent, _),) = upstream.received
    assert (image, sent["id"]) == (IMAGE, document["request_id"])
    assert {"name": "scores", "parameters": {"binary_data": True, "classification": 2}} in sent["outputs"]


WIDE_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\2\0\0\0\0\1" + bytes(9) + b"\0\0\0\0IDAT"


@rows(
    ({"content": b""}, "invalid_image"),
    ({"content": WIDE_PNG}, "invalid_image"),
    ({"files": {"file": bytes(1001)}}, "too_large"),
    ({"files": [("file", IMAGE), ("file", IMAGE)]}, "invalid_request"),
    ({"content": IMAGE, "headers": {"content-type": "multipart/form-data"}}, "invalid_request"),
    ({"json": {"image": "not base64!"}}, "invalid_request"),
    ({"json": {"image": "aGk=", "top_k": 3}}, "invalid_request"),
    ({"content": IMAGE, "headers": {"content-type": "text/plain"}}, "unsupported_media_type"),
    ({"content": IMAGE, "headers": {"content-encoding": "gzip"}}, "unsupported_media_type"),
    ({"content": IMAGE, "params": {"top_k": "0"}}, "invalid_request"),
    ({"content": IMAGE, "params": {"top_k": "1001"}}, "invalid_request"),
    ({"content": IMAGE, "params": {"variant": "v1"}, "headers": {"x-variant": "v2"}}, "invalid_request"),
    ({"content": IMAGE, "params": {"route_key": "ä"}}, "invalid_request"),
    ({"content": IMAGE, "headers": {"x-route-a!": "b"}}, "invalid_request"),
    ({"content": IMAGE, "headers": {"x-route-a-bin": "b"}}, "invalid_request"),
    ({"content": IMAGE, "headers": {"x-request-timeout-ms": "0"}}, "invalid_request"),
    ({"content": IMAGE, "headers": {"x-request-timeout-ms": "60001"}}, "invalid_request"),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_request_is_rejected_with_its_code(request_, expected):
    upstream = Upstream()

    assert code(send(gateway(upstream), "POST", "/predict", **request_))[1] == expected
    assert upstream.received == []


def test_chunked_body_is_cut_at_the_limit():
    async def chunks():
        for _ in range(100):
            yield bytes(100)

    made = gateway(Upstream())

    for _ in range(5):
        assert code(send(made, "POST", "/predict", content=chunks())) == (413, "too_large")


@cases(
    image=(errors.RequestRefused("in ensemble 'x', invalid image: no JPEG"), "invalid_image", "no JPEG"),
    request=(errors.RequestRefused("invalid request: no variant 'v9'"), "invalid_request", "no variant 'v9'"),
    model=(errors.RequestRefused("Request for unknown model at 10.0.0.7"), "unavailable", "not served"),
    overloaded=(errors.Overloaded("overloaded: 64"), "overloaded", "retry later"),
    late=(errors.TimedOut("10.0.0.7:8001: no answer"), "deadline_exceeded", "within 10 s"),
    unavailable=(errors.Unavailable("unavailable: v1"), "unavailable", "not served"),
    unreachable=(errors.Unreachable("10.0.0.7:8001: refused"), "unreachable", "cannot be reached"),
    failed=(errors.ServerFailed("inference failed: region_17"), "inference_failed", "server failed"),
    fault_of_the_gateway=(KeyError("oops"), "inference_failed", "the gateway failed"),
)
def test_failure_has_its_status_and_hides_internals(error, expected, message, caplog):
    answer = send(gateway(Upstream(error)), "POST", "/predict", content=IMAGE)

    status, error_code = code(answer)
    assert error_code == expected
    assert message in answer.json()["error"]["message"]
    assert not re.search(r"10\.0|region|ensemble|oops", answer.text)
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert isinstance(error, errors.NereidError) or str(error) in caplog.text


def test_batch_fails_image_by_image():
    body = {"images": [{"id": "a", **JSON_IMAGE}, {"image": ""}, {"id": 7, **JSON_IMAGE}], "variant": "v1"}
    upstream = Upstream()

    results = send(gateway(upstream), "POST", "/v1/classify", json=body).json()["results"]

    assert [result["id"] for result in results] == ["a", 1, 7]
    assert [result.get("error", {}).get("code") for result in results] == [None, "invalid_image", None]
    assert [headers["x-variant"] for *_, headers in upstream.received] == ["v1", "v1"]
    answer = send(gateway(upstream), "POST", "/v1/classify", files=[("file", IMAGE)] * 3)
    assert len(answer.json()["results"]) == 3
    answer = send(gateway(upstream), "POST", "/v1/classify", files=[("file", IMAGE)] * 4)
    assert code(answer) == (400, "invalid_request")


def test_only_headers_of_the_route_are_forwarded(caplog):
    """The line in the log names the key, and has no secret."""
    caplog.set_level(logging.INFO, "nereid.gateway")
    upstream = Upstream()
    trace = f"{'a' * 32}-{'b' * 16}"
    route = {"x-variant": "v2", "x-model-version": "2", "x-route-key": "me", "x-route-group": "beta"}
    more = {"nereid-probe": "1", "x-api-key": "infer", "x-request-id": "mine"}
    more["traceparent"] = f"00-{trace}-01"

    answer = send(gateway(upstream, keys=RING), "POST", "/predict", content=IMAGE, headers=route | more)

    ((*_, sent),) = upstream.received
    assert route.items() <= sent.items()
    assert {*sent} == {*route, "traceparent", "content-type", "inference-header-content-length"}
    spans = {trace, answer.headers["traceparent"][3:-3], sent["traceparent"][3:-3]}
    assert len(spans) == 3  # the caller's, the gateway's, and that of the inference
    for traceparent in (answer.headers["traceparent"], sent["traceparent"]):
        assert re.fullmatch(rf"00-{'a' * 32}-[0-9a-f]{{16}}-01", traceparent)
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "mine"
    (line,) = (json.loads(record.message) for record in caplog.records)
    values = [line[name] for name in ("path", "status", "outcome", "key_id")]
    assert values == ["/predict", 200, "ok", "id-infer"]


@pytest.mark.parametrize("request_id", ["x" * 129, "ä", ""])
def test_bad_ids_are_replaced(request_id):
    headers = {"x-request-id": request_id.encode(), "traceparent": f"00-{'0' * 32}-{'b' * 16}-01"}

    answer = send(gateway(Upstream()), "GET", "/healthz", headers=headers)

    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", answer.headers["traceparent"])


@rows(
    (None, {"/v1/live": 401, "/metrics": 401, "/v1/access": 200, "/healthz": 200, "/readyz": 200}),
    ("wrong", {"/v1/live": 401, "/metrics": 401, "/v1/access": 401}),
    ("infer", {"/v1/live": 200, "/metrics": 200, "/v1/route": 200}),
    ("route", {"/v1/live": 403, "/metrics": 200}),
    ("admin", {"/v1/live": 200, "/metrics": 200}),
)
def test_key_grants_its_scopes(secret, expected):
    made = gateway(Upstream(), GatewaySettings(keys_needed=True), keys=RING, route=Control())

    for headers in ({"authorization": f"Bearer {secret}"}, {"x-api-key": f"{secret}"}):
        answers = {path: send(made, "GET", path, headers=headers if secret else {}) for path in expected}
        assert {path: answer.status_code for path, answer in answers.items()} == expected
    if secret is None:
        assert answers["/v1/live"].headers["www-authenticate"] == "Bearer"
        assert answers["/v1/access"].json() == {"keys_needed": True, "name": None, "scopes": []}


def test_gateway_without_keys_stays_on_loopback():
    with pytest.raises(ValueError, match=re.escape(EXPOSED_WITHOUT_KEYS)):
        create_gateway(GatewaySettings(host="0.0.0.0"), KeyRing(), Source())

    assert create_gateway(GatewaySettings(host="::1"), KeyRing(), Source())
    assert create_gateway(GatewaySettings(host="0.0.0.0"), RING, Source())


@pytest.mark.parametrize(
    "wrong",
    [{"max_in_flight": 0}, {"default_timeout_s": 61.0}, {"cors_origins": ("*",)}, {"rate_per_s": -1.0}],
    ids=str,
)
def test_invalid_settings_are_rejected(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).partition("_")[0].replace("cors", "CORS")):
        GatewaySettings(**wrong)


@pytest.mark.parametrize("secret", [None, "infer", "route", "wrong"])
def test_on_loopback_a_key_only_adds_permissions(secret):
    made = gateway(Upstream(), keys=RING, route=Control())
    headers = {"x-api-key": secret} if secret else {}

    answers = [send(made, "GET", path, headers=headers).status_code for path in ("/v1/live", "/metrics")]
    assert answers == [401 if secret == "wrong" else 200] * 2
    changed = send(made, "PUT", "/v1/route/weights", json={"weights": {"v1": 1, "v2": 1}}, headers=headers)
    assert changed.status_code == {"route": 200, "infer": 403}.get(secret, 401)
    if secret != "wrong":
        access = send(made, "GET", "/v1/access", headers=headers).json()
        scopes = ["infer", "route"] if secret == "route" else ["infer"]
        assert (access["keys_needed"], sorted(access["scopes"])) == (False, scopes)


@cases(
    weights=({"weights": {"v1": 80, "v2": 20}}, "route", 200),
    old_generation=({"weights": {"v1": 80}, "generation": 1}, "route", 409),
    failed=({"weights": {"v1": 80}, "generation": 0}, "route", 503),
    unknown_variant=({"weights": {"v9": 80}}, "admin", 400),
    not_a_number=({"weights": {"v1": "80"}}, "route", 400),
    wrong_key_for_weights=({"weights": {"v1": 80}}, "infer", 403),
    start=({"order": "start", "candidate": "v1"}, "route", 200),
    order=({"order": "pause"}, "admin", 200),
    second=({"order": "start", "candidate": "v1", "steps": ["shadow", 100]}, "route", 409),
    unknown_candidate=({"order": "start", "candidate": "v9"}, "route", 400),
    unknown_order=({"order": "undo"}, "route", 400),
    no_hooks=({"order": "start", "candidate": "v1", "hooks": {"before_step": "rm"}}, "route", 400),
    wrong_key_for_orders=({"order": "pause"}, "infer", 403),
)
def test_route_is_changed_with_the_scope_route(body, secret, status):
    """Hooks run commands, so a request to the gateway cannot have them."""
    request = ("PUT", "/v1/route/weights") if "weights" in body else ("POST", "/v1/rollout")
    made = gateway(Upstream(), keys=RING, route=Control())

    assert send(made, *request, json=body, headers={"x-api-key": secret}).status_code == status
    answer = send(gateway(Upstream(), route=Control()), *request, json=body)
    assert code(answer) == (401, "unauthenticated")
    assert "nereid key add" in answer.json()["error"]["message"]


def test_foreign_hosts_and_origins_are_rejected():
    plain = gateway(Upstream())
    cors = gateway(Upstream(), GatewaySettings(cors_origins=("https://photos.example",)))
    photos = {"origin": "https://photos.example"}

    assert send(plain, "GET", "/healthz", headers={"host": "evil.example"}).status_code == 400
    assert send(plain, "GET", "/healthz", headers={"host": "localhost:8080"}).status_code == 200
    assert code(send(plain, "POST", "/predict", content=IMAGE, headers=photos)) == (403, "forbidden")
    assert "access-control-allow-origin" not in send(plain, "GET", "/healthz").headers

    allowed = send(cors, "POST", "/predict", content=IMAGE, headers=photos)
    assert allowed.headers["access-control-allow-origin"] == "https://photos.example"
    asked = {"method": "POST", "headers": "x-route-a"}
    preflight = photos | {f"access-control-request-{name}": value for name, value in asked.items()}
    answer = send(cors, "OPTIONS", "/predict", headers=preflight)
    assert answer.status_code == 204
    assert "x-route-a" in answer.headers["access-control-allow-headers"]
    assert code(send(plain, "OPTIONS", "/predict", headers=preflight)) == (403, "forbidden")


@cases(
    own=("http://localhost", "http://localhost", 200),
    own_with_TLS=("https://localhost", "https://localhost", 200),
    proxy_with_TLS=("http://localhost", "https://localhost", 200),
    page_without_TLS=("https://localhost", "http://localhost", 403),
    other_scheme=("http://localhost", "ftp://localhost", 403),
    extension=("http://localhost", "chrome-extension://localhost", 403),
    no_scheme=("http://localhost", "localhost", 403),
)
def test_origin_has_the_scheme_of_the_gateway(address, origin, status):
    answer = send(gateway(Upstream()), "GET", f"{address}/healthz", headers={"origin": origin})

    assert answer.status_code == status


@rows(
    ("GET", "/predict", (405, "method_not_allowed")),
    ("GET", "/nothing", (404, "not_found")),
    ("GET", "/page/../live.py", (404, "not_found")),
    ("GET", "/page/%2e%2e/live.py", (404, "not_found")),
    ("GET", "/page/tasks/read/endpoint.py", (404, "not_found")),
    ("GET", "/samples/CREDITS.md", (404, "not_found")),
    ("GET", "/healthz?a=1", (400, "invalid_request")),
)
def test_unknown_path_is_a_json_error(method, path, expected):
    assert code(send(gateway(Upstream()), method, path)) == expected


def test_page_samples_and_docs_are_served():
    made = gateway(Upstream())

    paths = ["/", "/page/index.html", "/samples/coffee.jpg", "/samples/parcel_label.jpg"]
    for path in (*paths, "/docs", "/docs/start.js", "/docs/swagger-ui.css"):
        answer = send(made, "GET", path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert ("unsafe-inline" in policy) == path.startswith("/docs")
        assert answer.headers["x-content-type-options"] == "nosniff"
    samples = {sample["name"]: sample["tasks"] for sample in send(made, "GET", "/samples").json()}
    photo = ["classify", "detect", "embed"]
    assert samples == {"coffee": photo, "chelsea": photo, "parcel_label": ["read", "waybill"]}


def test_page_has_the_module_of_every_task():
    made = gateway(Upstream())

    listed = send(made, "GET", "/page/tasks.js")

    assert listed.headers["content-type"] == "text/javascript; charset=utf-8"
    assert listed.headers["cache-control"] == "no-cache"
    modules = dict(re.findall(r'import { (\w+) } from "\./(.*)";', listed.text))
    assert [*modules] == [task.name for task in TASKS]
    for name, path in modules.items():
        module = send(made, "GET", f"/page/{path}")
        assert f"\nexport const {name} = {{" in module.text
        assert module.headers["etag"]
        same = send(made, "GET", f"/page/{path}", headers={"if-none-match": module.headers["etag"]})
        assert same.status_code == 304


def test_openapi_has_every_operation():
    document = send(gateway(Upstream()), "GET", "/openapi.json").json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}

    assert described == {(operation.method, path) for operation in OPERATIONS for path in operation.paths}
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert named == {*document["components"]["schemas"]}


def test_metrics_have_no_labels_from_callers():
    made = gateway(Upstream())
    send(made, "POST", "/predict", content=IMAGE, headers={"x-variant": "made-up"})
    send(gateway(Upstream()), "GET", "/made-up-path")
    send(made, "POST", "/predict", content=b"")

    page = send(made, "GET", "/metrics").text

    counter = 'nereid_gateway_requests_total{endpoint="/predict",model="classify",'
    assert counter + 'outcome="ok",variant="v1"} 1.0' in page
    assert counter + 'outcome="invalid_image",variant=""} 1.0' in page
    labels = 'endpoint="/predict",le="0.001",model="classify",outcome="ok",stage="inference"'
    assert f"stage_seconds_bucket{{{labels}" in page
    assert "made-up" not in page
    for index in range(100):
        made.metrics.variant_label(f"v{index}")
    assert made.metrics.variant_label("one more") == "other"


@cases(
    disconnect_while_waiting=(True, False),
    disconnect_while_sending=(False, False),
    stop_of_the_gateway=(True, True),
)
@asynchronous
async def test_request_that_is_cut_off_is_cancelled_and_not_ok(is_complete, is_stop):
    upstream = Upstream()
    made = gateway(upstream)

    upstream.gate.clear()
    caller = Caller(made, is_complete=is_complete)
    task = caller.start()
    # With the whole body, the request waits for the server; it never gets that far without.
    await (until(lambda: made.admission.in_flight) if is_complete else asyncio.sleep(0.05))
    assert made.admission.in_flight == is_complete
    task.cancel() if is_stop else caller.disconnect()
    await asyncio.gather(task, return_exceptions=is_stop)
    await until(lambda: not made.admission.in_flight)

    assert (caller.sent, upstream.cancelled) == ([], is_complete)
    counter = 'requests_total{endpoint="/predict",model="classify",outcome="client_closed"'
    assert counter in made.metrics.page().decode()


@cases(
    late=({"is_complete": False, "headers": [(b"x-request-timeout-ms", b"200")]}, 408, b"body_timeout", 0),
    declared_too_long=({"headers": [(b"content-length", b"1001")]}, 413, b"too_large", 1),
)
@asynchronous
async def test_body_is_rejected_before_it_is_complete(sent, status, error_code, unread):
    """After a late body, the connection ends; one that is declared too long is not read."""
    caller = Caller(gateway(Upstream()), **sent)

    await caller.start()

    start, body = caller.sent
    assert (start["status"], caller.messages.qsize()) == (status, unread)
    assert ((b"connection", b"close") in start["headers"]) == (status == 408)
    assert error_code in body["body"]


@asynchronous
async def test_overload_is_reported_before_the_body_is_read():
    upstream = Upstream()
    made = gateway(upstream, GatewaySettings())

    upstream.gate.clear()
    await made.models.find(None, DEFAULT_TASK)  # later requests do not wait for the model's outputs
    capacity = made.admission.limit * (1 + MAX_WAITING_PER_SLOT)
    waiting = [Caller(made).start() for _ in range(capacity)]
    await asyncio.sleep(0.05)
    assert made.admission.in_flight + made.admission.waiting == capacity
    rejected = Caller(made)
    await rejected.start()
    assert rejected.messages.qsize() == 1
    upstream.gate.set()
    await asyncio.gather(*waiting)

    start, _ = rejected.sent
    assert start["status"] == 429
    assert (b"retry-after", b"1") in start["headers"]
    assert made.admission.in_flight == 0


@cases(
    unreachable=(errors.Unreachable("10.0.0.7:8001"), 503, "the server behind the gateway cannot be reached"),
    overloaded=(errors.Overloaded("overloaded: 64 in flight, limit 64"), 200, ""),
)
def test_readiness_has_a_reason(error, status, reason):
    """The reason has no address; without an overloaded server, the load would overload the next one."""
    answer = send(gateway(Upstream(error)), "GET", "/readyz")

    assert (answer.status_code, answer.json()) == (status, {"ready": status == 200, "reason": reason})


def test_costly_request_is_paid_afterwards(clock):
    """A small file that took 100 times as long as those of another key costs as much as 100."""

    class Slow(Upstream):
        async def infer(self, *inference: Any) -> Any:
            clock.now_s += 1.0
            return await super().infer(*inference)

    made = gateway(Slow(), GatewaySettings(rate_per_s=0.01, burst=20), keys=RING)
    made.admission = Admission(8, clock)
    made.admission.unit_latencies.record("other", "/v2/models/classify/infer", 0.01, 1)

    headers = {"x-api-key": "infer"}
    answers = [send(made, "POST", "/predict", content=IMAGE, headers=headers) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 429]


def test_rate_is_limited_by_key_and_pixels():
    """A small file of 25 million pixels costs as much as 25 photos, as debt."""
    made = gateway(Upstream(), GatewaySettings(rate_per_s=0.01, burst=20), keys=RING)

    def status(secret: str, size_wh: tuple[int, int]) -> int:
        content = save(Image.new("RGB", size_wh))
        return send(made, "POST", "/predict", content=content, headers={"x-api-key": secret}).status_code

    assert [status("infer", size) for size in ((10, 10), (5000, 5000), (10, 10))] == [200, 200, 429]
    assert status("admin", (10, 10)) == 200


@cases(answered=((), 200), rejected=([(b"x-request-timeout-ms", b"0")], 400))
@asynchronous
async def test_request_leaves_no_reference_cycle(headers, status):
    """A cycle would keep the body for minutes, because garbage collections are rare."""
    made = gateway(Upstream())

    async def send_one() -> Any:
        caller = Caller(made, headers=headers)
        await caller.start()
        await asyncio.sleep(0)  # the cancelled task ends
        assert caller.sent[0]["status"] == status
        return weakref.ref(caller)

    gc.disable()
    try:
        gone = await send_one()
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()


def test_paths_name_a_model():
    upstreams = Upstreams(classify=Upstream(), dogs=Upstream())
    made = Gateway(SMALL, NO_KEYS, Models("classify", Source(Control()), upstreams))

    paths = {f"/v1/models/{name}/predict": name for name in ("dogs", "classify")} | {"/predict": "classify"}
    assert {path: send(made, "POST", path, content=IMAGE).json()["model"] for path in paths} == paths
    batch = send(made, "POST", "/v1/models/dogs/classify", json={"images": [JSON_IMAGE]})

    assert [result["model"] for result in batch.json()["results"]] == ["dogs"]
    assert [len(upstreams[name].received) for name in ("classify", "dogs")] == [2, 2]
    assert send(made, "GET", "/v1/models/dogs/live").status_code == 200
    assert 'images_total{endpoint="/predict",model="dogs",outcome="ok"' in made.metrics.page().decode()
    assert send(made, "GET", "/v1/models/classify/route").json()["model"] == "classify"
    assert code(send(made, "GET", "/v1/models/dogs/route")) == (404, "no_route_control")


@pytest.mark.parametrize(
    "name", ["cats", "a" * 5000, "..", "dogs%2fclassify", "%00"], ids=lambda name: name[:9]
)
def test_unknown_model_is_named_with_those_that_exist(name):
    upstream = Upstream()

    answer = send(gateway(upstream), "POST", f"/v1/models/{name}/predict", content=IMAGE)

    assert code(answer) == (404, "not_found")
    assert upstream.received == []
    assert name != "cats" or answer.json()["error"]["message"] == (
        "unknown model 'cats'; expected one of: classify, dogs"
    )


@cases(
    default=("/v1/preview", IMAGE, (200, "image/png", b"picture")),
    named=("/v1/models/classify/preview", IMAGE, (200, "image/png", b"picture")),
    unknown_preprocessing=("/v1/models/dogs/preview", IMAGE, (404, "not_found")),
    unknown_model=("/v1/models/cats/preview", IMAGE, (404, "not_found")),
    no_image=("/v1/preview", b"text", (400, "invalid_image")),
    empty=("/v1/preview", b"", (400, "invalid_image")),
)
def test_preview_shows_what_the_network_sees(path, body, expected):
    upstream = Upstream()

    answer = send(gateway(upstream), "POST", path, content=body)

    if answer.status_code == 200:
        assert (200, answer.headers["content-type"], answer.content) == expected
    else:
        assert code(answer) == expected
    assert upstream.received == []


@asynchronous
async def test_previews_go_one_at_a_time_to_their_end_and_cost_what_they_take(monkeypatch):
    """A preview whose client has its error still decodes; the next one waits for it."""
    ring = Ring({name: key(name, "infer") for name in ("a", "b")})
    made = gateway(Upstream(), GatewaySettings(rate_per_s=0.001, burst=20), keys=ring)
    go_on, running = threading.Event(), []

    def prepare(name: str, image: bytes) -> bytes:
        running.append(image)
        go_on.wait(WATCHDOG_S)
        return b"picture"

    monkeypatch.setattr(made.models.source, "preview", prepare)
    image, transport = save(Image.new("RGB", (3500, 1000))), httpx.ASGITransport(create_app(made))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        def ask(name: str, timeout_ms: int) -> "asyncio.Task[httpx.Response]":
            headers = {"x-api-key": name, "x-request-timeout-ms": str(timeout_ms)}
            return asyncio.create_task(client.post("/v1/preview", content=image, headers=headers))

        late = await ask("a", 200)
        others = [ask(name, 60_000) for name in "aab"]
        await until(lambda: made.previews.waiting == 3)
        assert (code(late), len(running)) == ((504, "deadline_exceeded"), 1)
        go_on.set()

        assert [(await task).status_code for task in others] == [200, 200, 200]
    with pytest.raises(Failure, match="images per second"):
        made.quotas.take(ring["a"], 20 - 3 * 3 + 1)
    assert made.previews.in_flight == 0
