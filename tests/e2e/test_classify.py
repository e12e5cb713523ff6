"""The main job: the right class for a photo, over both protocols and in both profiles."""

import random
import re

import httpx
import numpy as np
import pytest

from loadtest.resource_usage import memory_bytes
from nereid.base.assets import CHELSEA, COFFEE
from nereid.client.client_errors import RequestRefused
from nereid.insight.observe.doctor import TRITON_OF_PYTRITON
from nereid.insight.tune import photos
from nereid.tasks.classify.client import Classifier
from nereid.tasks.classify.result import Prediction
from tests.commands import captured
from tests.e2e.conftest import CATS, ESPRESSO, url
from tests.networks import infer
from tests.proof import REQUESTS

PHOTOS = {"coffee": COFFEE.read_bytes(), "chelsea": CHELSEA.read_bytes()}
PHOTOS |= {"640x427": photos.jpeg((640, 427)), "1080p": photos.jpeg((1920, 1080))}
PHOTOS |= {"portrait": photos.jpeg((427, 640))}
ANSWERS = {PHOTOS["coffee"]: {ESPRESSO}, PHOTOS["chelsea"]: CATS}
BAD = [b"", b"not an image", PHOTOS["coffee"][:5_000]]


def raw_scores(server, model: str, image: bytes) -> np.ndarray:
    return infer(server, model, {"image": np.array([[image]], object)}, "http")["scores"][0]


@pytest.mark.parametrize("version", ["1", "2"])
def test_coffee_is_espresso(server, protocol, version):
    with Classifier(url(server, protocol), protocol) as classifier:
        answer = classifier.classify(COFFEE, version=version)

    best = answer.labels[0]
    assert (best.index, best.name, best.score >= 0.9) == (ESPRESSO, "espresso", True)
    assert (answer.version, answer.variant, answer.reason) == (version, f"v{version}", "version")


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("name", PHOTOS)
def test_answer_is_that_of_a_plain_reference(server, reference, name, version):
    """Top-1 equals Pillow + plain ONNX Runtime.

    Tolerance 0.03: one pixel in thousands differs from Pillow's by a level, because rounding depends on the
    processor. The INT8 network amplifies the difference. The large photo is decoded at a quarter.
    """
    got = raw_scores(server, f"classify_v{version}", PHOTOS[name])

    expected = reference(PHOTOS[name], version)
    assert got.argmax() == expected.argmax()
    np.testing.assert_allclose(got, expected, atol=0.03)
    assert got.sum() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", PHOTOS)
@pytest.mark.parametrize("version", ["1", "2"])
def test_both_profiles_give_equal_scores(both_profiles, name, version):
    """One process or two: the same numbers, to the last bit."""
    scores = [raw_scores(server, f"classify_v{version}", PHOTOS[name]) for server in both_profiles.values()]

    np.testing.assert_array_equal(*scores)


def test_curl_line_of_the_docs_prints_as_shown(server, root):
    page = (root / "docs" / "contract.md").read_text()
    shown = re.search(r"^\$ (curl .*?)\n(\d+ \w+) [\d.]+$", page, re.M | re.S)
    command = shown[1].replace("localhost:8000", url(server, "http"))

    printed = captured(["bash", "-c", command], cwd=root, check=True)

    *answer, probability = printed.stdout.split()
    assert " ".join(answer) == shown[2] == f"{ESPRESSO} espresso"
    assert float(probability) >= 0.9


def test_model_without_a_route_has_no_variant(server):
    with Classifier(url(server, "grpc"), model="classify_v2") as classifier:
        answer = classifier.classify(COFFEE, top_k=1)

    assert (answer.model, answer.version, answer.variant, answer.reason) == ("classify_v2", "1", "", "")


def test_server_is_the_triton_that_doctor_names(server):
    version = httpx.get(f"http://{url(server, 'http')}/v2").json()["version"]

    assert any(release.startswith(version) for release in TRITON_OF_PYTRITON.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "protocol"), [("cpu", "http"), ("ensemble", "grpc")], indirect=["server"], scope="session"
)
def test_no_answer_is_lost_or_mixed_up(server, protocol):
    """Thousands of good and bad requests in flight together: each gets its own right answer or refusal."""
    chance = random.Random(0)
    images = [chance.choice([*ANSWERS, *ANSWERS, *BAD]) for _ in range(REQUESTS)]

    with Classifier(url(server, protocol), protocol, concurrency=24) as classifier:
        outcomes = list(classifier.classify_many(images, top_k=1))

    assert len(outcomes) == REQUESTS
    for image, outcome in zip(images, outcomes, strict=True):
        if image in ANSWERS:
            assert isinstance(outcome, Prediction), outcome
            assert outcome.labels[0].index in ANSWERS[image]
        else:
            assert isinstance(outcome, RequestRefused), outcome


@pytest.mark.slow
def test_server_does_not_grow(fused):
    """After a warm-up, the process tree grows by less per request than the smallest thing it could leak.

    The smaller of the photos has 39 kB, its tensor 600 kB.
    """
    images = [*ANSWERS, BAD[1]] * (REQUESTS // 3)

    with Classifier(url(fused, "grpc"), concurrency=24) as classifier:
        list(classifier.classify_many(images[:300]))
        before = memory_bytes(fused.pid)
        list(classifier.classify_many(images))
        after = memory_bytes(fused.pid)

    assert (after - before) / len(images) < 20_000
