"""The long tests: counts cut by SLOW_REQUESTS in `make test-slow`, in full in `make proof`."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from clients.classifier import Classifier, Prediction, RequestRefused
from clients.samples import CHELSEA, COFFEE
from tests.e2e.conftest import CATS, ESPRESSO, url

REQUESTS = int(os.environ.get("SLOW_REQUESTS", "2000"))
GOOD = {COFFEE.read_bytes(): {ESPRESSO}, CHELSEA.read_bytes(): CATS}
BAD = [b"", b"not an image", COFFEE.read_bytes()[:5_000]]
# A watchdog: on 2 cores the demo in a fresh clone takes about a minute, most of it installing.
CLONE_S = 1200

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_no_answer_is_lost_or_mixed_up(server, protocol):
    """Thousands of good and bad requests in flight together: each gets its own right answer or refusal."""
    chance = random.Random(0)
    images = [chance.choice([*GOOD, *GOOD, *BAD]) for _ in range(REQUESTS)]

    with Classifier(url(server, protocol), protocol) as classifier:
        outcomes = list(classifier.classify_many(images, concurrency=24, top_k=1))

    assert len(outcomes) == REQUESTS
    for image, outcome in zip(images, outcomes, strict=True):
        if image in GOOD:
            assert isinstance(outcome, Prediction), outcome
            assert outcome.labels[0].index in GOOD[image]
        else:
            assert isinstance(outcome, RequestRefused), outcome


def test_server_does_not_grow(server):
    """After a warm-up, memory of the process tree stays within a tenth over thousands of mixed requests."""
    images = [chance for _ in range(REQUESTS // 4) for chance in (*GOOD, BAD[1])]

    with Classifier(url(server, "grpc")) as classifier:
        list(classifier.classify_many(images[:300], concurrency=24))
        before = resident_bytes(server.pid)
        list(classifier.classify_many(images, concurrency=24))
        after = resident_bytes(server.pid)

    assert after < 1.1 * before


def test_fresh_clone_runs_the_demo(root, tmp_path):
    """A newcomer's first command: in a fresh clone `make demo` sets up and classifies on both versions."""
    clone = tmp_path / "nereid"
    subprocess.run(["git", "clone", "--quiet", root, clone], check=True)

    demo = subprocess.run(["make", "demo"], cwd=clone, capture_output=True, text=True, timeout=CLONE_S)

    assert demo.returncode == 0, demo.stderr
    assert demo.stdout.count("espresso") == 2
    assert "1 (FP32)" in demo.stdout
    assert "2 (INT8)" in demo.stdout


def resident_bytes(group: int) -> int:
    """Sum the proportional memory (PSS) of a process group."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
            rollup = (stat.parent / "smaps_rollup").read_text()
            total += (
                int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))) * 1024
            )
    return total
