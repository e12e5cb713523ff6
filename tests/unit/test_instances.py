"""Bounds, readings and decisions about numbers of instances: pages of Triton, recorded samples, tables."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nereid.base import prometheus_text
from nereid.base.config.instance_bounds import (
    InstanceBounds,
    parse_instance_count,
    read_bounds,
    with_instance_count,
)
from nereid.base.errors import InvalidConfig
from nereid.base.prometheus_text import MetricSamples
from nereid.server import autoscaling
from nereid.server.model_control import Instances
from nereid.server.ports import Ports
from nereid.server.run_dir import ServerInfo
from tests.tables import cases

GROUP = {"kind": "KIND_CPU", "count": 2}
EXPECTED = "expected LOW-HIGH with 1 <= LOW <= HIGH <= 64"


def document(bounds: str | None = "1-4", idle_s: str = "", **more) -> dict:
    texts = {"preset": "imagenet", "nereid.instances": bounds, "nereid.instances_idle_s": idle_s}
    parameters = {name: {"string_value": text} for name, text in texts.items() if text}
    return {"name": "net", "instance_group": [GROUP], "parameters": parameters, **more}


def test_bounds_and_idle_time_are_read():
    assert read_bounds(document("1-4")) == InstanceBounds(1, 4, 30.0)
    assert read_bounds(document(" 2-2 ", "1.5")) == InstanceBounds(2, 2, 1.5)
    assert read_bounds(document(None, "1.5")) is None
    assert read_bounds({}) is None


@cases(
    no_range=(document("4"), f"parameter 'nereid.instances': {EXPECTED}, such as \"1-4\", got '4'"),
    reversed=(document("4-1"), "got '4-1'"),
    zero=(document("0-4"), "got '0-4'"),
    too_many=(document("1-65"), "got '1-65'"),
    a_served_number=(document("3 of 1-4"), "got '3 of 1-4'"),
    other_digits=(document("١-٤"), EXPECTED),
    two_groups=(document(instance_group=[GROUP, GROUP]), "expected at most 1 instance_group, got 2"),
    an_ensemble=(document(ensemble_scheduling={}), "expected a model with instances, got an ensemble"),
    idle_for_no_time=(document(idle_s="0"), "expected a number of seconds above 0, got '0'"),
)
def test_invalid_bounds_are_named(config, message):
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        read_bounds(config)


@cases(("number", "count"), below=(0, 1), inside=(3, 3), above=(9, 4))
def test_chosen_number_is_within_the_bounds(number, count):
    """Only the number and the parameter change, so that Triton starts all instances anew."""
    config = document()

    new_config = with_instance_count(config, InstanceBounds(1, 4), number)

    text = f"{count} of 1-4"
    parameters = {**config["parameters"], "nereid.instances": {"string_value": text}}
    assert new_config == {**config, "instance_group": [{**GROUP, "count": count}], "parameters": parameters}
    assert [parse_instance_count(word) for word in (text, "", "1-4", "x of 1-4")] == [count, None, None, None]
    assert config == document()
    del config["instance_group"]
    assert with_instance_count(config, InstanceBounds(1, 4), number)["instance_group"] == [{"count": count}]


PAGE = """# TYPE nv_inference_request_success counter
nv_inference_request_success{model="eyes",version="1"} 124
nv_inference_request_success{model="eyes",version="2"} 8
nv_inference_exec_count{model="eyes",version="1"} 62
nv_inference_compute_input_duration_us{model="eyes",version="1"} 1000
nv_inference_compute_infer_duration_us{model="eyes",version="1"} 25000000
nv_inference_compute_output_duration_us{model="eyes",version="1"} 2000
nv_inference_pending_request_count{model="eyes",version="1"} 7
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.62
nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 80000
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 20000
nv_gpu_utilization{gpu_uuid="GPU-2"} 0.1
nv_gpu_memory_total_bytes{gpu_uuid="GPU-2"} 80000
nv_gpu_memory_used_bytes{gpu_uuid="GPU-2"} 70000
"""


def test_loads_are_those_of_the_interval():
    """Each request of a batch counts the time of the whole batch; the busiest version counts."""
    before = MetricSamples.parse(PAGE)
    more = PAGE.replace("} 124", "} 132").replace("} 62", "} 66").replace("} 25000000", "} 41000000")
    after = MetricSamples.parse(more)

    assert autoscaling.read_loads(after, after - before, 2.0) == {"eyes": (7, 4.0)}
    assert autoscaling.read_loads(after, after - after, 2.0) == {"eyes": (7, 0.0)}


def test_gpus_count_like_the_fullest():
    assert autoscaling.read_gpu(MetricSamples.parse(PAGE)) == autoscaling.GpuSample(0.62, 10000, 70000)
    assert autoscaling.read_gpu(MetricSamples.parse("")) is None


class Proc:
    def __init__(self, folder) -> None:
        self.folder, self.now_s = folder, 0.0
        self.cpu = autoscaling.CpuWait(folder, lambda: self.now_s)

    def wait(self, pid: int, *seconds: float) -> None:
        for thread, wait_s in enumerate(seconds):
            folder = self.folder / str(pid) / "task" / str(pid + thread)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "schedstat").write_text(f"123 {round(wait_s * 1e9)} 4\n")

    def press(self, seconds: float) -> None:
        (self.folder / "pressure").mkdir(exist_ok=True)
        text = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={round(seconds * 1e6)}\nfull total=0\n"
        (self.folder / "pressure" / "cpu").write_text(text)

    def after(self, seconds: float, pids: list[int]) -> float:
        self.now_s += seconds
        return self.cpu.read(pids)


def test_wait_for_a_core_is_the_mean_of_the_processes(tmp_path):
    proc = Proc(tmp_path)
    proc.wait(10, 1.0, 1.0)
    proc.wait(20, 5.0)

    assert proc.after(0.2, [10, 20]) == 0.0
    proc.wait(10, 1.1, 1.1)
    assert proc.after(0.5, [10, 20]) == pytest.approx(0.2)
    proc.wait(10, 1.2, 1.2)
    proc.wait(30, 9.0)
    assert proc.after(5.0, [10, 30, 40]) == pytest.approx(0.04)
    proc.wait(10, 9.0, 9.0)
    assert proc.after(0.5, [10]) == 1.0


def test_pressure_of_the_machine_replaces_missing_waits(tmp_path):
    """A kernel may count neither; then no wait is known."""
    proc = Proc(tmp_path)

    assert [proc.after(0.5, [10]), proc.after(0.5, [10])] == [0.0, 0.0]
    proc.press(3.0)
    proc = Proc(tmp_path)
    assert proc.after(0.5, []) == 0.0
    proc.press(3.25)
    assert proc.after(0.5, []) == pytest.approx(0.5)


COUNTED = """nv_inference_request_success{{model="eyes",version="1"}} {0}
nv_inference_exec_count{{model="eyes",version="1"}} {0}
nv_inference_compute_infer_duration_us{{model="eyes",version="1"}} {0}000000
"""


def test_what_a_server_did_before_the_first_look_is_no_load(monkeypatch):
    health = SimpleNamespace(record_instances=lambda instances: None)
    server_info = ServerInfo(1, "127.0.0.1", Ports(1, 2, 3), "/r", "cpu", "")
    controller = autoscaling.InstanceController(server_info, health, lambda name: [], None, print)
    samples, counts = [], iter([1000, 1000, 1002])
    monkeypatch.setattr(controller, "_bounds", {"eyes": InstanceBounds(1, 4)})
    monkeypatch.setattr(controller._model_control, "instances", lambda name: Instances(2, False, None))
    monkeypatch.setattr(prometheus_text, "fetch", lambda url, timeout_s: COUNTED.format(next(counts)))
    monkeypatch.setattr(autoscaling.InstanceAutoscaler, "decide", lambda self, sample: samples.append(sample))

    for _ in range(3):
        controller.step()

    assert [sample.busy > 0 for sample in samples] == [False, False, True]


# Samples of a model that needs 0.2 s for an image, with bounds 1-4, 3 s of idle time, and five clients. In
# `load_step` it sleeps; in `full_processor` it computes, while other programs use both cores. By hand:
# `nereid serve` with `InstanceAutoscaler.look` recorded (AMD EPYC, 2 cores, 2026-11-26).
RECORDED = json.loads(Path(__file__).with_name("instance_samples.json").read_text())
MB, GB = 1e6, 1e9
BOUNDS = InstanceBounds(1, 4, 3.0)
IDLE = autoscaling.LoadSample(0.0, 2, 0.0, 0.0, 0.0, 8 * GB, 50 * MB)
WAITING = replace(IDLE, waiting=3.0, busy=2.0)
GPU = autoscaling.GpuSample(0.5, 40 * GB, 4 * GB)


def recorded(name: str) -> list[autoscaling.LoadSample]:
    return [
        autoscaling.LoadSample(at, count, waiting, busy, cpu_wait, free * MB, size * MB)
        for at, count, waiting, busy, cpu_wait, free, size in RECORDED[name]
    ]


class Driver:
    def __init__(self, count: int = 2, bounds: InstanceBounds = BOUNDS) -> None:
        self.autoscaler, self.now_s, self.count = autoscaling.InstanceAutoscaler(bounds), 100.0, count
        self.changes: list[int] = []

    def show(self, sample: autoscaling.LoadSample, seconds: float) -> list[int]:
        """Show a sample for some seconds, carry out each decision immediately; returns the numbers."""
        before = len(self.changes)
        for _ in range(round(seconds / 0.2)):
            self.now_s += 0.2
            decision = self.autoscaler.decide(replace(sample, at=self.now_s, instances=self.count))
            if decision:
                self.count = decision.count
                self.changes.append(decision.count)
                self.autoscaler.record_change(self.now_s)
        return self.changes[before:]


def test_recorded_load_step_is_followed():
    autoscaler, samples, decisions = autoscaling.InstanceAutoscaler(BOUNDS), recorded("load_step"), []

    for sample, following in zip(samples, [*samples[1:], samples[-1]], strict=True):
        if decision := autoscaler.decide(sample):
            decisions.append((sample.at, decision.count))
            autoscaler.record_change(following.at - 0.02)

    assert decisions == [(4.86, 2), (9.65, 3), (15.04, 4), (22.76, 3), (30.07, 2), (37.26, 1)]


def test_recorded_full_processor_gets_no_instance():
    """Requests wait all the time, and another instance would wait for a core, too."""
    autoscaler = autoscaling.InstanceAutoscaler(BOUNDS)

    assert {autoscaler.decide(sample) for sample in recorded("full_processor")} == {None}
    assert autoscaler.blocked.startswith("its processes wait for a core ")


SHORT_S = 0.2 * (autoscaling.ADD_SAMPLES - 1)


@cases(
    short_waits_change_nothing=((), [(WAITING, SHORT_S, []), (replace(IDLE, busy=2.0), 0.2, [])] * 20),
    # The next instance comes when the old ones have ended, and after new samples.
    pause=((2,), [(WAITING, 1.0, [3]), (WAITING, autoscaling.COOLDOWN_S, []), (WAITING, 1.0, [4])]),
    busy_ones_are_not_dropped=(
        (3,),
        [(replace(IDLE, busy=1.1), 30.0, []), (replace(IDLE, busy=0.9), 3.2, [2])],
    ),
    # New instances start next to the old ones, also if they are fewer.
    none_is_dropped_without_memory=((4,), [(replace(IDLE, free_bytes=0.1 * GB), 20.0, []), (IDLE, 3.2, [3])]),
    at_the_top=((2, InstanceBounds(1, 2, 3.0)), [(WAITING, 20.0, [])]),
    at_the_bottom=((2, InstanceBounds(2, 4, 3.0)), [(IDLE, 20.0, [])]),
    below_the_bounds=((1, InstanceBounds(3, 4, 3.0)), [(IDLE, 20.0, [3])]),
    above_the_bounds=((5, InstanceBounds(1, 2, 100.0)), [(WAITING, 20.0, [2])]),
)
def test_number_follows_the_samples_within_the_bounds(start, phases):
    driver = Driver(*start)

    counts = [driver.show(sample, seconds) for sample, seconds, _ in phases]

    assert counts == [changes for *_, changes in phases]


@cases(
    memory=(
        replace(WAITING, free_bytes=GB, instance_bytes=0.3 * GB),
        "expected 1.1 GB of free memory, got 1.0 GB",
    ),
    processor=(replace(WAITING, cpu_wait=0.3), "its processes wait for a core 30% of the time"),
    GPU=(replace(WAITING, gpu=replace(GPU, busy=0.95)), "the GPU is busy 95% of the time"),
    memory_of_the_GPU=(
        replace(WAITING, gpu=replace(GPU, free_bytes=6 * GB)),
        "expected 7.5 GB of free memory of the GPU, got 6.0 GB",
    ),
)
def test_nothing_is_added_without_room(sample, blocked):
    driver = Driver()

    assert driver.show(sample, 5.0) == []
    assert driver.autoscaler.blocked == blocked
    driver.show(IDLE, 0.2)
    assert driver.autoscaler.blocked == ""
    assert driver.show(replace(WAITING, gpu=GPU), 1.0) == [3]


@pytest.mark.parametrize("refusals", [1, 3])
def test_refused_changes_are_repeated_more_and_more_seldom(refusals):
    driver = Driver()

    for _ in range(refusals):
        driver.autoscaler.record_change(driver.now_s, is_refused=True)

    assert driver.show(WAITING, autoscaling.REFUSED_DELAYS_S[refusals - 1]) == []
    assert driver.show(WAITING, 1.2) == [3]
