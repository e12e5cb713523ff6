"""What a batch is answered, and what the gateway keeps while and after it asks the server."""

import asyncio
import base64
import logging

import pytest

from nereid.client import classifier_errors as errors
from nereid.gateway.failures import STATUS
from nereid.gateway.image_size import HEAD_BYTES, size_wh
from nereid.gateway.readiness import Readiness
from nereid.gateway.route_control import RouteView
from nereid.gateway.settings import Settings
from tests.gateways import PREDICTION, RING, ROUTE, Caller, Control, Upstream, ask, gateway


class Chooser(Upstream):
    """Answers, or raises, what stands by an image."""

    def __init__(self, **outcomes: object) -> None:
        super().__init__()
        self.outcomes = {name.encode(): outcome for name, outcome in outcomes.items()}
        self.most = self.running = 0

    async def classify(self, image: bytes, **options: object) -> object:
        """Answer after others could begin."""
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        self.outcome = self.outcomes.get(image, PREDICTION)
        return await super().classify(image, **options)


def batch(*images: str) -> dict:
    """Return the body of a batch."""
    return {"images": [{"image": base64.b64encode(each.encode()).decode()} for each in images]}


def count(made, name: str) -> float:
    """Return the sum of the samples that begin so."""
    lines = made.metrics.page().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"nereid_gateway_{name}"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RequestRefused("invalid image: no"), "invalid_image"),
        (errors.Overloaded("full"), "overloaded"),
        (errors.Unreachable("away"), "unreachable"),
        (KeyError(6), "inference_failed"),
    ],
    ids=["bad image", "load", "server away", "defect of the gateway"],
)
def test_image_fails_alone(error, code, caplog):
    """Whatever becomes of one, the others are answered; a fault is in the log and in the outcome."""
    made = gateway(Chooser(bad=error))

    answer = ask(made, "POST", "/v1/classify", json=batch("a", "bad", "c"))

    assert answer.status_code == 200
    assert [each.get("error", {}).get("code") for each in answer.json()["results"]] == [None, code, None]
    is_fault = code in ("unreachable", "inference_failed")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * is_fault
    assert count(made, f'requests_total{{endpoint="/v1/classify",outcome="{code}"') == is_fault
    assert count(made, f'images_total{{endpoint="/v1/classify",outcome="{code}"') == 1
    assert count(made, 'images_total{endpoint="/v1/classify",outcome="ok"') == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [(errors.Overloaded("full"), "overloaded"), (errors.Unreachable("away"), "unreachable")],
)
def test_batch_that_the_server_takes_nothing_of_fails_whole(error, code):
    """Load is 429 and a fault is 503, with a time, as for one image."""
    answer = ask(gateway(Upstream(error)), "POST", "/v1/classify", json=batch("a", "b"))

    assert (answer.status_code, answer.json()["error"]["code"]) == (STATUS[code], code)
    assert int(answer.headers["retry-after"]) >= 1


def test_batch_leaves_half_to_others():
    """However many images it has."""
    upstream = Chooser()
    made = gateway(upstream, Settings(max_in_flight=8, max_images=16))

    ask(made, "POST", "/v1/classify", json=batch(*"abcdefghijkl"))

    assert len(upstream.asked) == 12
    assert upstream.most == 4


def test_batch_is_paid_for_by_its_images():
    """A key that sent four owes three, and is refused until they are paid."""
    made = gateway(Upstream(), Settings(rate_per_s=0.01, burst=2), keys=RING)
    headers = {"x-api-key": "infer"}

    assert ask(made, "POST", "/v1/classify", json=batch(*"abcd"), headers=headers).status_code == 200
    assert ask(made, "POST", "/predict", content=b"a", headers=headers).status_code == 429


def test_overload_of_the_server_lowers_the_limit():
    """What the route refuses, the gateway learns from."""
    made = gateway(Upstream(errors.Overloaded("full")))
    before = made.admission.limit

    assert ask(made, "POST", "/predict", content=b"a").status_code == 429

    assert made.admission.limit < before


def test_cancelled_call_keeps_its_place_for_a_while():
    """The server goes on computing what it was asked, so that nobody else may take the place."""
    upstream = Upstream()
    made = gateway(upstream)
    made.admission._concurrency_limit.rtt_s = 30.0

    async def run() -> int:
        upstream.gate.clear()
        caller = Caller(made, headers=[(b"x-request-timeout-ms", b"60000")])
        asked = caller.ask()
        await asyncio.sleep(0.01)
        caller.leave()
        await asked
        await asyncio.sleep(0.01)
        assert not asked.cancelling()
        return made.admission.in_flight

    assert asyncio.run(run()) == 1
    assert upstream.cancelled == 1


def test_weights_are_shown_as_soon_as_they_are_changed():
    """A look may be a second old, but not older than the viewer's own change."""
    looks = []

    class Counting(Control):
        """Counts the looks."""

        def show(self):
            """Return the route."""
            looks.append(1)
            return ROUTE

    async def run() -> None:
        view = RouteView(Counting(), clock=lambda: 5.0)
        await view.show()
        await view.show()
        assert len(looks) == 1
        await view.set_weights({"v1": 1}, None, "me")
        await view.show()
        assert len(looks) == 2

    asyncio.run(run())


def test_readiness_is_asked_again_after_two_seconds():
    """An answer is kept for so long, and no longer."""
    now = [0.0]
    upstream = Upstream()
    readiness = Readiness(upstream.classify, lambda: now[0])

    async def run() -> None:
        for now[0], asked in ((0.0, 1), (1.9, 1), (2.1, 2)):
            assert (await readiness.state()).ready
            assert len(upstream.asked) == asked

    asyncio.run(run())


def test_load_is_no_failure():
    """A server that has too much to do is ready: who left it out would overload the next one."""
    readiness = Readiness(Upstream(errors.Overloaded("overloaded: 64 in flight, limit 64")).classify)

    assert asyncio.run(readiness.state()).ready


def test_head_that_cannot_be_read_is_left_to_the_server():
    """A subsampling without a name, and a size that stands behind more than a megabyte."""
    sof = bytes.fromhex("ffc0001108004000400300140002110003 1100".replace(" ", ""))

    assert size_wh(b"\xff\xd8\xff\xe0\x00\x04ab" + sof + bytes(64)) is None
    assert size_wh(b"\xff\xd8\xff" + b"\xd0" * (HEAD_BYTES + 10)) is None


def test_size_of_an_old_bmp_is_read():
    """The header of OS/2 has 16 bits for a side."""
    head = b"BM" + bytes(12) + (12).to_bytes(4, "little") + (64).to_bytes(2, "little") * 2

    assert size_wh(head + bytes(20)) == (64, 64)
