"""The gateway in front of an upstream that answers what it is told: statuses, limits, keys, headers."""

import asyncio
import base64
import gc
import json
import logging
import re
import weakref
from typing import Any

import pytest
from starlette.routing import Route

from nereid.client import classifier_errors as errors
from nereid.gateway.admission.access import EXPOSED
from nereid.gateway.admission.admission import MAX_WAITING_PER_PERMIT
from nereid.gateway.admission.keys import KeyRing
from nereid.gateway.failures import STATUS
from nereid.gateway.http.app import app_of, create_app
from nereid.gateway.http.operations import OPERATIONS
from nereid.gateway.image_size import size_wh
from nereid.gateway.live import Live
from nereid.gateway.settings import Settings
from tests.gateways import IMAGE, RING, Caller, Control, Upstream, ask, gateway

JSON_IMAGE = {"image": base64.b64encode(IMAGE).decode()}
JPEG = {"content-type": "image/jpeg"}


def code(answer) -> tuple[int, str]:
    """Return status and error code of an answer, whose form is checked."""
    body = answer.json()
    assert {*body} == {"error", "request_id"}
    assert body["request_id"] == answer.headers["x-request-id"]
    assert answer.status_code == STATUS[body["error"]["code"]]
    return answer.status_code, body["error"]["code"]


@pytest.mark.parametrize(
    "body",
    [
        {"content": IMAGE, "headers": JPEG},
        {"content": IMAGE},
        {"content": IMAGE, "headers": {"content-type": "application/octet-stream"}},
        {"content": IMAGE, "headers": {"content-type": "application/x-www-form-urlencoded"}},
        {"files": {"file": ("cup.jpg", IMAGE)}},
        {"json": JSON_IMAGE},
    ],
    ids=["image", "no type", "octets", "curl", "form", "json"],
)
def test_image_is_passed_on_untouched(body):
    """Whatever way it comes, the server gets the very bytes, and the answer is the server's."""
    upstream = Upstream()

    answer = ask(gateway(upstream), "POST", "/predict?top_k=2", **body)

    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [(each["label"], each["index"]) for each in found["predictions"]] == [
        ("espresso", 967),
        ("cup", 968),
    ]
    assert (found["variant"], found["version"], found["reason"]) == ("v1", "1", "weight")
    assert {*found["timings_ms"]} == {"receive", "admission", "inference", "total"}
    ((image, options),) = upstream.asked
    assert image == IMAGE
    assert (options["top_k"], options["request_id"]) == (2, found["request_id"])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"content": b""}, "invalid_image"),
        ({"content": b"\x89PNG\r\n\x1a\n" + bytes(8) + b"\0\0\2\0\0\0\0\1" + bytes(9)}, "invalid_image"),
        ({"content": bytes(1001)}, "too_large"),
        ({"files": {"file": bytes(1001)}}, "too_large"),
        ({"files": {"photo": IMAGE}}, "invalid_request"),
        ({"files": [("file", IMAGE), ("file", IMAGE)]}, "invalid_request"),
        ({"content": IMAGE, "headers": {"content-type": "multipart/form-data"}}, "invalid_request"),
        (
            {"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}},
            "invalid_request",
        ),
        ({"json": {"image": "not base64!"}}, "invalid_request"),
        ({"json": {"image": "aGk=", "top_k": 3}}, "invalid_request"),
        ({"content": IMAGE, "headers": {"content-type": "text/plain"}}, "unsupported_media_type"),
        ({"content": IMAGE, "headers": {"content-encoding": "gzip"}}, "unsupported_media_type"),
        ({"content": IMAGE, "params": {"k": "5"}}, "invalid_request"),
        ({"content": IMAGE, "params": {"top_k": "0"}}, "invalid_request"),
        ({"content": IMAGE, "params": {"top_k": "1001"}}, "invalid_request"),
        ({"content": IMAGE, "params": {"variant": "v1"}, "headers": {"x-variant": "v2"}}, "invalid_request"),
        ({"content": IMAGE, "params": {"route_key": "ä"}}, "invalid_request"),
        ({"content": IMAGE, "headers": {"x-route-a!": "b"}}, "invalid_request"),
        ({"content": IMAGE, "headers": {"x-route-a-bin": "b"}}, "invalid_request"),
        ({"content": IMAGE, "headers": {"x-request-timeout-ms": "0"}}, "invalid_request"),
        ({"content": IMAGE, "headers": {"x-request-timeout-ms": "60001"}}, "invalid_request"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_request_says_what_was_wrong(request_, expected):
    """It never reaches the server."""
    upstream = Upstream()

    answer = ask(gateway(upstream), "POST", "/predict", **request_)

    assert code(answer)[1] == expected
    assert upstream.asked == []


def test_chunked_body_is_cut_at_the_limit():
    """A length that is not declared is counted, and what was read is not kept."""

    async def chunks():
        for _ in range(100):
            yield bytes(100)

    made = gateway(Upstream())

    for _ in range(5):
        assert code(ask(made, "POST", "/predict", content=chunks())) == (413, "too_large")


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (errors.RequestRefused("in ensemble 'x', invalid image: no JPEG"), "invalid_image", "no JPEG"),
        (errors.RequestRefused("invalid request: no variant 'v9'"), "invalid_request", "no variant 'v9'"),
        (errors.RequestRefused("Request for unknown model at 10.0.0.7"), "unavailable", "not served"),
        (errors.Overloaded("overloaded: 64"), "overloaded", "retry later"),
        (errors.TimedOut("10.0.0.7:8001: no answer"), "deadline_exceeded", "within 10 s"),
        (errors.Unavailable("unavailable: v1"), "unavailable", "not served"),
        (errors.Unreachable("10.0.0.7:8001: refused"), "unreachable", "cannot be reached"),
        (errors.ServerFailed("inference failed: region_17"), "inference_failed", "server failed"),
    ],
    ids=["image", "request", "model", "overloaded", "late", "unavailable", "unreachable", "failed"],
)
def test_failure_has_its_status_and_tells_no_insides(error, expected, message):
    """Only what is about the caller's own request is handed on; 429 and 503 say when to come again."""
    answer = ask(gateway(Upstream(error)), "POST", "/predict", content=IMAGE)

    status, found = code(answer)
    assert found == expected
    assert message in answer.json()["error"]["message"]
    assert not re.search(r"10\.0|region|ensemble", answer.text)
    assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_fault_of_the_gateway_is_an_answer_too(caplog):
    """What nobody thought of is a 500 in the same form, and in the log."""
    answer = ask(gateway(Upstream(KeyError("oops"))), "POST", "/predict", content=IMAGE)

    assert code(answer) == (500, "inference_failed")
    assert "oops" in caplog.text
    assert "oops" not in answer.text


