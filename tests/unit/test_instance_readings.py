"""Readings for samples: a page of Triton, and a folder that looks like `/proc`."""

from types import SimpleNamespace

import pytest

from nereid.base import metrics_page
from nereid.base.config.instance_bounds import InstanceBounds
from nereid.base.metrics_page import Snapshot
from nereid.server.control import Instances
from nereid.server.instances.instance_controller import InstanceController
from nereid.server.instances.instance_decision import GpuSample, InstanceDecider
from nereid.server.instances.instance_readings import CpuWait, Load, read_gpu, read_loads
from nereid.server.ports import Ports
from nereid.server.run_dir import ServerRecord

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
    before = Snapshot.parse(PAGE)
    after = Snapshot.parse(
        PAGE.replace("} 124", "} 132").replace("} 62", "} 66").replace("} 25000000", "} 41000000")
    )

    assert read_loads(after, after - before, 2.0) == {"eyes": Load(7, 4.0)}
    assert read_loads(after, after - after, 2.0) == {"eyes": Load(7, 0.0)}


def test_gpus_count_like_the_fullest():
    assert read_gpu(Snapshot.parse(PAGE)) == GpuSample(0.62, 10000, 70000)
    assert read_gpu(Snapshot.parse("")) is None


class Proc:
    def __init__(self, folder) -> None:
        self.folder = folder

    def wait(self, pid: int, *seconds: float) -> None:
        for thread, each in enumerate(seconds):
            folder = self.folder / str(pid) / "task" / str(pid + thread)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "schedstat").write_text(f"123 {round(each * 1e9)} 4\n")

    def press(self, seconds: float) -> None:
        (self.folder / "pressure").mkdir(exist_ok=True)
        text = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={round(seconds * 1e6)}\nfull total=0\n"
        (self.folder / "pressure" / "cpu").write_text(text)


class Waits:
    def __init__(self, folder) -> None:
        self.now_s = 0.0
        self.cpu = CpuWait(folder, lambda: self.now_s)

    def after(self, seconds: float, pids: list[int]) -> float:
        self.now_s += seconds
        return self.cpu.read(pids)


def test_wait_for_a_core_is_the_mean_of_the_processes(tmp_path):
    proc, waits = Proc(tmp_path), Waits(tmp_path)
    proc.wait(10, 1.0, 1.0)
    proc.wait(20, 5.0)

    assert waits.after(0.2, [10, 20]) == 0.0
    proc.wait(10, 1.1, 1.1)
    assert waits.after(0.5, [10, 20]) == pytest.approx(0.2)
    proc.wait(10, 1.2, 1.2)
    proc.wait(30, 9.0)
    assert waits.after(5.0, [10, 30, 40]) == pytest.approx(0.04)
    proc.wait(10, 9.0, 9.0)
    assert waits.after(0.5, [10]) == 1.0


def test_pressure_of_the_machine_replaces_missing_waits(tmp_path):
    """A kernel may count neither; then no wait is known."""
    proc, waits = Proc(tmp_path), Waits(tmp_path)

    assert [waits.after(0.5, [10]), waits.after(0.5, [10])] == [0.0, 0.0]
    proc.press(3.0)
    waits = Waits(tmp_path)
    assert waits.after(0.5, []) == 0.0
    proc.press(3.25)
    assert waits.after(0.5, []) == pytest.approx(0.5)


COUNTED = """nv_inference_request_success{{model="eyes",version="1"}} {0}
nv_inference_exec_count{{model="eyes",version="1"}} {0}
nv_inference_compute_infer_duration_us{{model="eyes",version="1"}} {0}000000
"""


def test_what_a_server_did_before_the_first_look_is_no_load(monkeypatch):
    health = SimpleNamespace(instances_seen=lambda found: None)
    record = ServerRecord(1, "127.0.0.1", Ports(1, 2, 3), "/r", "cpu", "")
    controller = InstanceController(record, health, lambda name: [], None, print)
    samples, counts = [], iter([1000, 1000, 1002])
    monkeypatch.setattr(controller, "_bounds", {"eyes": InstanceBounds(1, 4)})
    monkeypatch.setattr(controller._control, "instances", lambda name: Instances(2, False, None))
    monkeypatch.setattr(metrics_page, "fetch", lambda url, timeout_s: COUNTED.format(next(counts)))
    monkeypatch.setattr(InstanceDecider, "look", lambda self, sample: samples.append(sample))

    for _ in range(3):
        controller.step()

    assert [sample.busy > 0 for sample in samples] == [False, False, True]
