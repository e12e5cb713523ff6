"""`python -m loadtest.bench` without a server: plan, arithmetic and errors of wrong options."""

import json
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest import record
from loadtest.bench import plan, summary
from loadtest.bench.plan import LIMITS, TWICE
from loadtest.bench.summary import Sample
from nereid.errors import WrongUsage


def sample(rate: float, ms: float = 10, cpu_ms: float = 8) -> Sample:
    """Return a sample whose percentiles are multiples of `ms`."""
    return Sample(rate, ms, 2 * ms, 3 * ms, cpu_ms, 400)


def rounds(*rates: float, **others: float) -> list[Sample]:
    return [sample(rate, **others) for rate in rates]


def judged(series: summary.Series) -> dict[str, tuple[float, bool]]:
    """Return what each verdict is about, what came, and whether that is enough."""
    return {each["what"]: (each["got"], each["met"]) for each in summary.targets(series)}


def test_the_usual_run_has_what_the_targets_ask_for_and_no_more():
    cells = plan.select()

    assert [cell for cell, count in Counter(cells).items() if count > 1] == []
    assert [cell for cell in cells if cell.again] == [replace(TWICE, again=True)]
    assert record.turns(cells, 1) == cells[::-1], "a machine that slows down hits a cell and its limit alike"
    served = [cell for cell in cells if cell.path not in LIMITS]
    assert [cell for cell in served if cell.precision == "int8"] == [replace(TWICE, precision="int8")]
    assert {cell.photo for cell in served if cell.path in ("route", "gateway")} == {"small"}
    assert {(cell.path, cell.photo, cell.concurrency) for cell in served} >= {
        (path, photo, count)
        for path in ("cpu", "ensemble", "by-hand")
        for photo in plan.PHOTOS
        for count in (1, 8, 32)
    }


def test_ratio_is_the_median_over_rounds():
    """Each round is compared with its own limit, so that a slow phase of the machine cancels out."""
    series = {TWICE.limit: rounds(100, 50, 200), TWICE: rounds(90, 45, 20, cpu_ms=10)}

    row = summary.rows(series)[1]

    assert row["rate"] == {"median": 45, "min": 20, "max": 90}
    assert row["of_limit"] == {"median": 0.9, "min": 0.1, "max": 0.9}
    assert row["cpu_of_limit"]["median"] == 1.25
    assert "p50_of_alone" not in row


def test_throughput_is_judged_at_the_best_concurrency():
    """One request at a time cannot take all cores; of those that can, the best counts, and its CPU time."""
    eight, alone = replace(TWICE, concurrency=8), replace(TWICE, concurrency=1)
    series = {
        TWICE.limit: rounds(100),
        TWICE.alone: rounds(60, ms=8),
        TWICE: rounds(96, ms=100),
        eight: rounds(98, ms=40, cpu_ms=8.4),
        alone: rounds(99),
    }

    assert judged(series) == {
        "cpu, small, concurrency 8: throughput, of the limit": (0.98, True),
        "cpu, small, concurrency 8: CPU per image, of the limit's": (1.05, False),
        "cpu, small, concurrency 8: p99, of concurrency / throughput": (1.47, True),
        "cpu, small, concurrency 32: p99, of concurrency / throughput": (0.9, True),
        "cpu, small, concurrency 1: p50, of that in process": (1.25, False),
    }


def test_precisions_are_judged_round_by_round():
    int8 = replace(TWICE, precision="int8")
    series = {
        TWICE.limit: rounds(100, 50),
        int8.limit: rounds(200, 100),
        TWICE: rounds(100, 50),
        int8: rounds(150, 75),
    }

    assert judged(series)["cpu, small, concurrency 32: throughput of INT8, of FP32's"] == (1.5, False)


def test_service_by_hand_is_the_peer():
    alone = replace(TWICE, concurrency=1)
    series = {
        TWICE.limit: rounds(100),
        TWICE.alone: rounds(60, ms=8),
        TWICE: rounds(96, ms=100),
        alone: rounds(70, ms=11),
        replace(TWICE, path="by-hand"): rounds(90, ms=125),
        replace(alone, path="by-hand"): rounds(80, ms=10),
    }

    found = {name: got for name, got in judged(series).items() if name.endswith("of the service by hand")}

    assert found == {
        "cpu, small, concurrency 32: throughput, of the service by hand": (1.067, True),
        "cpu, small, concurrency 1: p50, of the service by hand": (1.1, False),
        "cpu, small, concurrency 1: p99, of the service by hand": (1.1, True),
        "cpu, small, concurrency 32: p99, of the service by hand": (0.8, True),
        "cpu, small, concurrency 32: memory, of the service by hand": (1.0, True),
    }


def test_noise_is_the_same_by_the_same():
    series = {TWICE: rounds(100, 50), replace(TWICE, again=True): rounds(101, 49)}

    noise = summary.noise(series)

    assert noise
    assert noise["rate"] == {"median": 0.995, "min": 0.98, "max": 1.01}
    assert summary.warning(noise) == []
    assert summary.noise({TWICE: rounds(100)}) is None
    (told,) = summary.warning({"rate": {"median": 1.2, "min": 1.0, "max": 1.4}})
    (spread,) = summary.warning({"rate": {"median": 1.0, "min": 0.5, "max": 2.0}})
    assert "the A/A ratio was 1.2" in told
    assert "(0.5..2.0)" in spread


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder without a commit in place of this one, whose results are kept in it."""
    monkeypatch.setattr(record, "FOLDER", tmp_path / "loadtest")
    monkeypatch.setattr(record, "RESULTS", tmp_path / "loadtest" / "results")
    record.RESULTS.mkdir(parents=True)
    return tmp_path


def commit(checkout: Path, program: str) -> None:
    (checkout / "program.py").write_text(program)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=checkout, check=True)


def test_record_is_of_the_commit_that_was_there_when_it_began(checkout):
    """`make bench` writes one record after the other; any other change, or no commit at all, is refused."""
    with pytest.raises(WrongUsage, match="needs a commit"):
        record.begin("pieces")
    commit(checkout, "1")
    run = record.begin("pieces")
    commit(checkout, "2")

    run.write({"rows": []})

    (path,) = record.RESULTS.iterdir()
    assert json.loads(path.read_text()) == {**run.header, "rows": []}
    assert run.header["commit"] != record.header()["commit"].removesuffix("-dirty")
    assert record.begin("bench").name == "bench"
    (checkout / "program.py").write_text("3")
    with pytest.raises(WrongUsage, match="needs a commit"):
        record.begin("bench")
    assert record.begin().header["commit"].endswith("-dirty"), "without a record it may be anything"
