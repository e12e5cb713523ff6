"""Decisions about numbers of instances: replayed samples of a real server, and tables."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nereid.base.config.instance_bounds import InstanceBounds
from nereid.server.instances.instance_decision import (
    ADD_SAMPLES,
    COOL_S,
    REFUSED_DELAYS_S,
    GpuSample,
    InstanceDecider,
    Sample,
)
from tests.tables import cases

# Samples of a model that needs 0.2 s for an image, with bounds 1-4, 3 s of idle time, and five clients. In
# `load_step` it sleeps; in `full_processor` it computes, while other programs use both cores. By hand:
# `nereid serve` with `InstanceDecider.look` recorded (AMD EPYC, 2 cores, 2026-11-26).
RECORDED = json.loads(Path(__file__).with_name("instance_samples.json").read_text())
MB, GB = 1e6, 1e9
BOUNDS = InstanceBounds(1, 4, 3.0)
IDLE = Sample(0.0, 2, 0.0, 0.0, 0.0, 8 * GB, 50 * MB)
WAITING = replace(IDLE, waiting=3.0, busy=2.0)
GPU = GpuSample(0.5, 40 * GB, 4 * GB)


def recorded(name: str) -> list[Sample]:
    return [
        Sample(at_s, count, waiting, busy, cpu_wait, free * MB, each * MB)
        for at_s, count, waiting, busy, cpu_wait, free, each in RECORDED[name]
    ]


class Driver:
    def __init__(self, bounds: InstanceBounds = BOUNDS, count: int = 2) -> None:
        self.decider, self.now_s, self.count = InstanceDecider(bounds), 100.0, count
        self.changes: list[int] = []

    def show(self, sample: Sample, seconds: float) -> list[int]:
        """Show a sample for some seconds, carry out each decision immediately; returns the numbers."""
        before = len(self.changes)
        for _ in range(round(seconds / 0.2)):
            self.now_s += 0.2
            decision = self.decider.look(replace(sample, at_s=self.now_s, instances=self.count))
            if decision:
                self.count = decision.count
                self.changes.append(decision.count)
                self.decider.changed(self.now_s)
        return self.changes[before:]


def test_recorded_load_step_is_followed():
    decider, samples, found = InstanceDecider(BOUNDS), recorded("load_step"), []

    for sample, following in zip(samples, [*samples[1:], samples[-1]], strict=True):
        if decision := decider.look(sample):
            found.append((sample.at_s, decision.count))
            decider.changed(following.at_s - 0.02)

    assert found == [(4.86, 2), (9.65, 3), (15.04, 4), (22.76, 3), (30.07, 2), (37.26, 1)]


def test_recorded_full_processor_gets_no_instance():
    """Requests wait all the time, and another instance would wait for a core, too."""
    decider = InstanceDecider(BOUNDS)

    decisions = [decider.look(sample) for sample in recorded("full_processor")]

    assert set(decisions) == {None}
    assert decider.blocked.startswith("its processes wait for a core ")


def test_short_waits_change_nothing():
    driver = Driver()

    for _ in range(20):
        assert driver.show(WAITING, 0.2 * (ADD_SAMPLES - 1)) == []
        assert driver.show(replace(IDLE, busy=2.0), 0.2) == []


def test_pause_after_a_change():
    """The next instance comes when the old ones have ended, and after new samples."""
    driver = Driver()

    assert driver.show(WAITING, 1.0) == [3]
    assert driver.show(WAITING, COOL_S) == []
    assert driver.show(WAITING, 1.0) == [4]


def test_busy_instances_are_not_dropped():
    driver = Driver(count=3)

    assert driver.show(replace(IDLE, busy=1.1), 30.0) == []
    assert driver.show(replace(IDLE, busy=0.9), 7.0)[:1] == [2]


@cases(
    ("bounds", "count", "sample", "changes"),
    {
        "at the top": (InstanceBounds(1, 2, 3.0), 2, WAITING, []),
        "at the bottom": (InstanceBounds(2, 4, 3.0), 2, IDLE, []),
        "below": (InstanceBounds(3, 4, 3.0), 1, IDLE, [3]),
        "above": (InstanceBounds(1, 2, 100.0), 5, WAITING, [2]),
    },
)
def test_numbers_stay_within_the_bounds(bounds, count, sample, changes):
    assert Driver(bounds, count).show(sample, 20.0) == changes


@cases(
    ("sample", "blocked"),
    {
        "memory": (
            replace(WAITING, free_bytes=GB, instance_bytes=0.3 * GB),
            "expected 1.1 GB of free memory, got 1.0 GB",
        ),
        "processor": (replace(WAITING, cpu_wait=0.3), "its processes wait for a core 30% of the time"),
        "GPU": (replace(WAITING, gpu=replace(GPU, busy=0.95)), "the GPU is busy 95% of the time"),
        "memory of the GPU": (
            replace(WAITING, gpu=replace(GPU, free_bytes=6 * GB)),
            "expected 7.5 GB of free memory of the GPU, got 6.0 GB",
        ),
    },
)
def test_nothing_is_added_without_room(sample, blocked):
    driver = Driver()

    assert driver.show(sample, 5.0) == []
    assert driver.decider.blocked == blocked
    driver.show(IDLE, 0.2)
    assert driver.decider.blocked == ""
    assert driver.show(replace(WAITING, gpu=GPU), 1.0) == [3]


def test_nothing_is_dropped_without_memory():
    """New instances start next to the old ones, also if they are fewer."""
    driver = Driver(count=4)

    assert driver.show(replace(IDLE, free_bytes=0.1 * GB), 20.0) == []
    assert driver.show(IDLE, 3.2) == [3]


@pytest.mark.parametrize("refusals", [1, 3])
def test_refused_changes_are_repeated_more_and_more_seldom(refusals):
    driver = Driver()

    for _ in range(refusals):
        driver.decider.changed(driver.now_s, is_refused=True)

    assert driver.show(WAITING, REFUSED_DELAYS_S[refusals - 1]) == []
    assert driver.show(WAITING, 1.2) == [3]
