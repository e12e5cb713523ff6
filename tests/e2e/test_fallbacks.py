"""Fallbacks of a route whose default variant fails under load, on the real server."""

import json
import os
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from nereid import metrics_page
from nereid.assets import COFFEE, REPOSITORY
from nereid.server.control import Control
from tests.routes import WATCHDOG_S, document, store_router, variant, wait_until
from tests.supervised import IMAGE_TO_SCORES, NEREID, Served, serving, store_eyes
from tests.tables import cases

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
    store_eyes(repository, "eyes", 10, sleep_s=0.01)
    store_eyes(repository, "spare", 20, sleep_s=0.01)
    config = repository / "eyes" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 2", "count: 1"))
    store_router(repository, "look", config=IMAGE_TO_SCORES)
    route = document(
        # A process that hangs is killed after about ten seconds.
        variant("only", "eyes", 1, deadline_ms=30_000),
        variant("spare", "spare"),
        fallbacks=["spare"],
        answer={"scores": ANSWER},
    )
    (repository / "look.route.json").write_text(json.dumps(route))
    with serving(repository, base / "run") as running:
        wait_until(running.is_ready, "ready")
        wait_until(lambda: running.metric("probes_total", model="look") > 1, "probes")
        yield running


def ask(client: InferenceServerClient) -> float:
    image = InferInput("image", [1, 1], "BYTES")
    image.set_data_from_numpy(np.array([[b"a photo"]], object))
    return float(client.infer("look", [image], client_timeout=WATCHDOG_S).as_numpy("scores").item())


@contextmanager
def load(served: Served, send: Callable[[InferenceServerClient], Any] = ask) -> Iterator[Counter[Any]]:
    """Send requests with all callers; the counted responses are complete at the end of the context.

    The message of a request that fails takes the place of a response.
    """
    over, lock, numbers = threading.Event(), threading.Lock(), Counter()

    def call() -> None:
        with InferenceServerClient(f"127.0.0.1:{served.ports['grpc']}") as client:
            while not over.is_set():
                try:
                    found = send(client)
                except InferenceServerException as error:
                    found = str(error)
                with lock:
                    numbers[found] += 1

    with ThreadPoolExecutor(CALLERS) as pool:
        callers = [pool.submit(call) for _ in range(CALLERS)]
        try:
            yield numbers
        finally:
            over.set()
        for each in callers:
            each.result()


def counted(served: Served, to: str) -> float:
    return sum(
        each.value
        for each in metrics_page.parse(served.triton_page())
        if each.name == "nereid_route_fallbacks_total" and each.labels["to"] == to
    )


def signalled(number: int) -> Callable[[Served], None]:
    def send(served: Served) -> None:
        newest = max(served.stubs("eyes"), key=lambda each: each.process.started)
        os.kill(newest.process.pid, number)

    return send


def unloaded(served: Served) -> None:
    Control(served.record).unload("eyes")


@pytest.mark.slow
@cases(
    "fault", {"killed": signalled(signal.SIGKILL), "stopped": signalled(signal.SIGSTOP), "unloaded": unloaded}
)
def test_no_request_is_lost_with_the_default(served, fault):
    """Each request gets a right response: of the default, of the fallback, and of the default again."""
    before = counted(served, "spare")
    with load(served) as numbers:
        wait_until(lambda: numbers[DEFAULT] > 50, "responses of the default")
        fault(served)
        wait_until(lambda: counted(served, "spare") > before + 50, "responses of the fallback")
        if fault is unloaded:
            Control(served.record).load("eyes")
        wait_until(served.is_ready, "ready again")

    assert {*numbers} == {DEFAULT, SPARE}
    with InferenceServerClient(f"127.0.0.1:{served.ports['grpc']}") as client:
        while (found := ask(client)) != DEFAULT:
            numbers[found] += 1
    total = before + numbers[SPARE]
    wait_until(lambda: counted(served, "spare") == total, f"{total} counted fallbacks")


@pytest.mark.slow
def test_answer_is_sent_while_no_variant_is_there(served):
    control, before = Control(served.record), counted(served, "spare")
    answered = counted(served, "answer")
    with load(served) as numbers:
        wait_until(lambda: numbers[DEFAULT] > 50, "responses of the default")
        control.unload("spare")
        control.unload("eyes")
        wait_until(lambda: counted(served, "answer") > answered + 50, "configured answers")
        control.load("spare")
        wait_until(lambda: counted(served, "spare") > before + 50, "responses of the fallback")
        control.load("eyes")
        wait_until(served.is_ready, "ready again")

    assert {*numbers} == {DEFAULT, SPARE, ANSWER}
    totals = answered + numbers[ANSWER], before + numbers[SPARE]
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
        done = subprocess.run(
            [NEREID, "route", "fallback", "--cpu", "--repository", str(repository)],
            env=os.environ | {"XDG_RUNTIME_DIR": str(base / "run")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        yield running


def network_killed(served: Served) -> None:
    for stub in served.stubs("efficientnet_lite0"):
        os.kill(stub.process.pid, signal.SIGKILL)


def default_unloaded(served: Served) -> None:
    Control(served.record).unload("classify_v1")


def classify(client: InferenceServerClient) -> tuple[str, str, int]:
    """Send one photo to the route `classify`; return the variant, the reason and the best class."""
    image = InferInput("image", [1, 1], "BYTES")
    image.set_data_from_numpy(np.array([[COFFEE.read_bytes()]], object))
    response = client.infer("classify", [image], client_timeout=WATCHDOG_S)
    variant, reason = (response.as_numpy(name).item().decode() for name in ("variant", "route_reason"))
    return variant, reason, int(response.as_numpy("scores").argmax())


@pytest.mark.slow
@cases("fault", {"network killed": network_killed, "default unloaded": default_unloaded})
def test_copy_on_the_cpu_answers_for_the_default(classified, fault):
    before = counted(classified, "v1_cpu")
    with load(classified, classify) as seen:
        wait_until(lambda: seen["v1", "weight", ESPRESSO] > 50, "responses of the default")
        fault(classified)
        # A few at least: the supervisor may have replaced the processes soon.
        wait_until(lambda: counted(classified, "v1_cpu") > before, "responses of the copy")
    if fault is network_killed:
        wait_until(classified.is_ready, "ready again")

    assert {*seen} - {("v1_cpu", "breaker", ESPRESSO)} == {
        ("v1", "weight", ESPRESSO),
        ("v1_cpu", "retry", ESPRESSO),
    }
    total = before + sum(count for (name, _, _), count in seen.items() if name == "v1_cpu")
    wait_until(lambda: counted(classified, "v1_cpu") == total, f"{total} counted fallbacks")