def test_batch_fails_image_by_image():
    """Each image has its own outcome, under its own id or place."""
    body = {"images": [{"id": "a", **JSON_IMAGE}, {"image": ""}, {"id": 7, **JSON_IMAGE}], "variant": "v1"}
    upstream = Upstream()

    found = ask(gateway(upstream), "POST", "/v1/classify", json=body).json()["results"]

    assert [each["id"] for each in found] == ["a", 1, 7]
    assert [each.get("error", {}).get("code") for each in found] == [None, "invalid_image", None]
    assert [options["variant"] for _, options in upstream.asked] == ["v1", "v1"]
    answer = ask(gateway(upstream), "POST", "/v1/classify", files=[("file", IMAGE)] * 3)
    assert len(answer.json()["results"]) == 3
    answer = ask(gateway(upstream), "POST", "/v1/classify", files=[("file", IMAGE)] * 4)
    assert code(answer) == (400, "invalid_request")


def test_only_headers_of_the_route_are_handed_on():
    """And `traceparent`, if the caller began the trace; nothing secret."""
    upstream = Upstream()
    trace = f"{'a' * 32}-{'b' * 16}"
    headers = {
        "x-variant": "v2",
        "x-model-version": "2",
        "x-route-key": "me",
        "x-route-group": "beta",
        "x-api-key": "infer",
        "traceparent": f"00-{trace}-01",
        "x-request-id": "mine",
    }

    answer = ask(gateway(upstream, keys=RING), "POST", "/predict", content=IMAGE, headers=headers)

    ((_, options),) = upstream.asked
    assert (options["variant"], options["version"], options["route_key"]) == ("v2", "2", "me")
    assert {*options["headers"]} == {"x-route-group", "traceparent"}
    assert answer.headers["traceparent"] == options["headers"]["traceparent"]
    assert re.fullmatch(rf"00-{'a' * 32}-[0-9a-f]{{16}}-01", answer.headers["traceparent"])
    assert trace not in answer.headers["traceparent"]
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "mine"


