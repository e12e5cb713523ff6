"""The trials: each still changes what is in the repository, and the arithmetic of their comparison."""

import shutil

import numpy as np
import onnx
import onnxruntime
import pytest

from loadtest.bench.summary import Sample
from loadtest.trials import MEAN, NETWORK, STD, TRIALS, rows, taking_bytes
from nereid.assets import REPOSITORY
from nereid.repository import check


def sample(rate: float, cpu_ms: float, p99_ms: float) -> Sample:
    """What one round saw of a trial."""
    return Sample(rate, 0.0, 0.0, p99_ms, cpu_ms, 0.0)


@pytest.mark.parametrize("name", [name for name, trial in TRIALS.items() if trial.change])
def test_trial_changes_a_repository_that_can_be_served(tmp_path, name):
    """What a trial replaces is there, and nothing that it leaves behind would be refused."""
    repository = shutil.copytree(REPOSITORY, tmp_path / "models")
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}

    TRIALS[name].change(repository)

    assert {path for path, content in before.items() if path.read_bytes() != content}
    failures = [each for each in check.check(repository) if each.verdict == "fail"]
    assert [each for each in failures if "SHA256SUMS" not in f"{each.what} {each.found} {each.fix}"] == []


def test_network_that_takes_bytes_answers_as_the_one_that_takes_normalised_pixels():
    """The normalisation in the graph is the one that the preprocessing has."""
    path = REPOSITORY / NETWORK / "1" / "model.onnx"
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, 224, 224), np.uint8)
    plain = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    taking = onnxruntime.InferenceSession(
        taking_bytes(onnx.load(path)).SerializeToString(), providers=["CPUExecutionProvider"]
    )

    (expected,) = plain.run(["scores"], {"input": (pixels.astype(np.float32) - MEAN) / STD})
    (actual,) = taking.run(["scores"], {"input": pixels})

    np.testing.assert_allclose(actual, expected, atol=1e-5)  # sums of another order


def test_one_trial_changes_nothing():
    """What it differs by from its base, any other may differ by, too."""
    same = [name for name, trial in TRIALS.items() if not trial.change and name != trial.profile]
    series = {(name, 8): [sample(100, 10, 120)] for name in ("cpu", *same)}

    assert [(row["trial"], row["base"]) for row in rows(series)] == [("cpu", ""), ("cpu again", "cpu")]


def test_trial_is_compared_within_its_rounds():
    """A slow round is slow for both, and the median of the rounds' ratios is told."""
    series = {
        ("cpu", 8): [sample(100, 10, 120), sample(50, 10, 400), sample(100, 12, 120)],
        ("three instances", 8): [sample(110, 9, 80), sample(60, 9, 400), sample(110, 9, 100)],
    }

    base, tried = rows(series)

    assert (base["base"], base["rate_compared"], base["cpu_compared"]) == ("", 1.0, 1.0)
    assert tried == {
        "trial": "three instances",
        "base": "cpu",
        "concurrency": 8,
        "rate": 110,
        "rate_compared": 1.1,
        "cpu_ms": 9,
        "cpu_compared": 0.9,
        "p99_of_even": 1.38,
    }
