"""Fallbacks of a route whose default variant fails under load, on the real server."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nereid import metrics_page
from nereid.assets import REPOSITORY
from nereid.server.control import Control
from tests.routes import document, store_router, variant, wait_until
from tests.supervised import IMAGE_TO_SCORES, Served, calling, serving, store_eyes

CALLERS = 12
# Numbers of the default variant, of its fallback, and of the configured answer.
DEFAULT, SPARE, ANSWER = 11.0, 21.0, -1.0
# What the sample photo shows, as an index of ImageNet's classes.
ESPRESSO = 967


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    """A server with a route whose only variant with traffic has one process, a fallback and an answer."""
    base = tmp_path_factory.mktemp("fallbacks")
    repository = base / "repository"
    store_eyes(repository, "eyes", 10, sleep_s=0.01, instances=1)
    store_eyes(repository, "spare", 20, sleep_s=0.01)
    store_router(repository, "look", config=IMAGE_TO_SCORES)
    route = document(
        # A process that hangs is killed after about ten seconds, and deadlines count from the arrival.
        variant("only", "eyes", 1, deadline_ms=30_000),
        variant("spare", "spare", deadline_ms=30_000),
        fallbacks=["spare"],
        answer={"scores": ANSWER},
    )
    (repository / "look.route.json").write_text(json.dumps(route))
    with serving(repository, base / "run") as running:
        wait_until(running.is_ready, "ready")
        wait_until(lambda: running.metric("probes_total", model="look") > 1, "probes")
        yield running


def counted(served: Served, to: str) -> float:
    return sum(
        each.value
        for each in metrics_page.parse(served.triton_page())
        if each.name == "nereid_route_fallbacks_total" and each.labels["to"] == to
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_request_is_lost_with_the_default(served, number):
    """Each request gets a right response: of the default, of the fallback, and of the default again."""
    before = counted(served, "spare")
    with calling(served, "look", CALLERS) as calls:
        wait_until(lambda: calls.count(DEFAULT) > 50, "responses of the default")
        newest = max(served.stubs("eyes"), key=lambda each: each.process.started)
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
    """With all variants unloaded, each request gets the configured answer, until one is back."""
    control, before = Control(served.record), counted(served, "spare")
    answered = counted(served, "answer")
    with calling(served, "look", CALLERS) as calls:
        wait_until(lambda: calls.count(DEFAULT) > 50, "responses of the default")
        control.unload("eyes")
        wait_until(lambda: counted(served, "spare") > before + 50, "responses of the fallback")
        control.unload("spare")
        wait_until(lambda: counted(served, "answer") > answered + 50, "configured answers")
        control.load("spare")
        control.load("eyes")
        wait_until(served.is_ready, "ready again")
        back = time.monotonic()
        wait_until(lambda: DEFAULT in calls.since(back), "responses of the default again")

    assert {*calls.since()} == {DEFAULT, SPARE, ANSWER}
    totals = answered + calls.count(ANSWER), before + calls.count(SPARE)
    wait_until(lambda: (counted(served, "answer"), counted(served, "spare")) == totals, f"{totals} counted")


@pytest.fixture(scope="module")
def classified(tmp_path_factory) -> Iterator[Served]:
    """A server of the default models as ensembles; the route sends all to v1, which has a copy on the CPU."""
    base = tmp_path_factory.mktemp("classified")
    repository = shutil.copytree(
        REPOSITORY, base / "models", ignore=shutil.ignore_patterns("*.history.jsonl")
    )
    path = repository / "classify.route.json"
    route = json.loads(path.read_text())
    route["variants"] = [each | {"weight": int(each["name"] == "v1")} for each in route["variants"]]
    path.write_text(json.dumps(route))
    with serving(repository, base / "run", "--profile", "ensemble") as running:
        wait_until(running.is_ready, "ready")
        done = running.nereid("route", "fallback", "--cpu")
        assert done.returncode == 0, done.stderr
        yield running


def origin(result: Any) -> tuple[str, str, int]:
    """Return the variant, the reason and the best class of a response."""
    variant, reason = (result.as_numpy(name).item().decode() for name in ("variant", "route_reason"))
    return variant, reason, int(result.as_numpy("scores").argmax())


@pytest.mark.slow
def test_copy_on_the_cpu_answers_for_the_default(classified):
    before = counted(classified, "v1_cpu")
    with calling(classified, "classify", CALLERS, origin) as calls:
        wait_until(lambda: calls.count(("v1", "weight", ESPRESSO)) > 50, "responses of the default")
        for stub in classified.stubs("efficientnet_lite0"):
            os.kill(stub.process.pid, signal.SIGKILL)
        # A few at least: the supervisor may have replaced the processes soon.
        wait_until(lambda: counted(classified, "v1_cpu") > before, "responses of the copy")
    wait_until(classified.is_ready, "ready again")

    assert {*calls.since()} - {("v1_cpu", "breaker", ESPRESSO)} == {
        ("v1", "weight", ESPRESSO),
        ("v1_cpu", "retry", ESPRESSO),
    }
    total = before + sum(name == "v1_cpu" for name, _, _ in calls.since())
    wait_until(lambda: counted(classified, "v1_cpu") == total, f"{total} counted fallbacks")