@pytest.mark.parametrize("given", ["x" * 129, "ä", ""])
def test_bad_ids_are_replaced(given):
    """An id that could not be logged safely is not taken over; neither is a broken trace."""
    headers = {"x-request-id": given.encode(), "traceparent": f"00-{'0' * 32}-{'b' * 16}-01"}

    answer = ask(gateway(Upstream()), "GET", "/healthz", headers=headers)

    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", answer.headers["traceparent"])


@pytest.mark.parametrize(
    ("secret", "expected"),
    [
        (None, {"/v1/live": 401, "/metrics": 401, "/v1/access": 200, "/healthz": 200, "/readyz": 200}),
        ("wrong", {"/v1/live": 401, "/metrics": 401, "/v1/access": 401}),
        ("infer", {"/v1/live": 200, "/metrics": 200, "/v1/route": 200}),
        ("route", {"/v1/live": 403, "/metrics": 200}),
        ("admin", {"/v1/live": 200, "/metrics": 200}),
    ],
)
def test_key_opens_what_it_is_for(secret, expected):
    """Of both headers; whoever looks after the process needs none."""
    made = gateway(Upstream(), Settings(keys_needed=True), keys=RING, route=Control())

    for headers in ({"authorization": f"Bearer {secret}"}, {"x-api-key": f"{secret}"}):
        found = {path: ask(made, "GET", path, headers=headers if secret else {}) for path in expected}
        assert {path: answer.status_code for path, answer in found.items()} == expected
    if secret is None:
        assert found["/v1/live"].headers["www-authenticate"] == "Bearer"
        assert found["/v1/access"].json() == {"keys_needed": True, "name": None, "scopes": []}


def test_gateway_without_keys_stays_on_loopback():
    """Listening for others needs keys, and the refusal says how to get them."""
    with pytest.raises(ValueError, match=re.escape(EXPOSED)):
        create_app(Settings(host="0.0.0.0"), KeyRing(), None)

    with pytest.raises(ValueError, match="there are no API keys yet; fix: nereid key add"):
        create_app(Settings(keys_needed=True), KeyRing(), None)
    assert create_app(Settings(host="::1"), KeyRing(), None)
    assert create_app(Settings(host="0.0.0.0"), RING, None)


@pytest.mark.parametrize(
    "wrong",
    [{"max_in_flight": 0}, {"default_timeout_s": 61.0}, {"cors_origins": ("*",)}, {"rate_per_s": -1.0}],
    ids=str,
)
def test_settings_that_cannot_be_meant_are_refused(wrong):
    """At the start, not at a request."""
    with pytest.raises(ValueError, match=next(iter(wrong)).partition("_")[0].replace("cors", "CORS")):
        Settings(**wrong)


@pytest.mark.parametrize("secret", [None, "infer", "route", "wrong"])
def test_on_loopback_a_key_only_adds(secret):
    """Everybody may classify and look there, whatever their key is for; a key that is not known is told."""
    made = gateway(Upstream(), keys=RING, route=Control())
    headers = {"x-api-key": secret} if secret else {}

    answers = [ask(made, "GET", path, headers=headers).status_code for path in ("/v1/live", "/metrics")]
    assert answers == [401 if secret == "wrong" else 200] * 2
    changed = ask(made, "PUT", "/v1/route/weights", json={"weights": {"v1": 1, "v2": 1}}, headers=headers)
    assert changed.status_code == {"route": 200, "infer": 403}.get(secret, 401)
    if secret != "wrong":
        found = ask(made, "GET", "/v1/access", headers=headers).json()
        scopes = ["infer", "route"] if secret == "route" else ["infer"]
        assert (found["keys_needed"], sorted(found["scopes"])) == (False, scopes)


