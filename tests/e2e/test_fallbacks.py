"""Fallbacks of a route whose default variant fails under load, on the real server."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from nereid.server.model_control import ModelControl
from tests.routes import document, store_router, variant, wait_until
from tests.supervised import IMAGE_TO_SCORES, Served, calling, serving, store_eyes

CALLERS = 12
# Numbers of the default variant, of its fallback, and of the configured answer.
DEFAULT, SPARE, ANSWER = 11.0, 21.0, -1.0


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    """A server with a route whose only variant with traffic has one process, a fallback and an answer."""
    base = tmp_path_factory.mktemp("fallbacks")
    repository = base / "repository"
    store_eyes(repository, "eyes", 10, sleep_s=0.01, instances=1)
    store_eyes(repository, "spare", 20, sleep_s=0.01)
    route = document(
        # A process that hangs is killed after about ten seconds, and deadlines count from the arrival.
        variant("only", "eyes", 1, deadline_ms=30_000),
        variant("spare", "spare", deadline_ms=30_000),
        fallbacks=["spare"],
        answer={"scores": ANSWER},
    )
    store_router(repository, "look", route, config=IMAGE_TO_SCORES)
    with serving(repository, base / "run") as running:
        wait_until(running.is_ready, "ready")
        wait_until(lambda: running.metric("probes_total", model="look") > 1, "probes")
        yield running


def counted(served: Served, to: str) -> float:
    return served.triton_metric("nereid_route_fallbacks_total", to=to)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_request_is_lost_with_the_default(served, number):
    before = counted(served, "spare")
    with calling(served, "look", CALLERS) as calls:
        wait_until(lambda: calls.count(DEFAULT) > 50, "responses of the default")
        newest = max(served.stubs("eyes"), key=lambda stub: stub.process.start_ticks)
        os.kill(newest.process.pid, number)
        wait_until(lambda: counted(served, "spare") > before + 50, "responses of the fallback")
        wait_until(served.is_ready, "ready again")
        back = time.monotonic()
        wait_until(lambda: DEFAULT in calls.since(back), "responses of the default again")

    assert {*calls.since()} == {DEFAULT, SPARE}
    total = before + calls.count(SPARE)
    wait_until(lambda: counted(served, "spare") == total, f"{total} counted fallbacks")


@pytest.mark.slow
def test_answer_is_sent_while_no_variant_is_there(served):
    model_control, before = ModelControl(served.server_info), counted(served, "spare")
    answered = counted(served, "answer")
    with calling(served, "look", CALLERS) as calls:
        wait_until(lambda: calls.count(DEFAULT) > 50, "responses of the default")
        model_control.unload("eyes")
        wait_until(lambda: counted(served, "spare") > before + 50, "responses of the fallback")
        model_control.unload("spare")
        wait_until(lambda: counted(served, "answer") > answered + 50, "configured answers")
        model_control.load("spare")
        model_control.load("eyes")
        wait_until(served.is_ready, "ready again")
        back = time.monotonic()
        wait_until(lambda: DEFAULT in calls.since(back), "responses of the default again")

    assert {*calls.since()} == {DEFAULT, SPARE, ANSWER}
    totals = answered + calls.count(ANSWER), before + calls.count(SPARE)
    wait_until(lambda: (counted(served, "answer"), counted(served, "spare")) == totals, f"{totals} counted")
