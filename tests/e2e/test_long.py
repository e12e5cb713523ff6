"""The long tests: counts cut by SLOW_REQUESTS in `make test-slow`, in full in `make proof`."""

import random

import pytest

from nereid.base.assets import CHELSEA, COFFEE
from nereid.client.client_errors import RequestRefused
from nereid.tasks.classify.client import Classifier
from nereid.tasks.classify.result import Prediction
from tests.e2e.conftest import CATS, ESPRESSO, memory_bytes, url
from tests.proof import REQUESTS

GOOD = {COFFEE.read_bytes(): {ESPRESSO}, CHELSEA.read_bytes(): CATS}
BAD = [b"", b"not an image", COFFEE.read_bytes()[:5_000]]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("server", "protocol"), [("cpu", "http"), ("ensemble", "grpc")], indirect=["server"], scope="session"
)
def test_no_answer_is_lost_or_mixed_up(server, protocol):
    """Thousands of good and bad requests in flight together: each gets its own right answer or refusal."""
    chance = random.Random(0)
    images = [chance.choice([*GOOD, *GOOD, *BAD]) for _ in range(REQUESTS)]

    with Classifier(url(server, protocol), protocol, concurrency=24) as classifier:
        outcomes = list(classifier.classify_many(images, top_k=1))

    assert len(outcomes) == REQUESTS
    for image, outcome in zip(images, outcomes, strict=True):
        if image in GOOD:
            assert isinstance(outcome, Prediction), outcome
            assert outcome.labels[0].index in GOOD[image]
        else:
            assert isinstance(outcome, RequestRefused), outcome


def test_server_does_not_grow(fused):
    """After a warm-up, the process tree grows by less per request than the smallest thing it could leak.

    The smaller of the photos has 39 kB, its tensor 600 kB.
    """
    images = [*GOOD, BAD[1]] * (REQUESTS // 3)

    with Classifier(url(fused, "grpc"), concurrency=24) as classifier:
        list(classifier.classify_many(images[:300]))
        before = memory_bytes(fused.pid)
        list(classifier.classify_many(images))
        after = memory_bytes(fused.pid)

    assert (after - before) / len(images) < 20_000
