"""Explanations of slow and failed requests, from made-up lines and counts of the kernel."""

import pytest

from nereid.backends.triton.stub_processes import Process
from nereid.base.control_groups import ControlGroups
from nereid.base.tracing.request_log import FIRST_STAGES, LAST_STAGES, in_order
from nereid.base.units import parse_duration
from nereid.insight.observe import contention
from nereid.insight.observe.contention import Contention, Counts, ProcessCounts
from nereid.insight.observe.why import MEANINGS, explain, meaning
from tests.tables import cases

CALM = Contention(2, 1.0, 0.1, 0.1, 0, 0, 0.0)
USUAL = {"route": 1.0, "queue": 1.0, "decode": 1.0, "network": 5.0}


def line(outcome="ok", wait_ms=0.0, variant="v1", **stages):
    """Return the line of a request with usual stages, except those given."""
    times = USUAL | stages
    return {
        "outcome": outcome,
        "variant": variant,
        "ms": sum(times.values()),
        "stages_ms": times,
        "core_wait_ms": wait_ms,
        "images": [{"bytes": 1000}],
        **({"error": "it broke"} if outcome != "ok" else {}),
    }


def test_every_stage_has_a_meaning_and_a_next_step():
    """Those of a task are explained by it."""
    assert {*MEANINGS} == {*FIRST_STAGES, *LAST_STAGES}
    assert meaning("recognise")[0] == "recognising the lines is slow"
    assert meaning("shuffle") == ("the stage 'shuffle' is slow", "nereid tune")


def test_stages_of_a_task_are_between_those_of_all():
    stages = ["network", "crops", "queue", "boxes", "decode", "response"]

    assert in_order(stages) == ["queue", "decode", "crops", "boxes", "network", "response"]


@pytest.mark.parametrize("stage", ["queue", "network"])
def test_stage_of_the_excess_is_the_cause(stage):
    """The stage in which slow requests spend more than typical ones is named, not the largest one."""
    diagnosis = explain([line()] * 95 + [line(**{stage: 20.0})] * 5, CALM)

    assert (diagnosis.cause, diagnosis.why, diagnosis.next_step) == (stage, *MEANINGS[stage])
    assert diagnosis.slow_ms[stage] == 20
    assert diagnosis.typical_ms == USUAL


def test_slow_variant_is_named():
    mixed = [line(variant="v1")] * 60 + [line(variant="v2", network=5.5)] * 34

    assert explain(mixed + [line(variant="v2", network=50.0)] * 6, CALM).slow_variant == "v2"
    assert explain([line(variant="v2")] * 100, CALM).slow_variant == ""


@cases(
    no_requests=([], CALM, ""),
    one_request=([line()], CALM, ""),
    failures=([line()] * 90 + [line("unavailable")] * 10, CALM, "unavailable"),
    few_failures=([line()] * 990 + [line("unavailable")] * 10, CALM, ""),
    all_failed=([line("invalid_image")] * 9, CALM, "invalid_image"),
    busy_machine=([line(wait_ms=4.0)] * 50, Contention(2, 0.9, 1.1, 1.5, 0, 0, 0.0), "cores"),
    idle_again=([line(wait_ms=4.0)] * 50, Contention(2, 0.0, 0.1, 0.0, 0, 0, 0.0), "cores"),
    own_load=([line(wait_ms=4.0)] * 50, Contention(2, 1.9, 0.1, 1.5, 0, 0, 0.0), ""),
    limit_of_the_group=([line()] * 50, Contention(2, 1.0, 0.0, 0.1, 0, 0, 0.6), "cores"),
)
def test_causes(lines, kernel, cause):
    diagnosis = explain(lines, kernel)

    assert diagnosis.cause == cause
    assert diagnosis.why
    assert diagnosis.next_step
    assert diagnosis.requests == len(lines)


@cases(within=(30.0, 250.0, ""), beyond=(300.0, 250.0, "network"), no_objective=(30.0, 0.0, "network"))
def test_slow_requests_within_the_objective_are_not_a_problem(slow_ms, objective_ms, cause):
    """The slowest requests are always slower than the others; only the objective makes that a cause."""
    diagnosis = explain([line()] * 95 + [line(network=slow_ms)] * 5, CALM, objective_ms)

    assert diagnosis.cause == cause
    assert "network" in diagnosis.why
    assert diagnosis.next_step == MEANINGS["network"][1]


def test_rates_between_two_moments():
    stays, ended, new = Process(1, 5), Process(2, 5), Process(2, 900)
    before = {stays: ProcessCounts(10.0, 1.0, 100, 50), ended: ProcessCounts(50.0, 9.0, 900, 900)}
    after = {stays: ProcessCounts(11.5, 1.8, 250, 56), new: ProcessCounts(0.5, 0.2, 50, 4)}

    rates = contention.between(Counts(before, 2, 100.0, 5, 100, 0.0), Counts(after, 2, 103.0, 15, 120, 2.0))

    assert rates == Contention(2, 1.0, 0.5, pytest.approx(0.5), 100.0, 5.0, 0.5)


@cases(version_2=("0::/a.slice/b\n", "a.slice/b"), version_1=("4:cpu,cpuacct:/c\n0::/\n", "cpu/c"))
def test_throttling_is_that_of_the_own_group(membership, folder, tmp_path):
    (tmp_path / "membership").write_text(membership)
    groups = ControlGroups(tmp_path / "root", tmp_path / "membership")
    without = groups.throttling()
    (tmp_path / "root" / folder).mkdir(parents=True)
    (tmp_path / "root" / folder / "cpu.stat").write_text("usage_usec 7\nnr_periods 40\nnr_throttled 9\n")

    assert (without, groups.throttling()) == ((0, 0), (9, 40))


def test_durations():
    assert [parse_duration(text) for text in ("30s", "5m", "2h")] == [30, 300, 7200]


@pytest.mark.parametrize("text", ["", "5", "m", "0s", "-1s", "1.5h", "5 m", "٣s", "9999999s"])
def test_invalid_durations_are_refused(text):
    with pytest.raises(ValueError, match="expected a duration such as 30s, 5m or 1h, got"):
        parse_duration(text)