@pytest.mark.parametrize(
    ("body", "secret", "status"),
    [
        ({"weights": {"v1": 80, "v2": 20}}, "route", 200),
        ({"weights": {"v1": 80}, "generation": 1}, "route", 409),
        ({"weights": {"v1": 80}, "generation": 0}, "route", 503),
        ({"weights": {"v9": 80}}, "admin", 400),
        ({"weights": {"v1": "80"}}, "route", 400),
        ({"weights": {"v1": 80}}, "infer", 403),
    ],
    ids=["good", "old generation", "failed", "unknown variant", "no number", "wrong key"],
)
def test_weights_are_changed_with_a_key_for_it(body, secret, status):
    """A change needs the scope `route`; without keys there is none, and none without control."""
    headers = {"x-api-key": secret}
    made = gateway(Upstream(), keys=RING, route=Control())

    assert ask(made, "PUT", "/v1/route/weights", json=body, headers=headers).status_code == status
    assert ask(made, "GET", "/v1/route").status_code == 200
    answer = ask(gateway(Upstream(), route=Control()), "PUT", "/v1/route/weights", json=body)
    assert code(answer) == (401, "unauthenticated")
    assert "nereid key add" in answer.json()["error"]["message"]
    assert code(ask(gateway(Upstream()), "GET", "/v1/route")) == (404, "no_route_control")


def test_foreign_hosts_and_pages_are_refused():
    """On loopback a foreign name is DNS rebinding; pages elsewhere may ask if the settings say so."""
    plain = gateway(Upstream())
    cors = gateway(Upstream(), Settings(cors_origins=("https://photos.example",)))
    photos = {"origin": "https://photos.example"}

    assert ask(plain, "GET", "/healthz", headers={"host": "evil.example"}).status_code == 400
    assert ask(plain, "GET", "/healthz", headers={"host": "localhost:8080"}).status_code == 200
    assert ask(plain, "GET", "/healthz", headers={"origin": "http://127.0.0.1"}).status_code == 200
    assert code(ask(plain, "POST", "/predict", content=IMAGE, headers=photos)) == (403, "forbidden")
    assert "access-control-allow-origin" not in ask(plain, "GET", "/healthz").headers

    allowed = ask(cors, "POST", "/predict", content=IMAGE, headers=photos)
    assert allowed.headers["access-control-allow-origin"] == "https://photos.example"
    preflight = {
        **photos,
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-route-a",
    }
    answer = ask(cors, "OPTIONS", "/predict", headers=preflight)
    assert answer.status_code == 204
    assert "x-route-a" in answer.headers["access-control-allow-headers"]
    assert code(ask(plain, "OPTIONS", "/predict", headers=preflight)) == (403, "forbidden")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/predict", (405, "method_not_allowed")),
        ("OPTIONS", "/predict", (405, "method_not_allowed")),
        ("GET", "/nothing", (404, "not_found")),
        ("GET", "/page/../app.py", (404, "not_found")),
        ("GET", "/page/%2e%2e/app.py", (404, "not_found")),
        ("GET", "/samples/CREDITS.md", (404, "not_found")),
        ("GET", "/docs/index.html", (404, "not_found")),
        ("GET", "/healthz?a=1", (400, "invalid_request")),
    ],
)
def test_what_is_not_there_is_json_too(tmp_path, method, path, expected):
    """Every refusal has the one form, and no path leaves its folder."""
    (tmp_path / "app.py").write_text("secret")
    (tmp_path / "page").mkdir()

    assert code(ask(gateway(Upstream()), method, path, page=tmp_path / "page")) == expected


