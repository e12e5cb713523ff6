"""Batches, cancelled requests, and cached results."""

import asyncio
import base64
import logging

from PIL import Image

from nereid.client import client_errors as errors
from nereid.gateway.admission import MAX_LARGE_WAITING, Admission
from nereid.gateway.failures import STATUS_BY_CODE
from nereid.gateway.http.http_request import GatewayRequest
from nereid.gateway.readiness import ReadinessProbe
from nereid.gateway.route_control import RouteView, Weights
from nereid.gateway.settings import GatewaySettings
from tests.gateways import PREDICTION, RING, Caller, Control, Upstream, asynchronous, gateway, send
from tests.pictures import save
from tests.tables import cases, rows


class Chooser(Upstream):
    """An upstream with one outcome per image, and a count of concurrent requests."""

    def __init__(self, **outcomes: object) -> None:
        super().__init__()
        self.outcomes = {name.encode(): outcome for name, outcome in outcomes.items()}
        self.max_running = self.running = 0

    async def infer(self, image: bytes, *more: object) -> object:
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        self.outcome = self.outcomes.get(image, PREDICTION)
        return await super().infer(image, *more)


def batch(*images: str) -> dict:
    return {"images": [{"image": base64.b64encode(image.encode()).decode()} for image in images]}


def count(made, name: str, outcome: str) -> float:
    start = f'nereid_gateway_{name}{{endpoint="/v1/classify",model="classify",outcome="{outcome}"'
    lines = made.metrics.page().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


@cases(
    bad_image=(errors.RequestRefused("invalid image: no"), "invalid_image"),
    load=(errors.Overloaded("full"), "overloaded"),
    server_away=(errors.Unreachable("away"), "unreachable"),
    defect_of_the_gateway=(KeyError(6), "inference_failed"),
)
def test_image_fails_alone(error, code, caplog):
    made = gateway(Chooser(bad=error))

    answer = send(made, "POST", "/v1/classify", json=batch("a", "bad", "c"))

    assert answer.status_code == 200
    assert [result.get("error", {}).get("code") for result in answer.json()["results"]] == [None, code, None]
    is_fault = code in ("unreachable", "inference_failed")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * is_fault
    assert count(made, "requests_total", code) == is_fault
    assert count(made, "images_total", code) == 1
    assert count(made, "images_total", "ok") == 2


@rows((errors.Overloaded("full"), "overloaded"), (errors.Unreachable("away"), "unreachable"))
def test_batch_fails_as_a_whole_if_the_server_fails_every_image(error, code):
    answer = send(gateway(Upstream(error)), "POST", "/v1/classify", json=batch("a", "b"))

    assert (answer.status_code, answer.json()["error"]["code"]) == (STATUS_BY_CODE[code], code)
    assert int(answer.headers["retry-after"]) >= 1


def test_batch_leaves_half_of_the_slots():
    upstream = Chooser()
    made = gateway(upstream, GatewaySettings(max_in_flight=8, max_images=16))

    send(made, "POST", "/v1/classify", json=batch(*"abcdefghijkl"))

    assert len(upstream.received) == 12
    assert upstream.max_running == 4


def test_batch_counts_every_image_in_the_quota():
    made = gateway(Upstream(), GatewaySettings(rate_per_s=0.01, burst=2), keys=RING)
    headers = {"x-api-key": "infer"}

    assert send(made, "POST", "/v1/classify", json=batch(*"abcd"), headers=headers).status_code == 200
    assert send(made, "POST", "/predict", content=b"a", headers=headers).status_code == 429


def test_batch_of_large_images_is_answered():
    image = base64.b64encode(save(Image.new("RGB", (4000, 3000)))).decode()
    body = {"images": [{"image": image}] * (MAX_LARGE_WAITING + 4)}

    answer = send(gateway(Chooser(), GatewaySettings()), "POST", "/v1/classify", json=body)

    assert [result.get("error") for result in answer.json()["results"]] == [None] * (MAX_LARGE_WAITING + 4)


@cases("is_cancelled", by_client=True, late_for_route=False)
@asynchronous
async def test_request_that_nobody_waits_for_keeps_its_slot_for_a_while(is_cancelled, clock):
    """The server still computes a request that is cancelled, or late for its route."""
    upstream = Upstream(errors.ServerFailed("deadline exceeded: variant 'v2' has not responded in 9 ms"))
    made = gateway(upstream)
    made.admission = Admission(8, clock)

    slot = await made.admission.acquire(9)
    clock.now_s += 30
    slot.release_answered()  # the mean round trip is 30 s
    if is_cancelled:
        upstream.gate.clear()
    caller = Caller(made, headers=[(b"x-request-timeout-ms", b"60000")])
    task = caller.start()
    await asyncio.sleep(0.01)
    if is_cancelled:
        caller.disconnect()
    await task
    await asyncio.sleep(0.01)

    assert not task.cancelling()
    assert (made.admission.in_flight, upstream.cancelled) == (1, is_cancelled)


@asynchronous
async def test_request_that_was_late_before_it_was_sent_keeps_no_slot(clock, monkeypatch):
    made, left = gateway(Upstream()), iter([9.0, 0.0])
    made.admission = Admission(8, clock)
    slot = await made.admission.acquire(9)
    clock.now_s += 30
    slot.release_answered()  # the mean round trip is 30 s

    def remaining_s(request: GatewayRequest) -> float:
        if seconds := next(left):
            return seconds
        raise request.deadline_failure()

    monkeypatch.setattr(GatewayRequest, "remaining_s", remaining_s)
    caller = Caller(made, headers=[(b"x-request-timeout-ms", b"60000")])
    await caller.start()

    assert (caller.sent[0]["status"], made.admission.in_flight) == (504, 0)


@asynchronous
async def test_changed_weights_are_shown_immediately():
    reads = []

    control = Control()
    control.show = lambda: reads.append(1)
    view = RouteView(control, clock=lambda: 5.0)
    await view.show()
    await view.show()
    assert len(reads) == 1
    await view.change(control.set_weights, Weights({"v1": 1}), "me")
    await view.show()
    assert len(reads) == 2


@asynchronous
async def test_readiness_is_probed_once_for_all_and_again_after_two_seconds():
    now, upstream = [0.0], Upstream()
    readiness = ReadinessProbe(lambda image, timeout_s: upstream.infer(image, {}, {}), lambda: now[0])
    for now[0], probes in ((0.0, 1), (1.9, 1), (2.1, 2)):
        upstream.gate.clear()
        asyncio.get_running_loop().call_later(0.01, upstream.gate.set)

        states = await asyncio.gather(*(readiness.state() for _ in range(50)))

        assert [state.ready for state in states] == [True] * 50
        assert len(upstream.received) == probes
