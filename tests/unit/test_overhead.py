"""The measurement's arithmetic: ratios per round, medians over rounds, targets."""

from loadtest.overhead import BATCHES, SINGLES, Sample, missed, summarise


def rounds(path: str, unit: str, *values: float) -> list[Sample]:
    """One sample per round."""
    return [Sample("small", path, unit, value) for value in values]


def test_ratio_is_the_median_over_rounds():
    """Each round is compared with its own limit, so that a slow phase of the machine cancels out."""
    samples = (
        rounds(SINGLES, "images/s", 100, 50, 200)
        + rounds(BATCHES, "images/s", 120, 60, 240)
        + rounds("cpu", "images/s", 90, 45, 20)
    )

    rows = summarise(samples)

    assert rows[2] == {
        "photo": "small",
        "path": "cpu",
        "unit": "images/s",
        "median": 45,
        "min": 20,
        "max": 90,
        "of_singles": 0.9,
        "of_batches": 0.75,
    }


def test_missed_targets_are_named():
    """Throughput below its ratio and latency above its own are both reported; in-process never."""
    samples = (
        rounds(SINGLES, "images/s", 100)
        + rounds(SINGLES, "ms", 10)
        + rounds("ensemble", "images/s", 86)
        + rounds("cpu", "images/s", 93)
        + rounds("cpu", "ms", 14)
    )

    assert missed(summarise(samples)) == ["cpu small: 0.93 in images/s", "cpu small: 1.4 in ms"]