def test_page_samples_and_docs_are_served(tmp_path):
    """From local files only, with a policy that allows no others."""
    (tmp_path / "index.html").write_text("<title>hello</title>")
    made = gateway(Upstream())

    for path in (
        "/",
        "/page/index.html",
        "/samples/coffee.jpg",
        "/docs",
        "/docs/start.js",
        "/docs/swagger-ui.css",
    ):
        answer = ask(made, "GET", path, page=tmp_path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert ("unsafe-inline" in policy) == path.startswith("/docs")
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert [each["name"] for each in ask(made, "GET", "/samples").json()] == ["coffee", "chelsea"]


def test_openapi_has_every_operation_and_no_other():
    """The document and the routes come from one table; every schema is used, every reference leads to one."""
    made = gateway(Upstream())
    document = ask(made, "GET", "/openapi.json").json()
    described = {(method.upper(), path) for path, each in document["paths"].items() for method in each}
    files = {"/", "/docs", "/docs/{name}", "/samples/{name}", "/openapi.json"}
    routes = [route for route in app_of(made).routes if isinstance(route, Route) and route.path not in files]

    assert described == {(method, route.path) for route in routes for method in route.methods - {"HEAD"}}
    assert described == {(each.method, each.path) for each in OPERATIONS}
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert named == {*document["components"]["schemas"]} - {"Result", "FailedResult"} | {
        "Result",
        "FailedResult",
    }


def test_metrics_have_no_labels_from_callers():
    """What a caller makes up is counted under no name of its own."""
    made = gateway(Upstream())
    ask(made, "POST", "/predict", content=IMAGE, headers={"x-variant": "made-up"})
    ask(gateway(Upstream()), "GET", "/made-up-path")
    ask(made, "POST", "/predict", content=b"")

    page = ask(made, "GET", "/metrics").text

    assert 'nereid_gateway_requests_total{endpoint="/predict",outcome="ok",variant="v1"} 1.0' in page
    assert 'nereid_gateway_requests_total{endpoint="/predict",outcome="invalid_image",variant=""} 1.0' in page
    assert re.search(
        r'stage_seconds_bucket\{endpoint="/predict",le="0.001",outcome="ok",stage="inference"', page
    )
    assert "made-up" not in page
    for index in range(100):
        made.metrics.variant(f"v{index}")
    assert made.metrics.variant("one more") == "other"


def test_log_has_a_line_per_request(caplog):
    """One JSON object, without the secret."""
    caplog.set_level(logging.INFO, "nereid.gateway")
    headers = {"x-api-key": "infer"}

    ask(gateway(Upstream(), keys=RING), "POST", "/predict", content=IMAGE, headers=headers)

    (line,) = (json.loads(record.message) for record in caplog.records)
    assert (line["path"], line["status"], line["outcome"], line["key_id"]) == (
        "/predict",
        200,
        "ok",
        "id-infer",
    )


def test_live_tells_the_last_minute():
    """Rates, shares and quantiles by variant; what is older than a minute is forgotten."""
    now = [1000.0]
    live = Live(lambda: now[0])
    for index in range(100):
        now[0] = 1000 + index / 10
        live.note("ok", "v1" if index % 4 else "v2", 0.01 if index % 10 else 0.1)
    live.note("overloaded", "", 0)
    now[0] = 1010

    state = live.state(3, 8)

    assert (state.requests_per_s, state.in_flight, state.limit) == (10.1, 3, 8)
    assert state.outcomes == {"ok": 100, "overloaded": 1}
    assert [(each.variant, each.share) for each in state.variants] == [("v1", 0.75), ("v2", 0.25)]
    assert state.variants[0].p50_ms == pytest.approx(10, rel=0.15)
    assert state.variants[0].p99_ms == pytest.approx(100, rel=0.15)
    assert [each.age_s for each in state.history] == list(range(10, 0, -1))
    now[0] = 1080
    assert live.state(0, 8).outcomes == {}
    assert {each.p50_ms for each in live.state(0, 8).history} == {None}


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_size_is_read_from_the_head(encode, gradient, image_format):
    """As Pillow wrote it; of a TIFF, of no image and of a cut one the server judges."""
    encoded = encode(gradient(30, 70), image_format)

    assert size_wh(encoded) == (None if image_format == "TIFF" else (70, 30))
    assert size_wh(encoded[:20]) is None


@pytest.mark.parametrize(
    "options", [{"lossless": True}, {"lossless": True, "exif": b"Exif\0\0"}], ids=["VP8L", "VP8X"]
)
def test_size_of_every_webp_is_read(encode, gradient, options):
    """The format has three heads."""
    assert size_wh(encode(gradient(30, 70), "WEBP", **options)) == (70, 30)


@pytest.mark.parametrize("is_complete", [True, False], ids=["while waiting", "while sending"])
def test_leaving_cancels_the_call(is_complete):
    """Nothing is answered, the call is cancelled, and the permit comes back."""
    upstream = Upstream()
    made = gateway(upstream)

    async def run() -> Caller:
        upstream.gate.clear()
        caller = Caller(made, is_complete=is_complete)
        asked = caller.ask()
        await asyncio.sleep(0.01)
        assert made.admission.in_flight == is_complete
        caller.leave()
        await asked
        await asyncio.sleep(0.01)
        return caller

    assert asyncio.run(run()).sent == []
    assert upstream.cancelled == is_complete
    assert made.admission.in_flight == 0
    assert 'requests_total{endpoint="/predict",outcome="client_closed"' in made.metrics.page().decode()


def test_late_body_is_not_waited_for():
    """The time allowed counts from the request's arrival on, the body's included; no permit is held."""
    made = gateway(Upstream())

    async def run() -> Caller:
        caller = Caller(made, is_complete=False, headers=[(b"x-request-timeout-ms", b"30")])
        await caller.ask()
        return caller

    start, body = asyncio.run(run()).sent
    assert start["status"] == 408
    assert (b"connection", b"close") in start["headers"]
    assert b"body_timeout" in body["body"]


def test_overload_is_answered_before_the_body_is_read():
    """At the limit nothing is received, and the refusal says when to come again."""
    upstream = Upstream()
    made = gateway(upstream, Settings())

    async def run() -> Caller:
        upstream.gate.clear()
        most = made.admission.limit * (1 + MAX_WAITING_PER_PERMIT)
        waiting = [Caller(made).ask() for _ in range(most)]
        await asyncio.sleep(0.05)
        assert made.admission.in_flight + made.admission.waiting == most
        refused = Caller(made)
        await refused.ask()
        assert refused.messages.qsize() == 1
        upstream.gate.set()
        await asyncio.gather(*waiting)
        return refused

    start, _ = asyncio.run(run()).sent
    assert start["status"] == 429
    assert (b"retry-after", b"1") in start["headers"]
    assert made.admission.in_flight == 0


def test_declared_length_is_refused_unread():
    """Nobody sends what will not be taken."""

    async def run() -> Caller:
        refused = Caller(gateway(Upstream()), headers=[(b"content-length", b"1001")])
        await refused.ask()
        return refused

    refused = asyncio.run(run())
    assert refused.messages.qsize() == 1
    assert refused.sent[0]["status"] == 413


def test_readiness_asks_once_for_all():
    """However many ask, one inference runs at a time, and its answer is good for two seconds."""
    upstream = Upstream()
    made = gateway(upstream)

    async def run() -> list[bool]:
        upstream.gate.clear()
        asked = [asyncio.create_task(made.readiness.state()) for _ in range(50)]
        await asyncio.sleep(0.01)
        upstream.gate.set()
        return [(await each).ready for each in asked]

    assert asyncio.run(run()) == [True] * 50
    assert len(upstream.asked) == 1


def test_not_ready_says_why():
    """503, with a reason that names no address."""
    answer = ask(gateway(Upstream(errors.Unreachable("10.0.0.7:8001"))), "GET", "/readyz")

    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "reason": "the server behind the gateway cannot be reached"}


