"""Feedback about answers: what is remembered, by which worker, and for how long."""

import base64
import os
import sys
from dataclasses import replace

import pytest

from nereid.gateway import shared_tables
from nereid.gateway.shared_tables import SLOTS_PER_SET, RatedPrediction, RecentPredictions
from tests.commands import captured
from tests.gateways import IMAGE, RING, SMALL, WATCHDOG_S, Upstream, gateway, send
from tests.tables import cases, rows


@rows(("espresso", True), (" Espresso ", True), (967, True), ("cup", False), (968, False), ("967", False))
def test_label_or_index_is_compared(label, is_correct):
    memory = RecentPredictions()
    memory.remember("id", "classify", "v1", 967, "espresso")

    assert memory.rate("id", label) == RatedPrediction("classify", "v1", is_correct, True)
    assert memory.rate("id", label) == RatedPrediction("classify", "v1", is_correct, False)
    assert memory.rate("other", label) is None
    memory.remember("id", "classify", "v2", 2, "two")
    assert memory.rate("id", 2) == RatedPrediction("classify", "v2", True, True)


def test_recent_predictions_are_known_and_old_ones_forgotten(monkeypatch):
    """Half of the capacity is known almost always; after twice the capacity, almost nothing old is left."""
    monkeypatch.setattr(shared_tables, "SETS", 500)
    now, capacity = [0.0], 500 * SLOTS_PER_SET
    memory = RecentPredictions(lambda: now[0])
    for number in range(3 * capacity):
        now[0] += 1
        memory.remember(f"id-{number}", "m", "v", number % 1000, "")

    def known(numbers: range) -> float:
        return sum(memory.rate(f"id-{number}", 0) is not None for number in numbers) / len(numbers)

    assert known(range(5 * capacity // 2, 3 * capacity)) > 0.95
    assert known(range(capacity)) < 0.01


FORKED = """
import os, time
from nereid.gateway.shared_tables import RecentPredictions
memory = RecentPredictions()
for number in range(3_000):
    memory.remember(f"id-{number}", "m", "v", number, "label")
read, write = os.pipe()
start = time.monotonic() + 0.5
for worker in range(4):
    if not os.fork():
        time.sleep(max(0, start - time.monotonic()))
        first = sum(memory.rate(f"id-{number}", number).is_first for number in range(3_000))
        os.write(write, b"%d\\n" % first)
        os._exit(0)
for worker in range(4):
    os.wait()
print(sum(map(int, os.read(read, 1000).split())))
"""


def test_workers_count_each_answer_once():
    done = captured([sys.executable, "-c", FORKED], timeout=WATCHDOG_S, env=os.environ)

    assert (done.stdout.split(), done.stderr) == (["3000"], "")


def feedback(made, key="", /, **body):
    answer = send(made, "POST", "/v1/feedback", json=body, headers={"x-api-key": key} if key else {})
    return answer.status_code, answer.json()


def test_feedback_is_counted_once_by_variant():
    made = gateway(Upstream())
    for name in ("a", "b"):
        headers = {"content-type": "image/jpeg", "x-request-id": name}
        send(made, "POST", "/predict", content=IMAGE, headers=headers)

    answer = {"request_id": "a", "model": "classify", "variant": "v1", "correct": True}
    assert feedback(made, request_id="a", label="espresso") == (200, answer)
    assert feedback(made, request_id="b", label=3)[1]["correct"] is False
    status, body = feedback(made, request_id="a", label="espresso")
    assert (status, body["error"]["code"]) == (409, "conflict")
    status, body = feedback(made, request_id="c", label="espresso")
    assert (status, body["error"]["code"]) == (404, "unknown_request")
    page = send(made, "GET", "/metrics").text
    for result in ("correct", "wrong"):
        labels = f'{{model="classify",result="{result}",variant="v1"}}'
        assert f"nereid_gateway_feedback_total{labels} 1.0" in page


def test_images_of_a_batch_have_their_own_feedback():
    made = gateway(Upstream())
    image = base64.b64encode(IMAGE).decode()
    body = {"images": [{"id": "cup", "image": image}, {"image": image}]}
    send(made, "POST", "/v1/classify", json=body, headers={"x-request-id": "batch"})

    assert feedback(made, request_id="batch", image="cup", label=967)[0] == 200
    assert feedback(made, request_id="batch", image=1, label=967)[0] == 200
    assert feedback(made, request_id="batch", image=0, label=967)[0] == 404
    assert feedback(made, request_id="batch", label=967)[0] == 404


@cases(
    another_key=(["infer"], "admin", {"request_id": "a"}, 404),
    another_key_with_the_same_id=(["infer", "admin"], "admin", {"request_id": "a"}, 200),
    no_key=(["infer", "admin"], "", {"request_id": "a"}, 404),
    no_key_with_the_same_id=(["infer", ""], "", {"request_id": "a"}, 200),
    a_key_in_the_id=(["infer"], "", {"request_id": "id-infer\0a"}, 404),
)
def test_feedback_of_another_key_changes_nothing(senders, other, body, status):
    made = gateway(Upstream(), keys=RING)
    for key in senders:  # the later answer does not replace the earlier one
        headers = {"x-request-id": "a"} | ({"x-api-key": key} if key else {})
        send(made, "POST", "/predict", content=IMAGE, headers=headers)

    assert feedback(made, other, label="cup", **body)[0] == status
    assert feedback(made, "infer", request_id="a", label="espresso")[0] == 200
    assert feedback(made, "infer", request_id="a", label="espresso")[0] == 409


@pytest.mark.parametrize(
    "body",
    [{"request_id": "a"}, {"request_id": "", "label": "x"}, {"request_id": "a", "label": -1}, {"label": "x"}],
)
def test_wrong_feedback_is_rejected(body):
    assert feedback(gateway(Upstream()), **body)[0] == 400


def test_feedback_needs_the_scope_infer():
    made = gateway(Upstream(), replace(SMALL, keys_needed=True), RING)

    assert feedback(made, "route", request_id="a", label=1)[0] == 403