def test_rate_is_limited_by_key():
    """The key that asks too often is told so; another one is not."""
    made = gateway(Upstream(), Settings(rate_per_s=0.01, burst=1), keys=RING)

    def status(secret: str) -> int:
        return ask(made, "POST", "/predict", content=IMAGE, headers={"x-api-key": secret}).status_code

    assert [status("infer"), status("infer"), status("admin")] == [200, 429, 200]


class Connection(Caller):
    """A request whose body is given by what knows its scope, as uvicorn's is."""

    async def receive(self) -> Any:
        """Return the next message."""
        return await self.messages.get()

    def ask(self) -> asyncio.Task:
        """Send the request."""
        return asyncio.create_task(self.app(self.scope, self.receive, self.send))


@pytest.mark.parametrize(
    ("headers", "status"),
    [((), 200), ([(b"x-request-timeout-ms", b"0")], 400)],
    ids=["answered", "refused"],
)
def test_request_leaves_nothing_to_the_collector(headers, status):
    """Its body would wait for minutes with it: the collector comes by after many new objects."""
    made = gateway(Upstream())

    async def ask_one() -> Any:
        """Ask once; returns what tells whether the caller is still there."""
        caller = Connection(made, headers=headers)
        await caller.ask()
        await asyncio.sleep(0)  # what it has cancelled has ended
        assert caller.sent[0]["status"] == status
        return weakref.ref(caller)

    async def ask_and_look() -> Any:
        """Ask, and look a moment later."""
        gone = await ask_one()
        await asyncio.sleep(0)
        return gone()

    gc.disable()
    try:
        assert asyncio.run(ask_and_look()) is None
    finally:
        gc.enable()
