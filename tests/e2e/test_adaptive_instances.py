"""Numbers of instances follow the load of a real `nereid serve`, and no request is lost."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from nereid.backends.triton.stub_processes import Stub
from nereid.insight.observe.status import status
from nereid.server.model_control import Instances, ModelControl
from tests.networks import parameter
from tests.routes import WATCHDOG_S, wait_until
from tests.supervised import Served, calling, serving, store_eyes

# Far longer than any number of changes takes, also while other programs use all cores.
CHANGES_S = 2 * WATCHDOG_S
# A change then lasts long enough for a process to be killed in it.
SLOW_START = "    def initialize(self, args):\n        time.sleep(1)\n"


def store_bounded(repository: Path, bounds: str, count: int = 1) -> None:
    """Store a model that sleeps for each image, so that more instances help on a busy machine, too."""
    parameters = parameter("nereid.instances", bounds) + parameter("nereid.instances_idle_s", 2)
    store_eyes(repository, "eyes", 10, 0.1, count, parameters)
    model = repository / "eyes" / "1" / "model.py"
    model.write_text(model.read_text().replace("    def initialize(self, args):\n", SLOW_START))


def number(served: Served) -> float:
    return served.metric("instances", model="eyes")


def is_settled(served: Served, count: int) -> bool:
    return number(served) == count == len(served.stubs("eyes"))


def loaded(served: Served) -> Instances:
    return ModelControl(served.server_info).instances("eyes")


@pytest.mark.nightly(minutes=2)
def test_instances_follow_the_load(tmp_path):
    repository = tmp_path / "repository"
    store_bounded(repository, "1-3")
    with serving(repository, tmp_path / "run") as served:
        with calling(served, "eyes", 6) as calls:
            wait_until(lambda: number(served) == 2, "two instances", CHANGES_S)
            two = {stub.process for stub in served.stubs("eyes")}
            wait_until(lambda: is_settled(served, 3), "three instances", CHANGES_S)
            # A change of the number alone keeps processes, and ends only when no request waits by chance.
            assert not two & {stub.process for stub in served.stubs("eyes")}
            shown = status(served.base, repository, served.server_info)
            assert [model.instances for model in shown.models] == ["3 of 1-3"]
        wait_until(lambda: is_settled(served, 1), "one instance", CHANGES_S)

        assert {*calls.since()} == {11.0}
        assert [served.metric("instance_changes_total", direction=way) for way in ("up", "down")] == [2, 2]
        assert served.metric("instance_change_failures_total") == 0
        assert "supervisor: instances of 'eyes': 1 → 2 of 1-3" in served.log
        assert "instances were busy for" in served.log
        assert served.metric("repairs_total") == 0


@pytest.mark.nightly(minutes=2)
def test_new_version_and_new_bounds_are_loaded_in_between(tmp_path):
    repository = tmp_path / "repository"
    store_bounded(repository, "1-2")
    config = repository / "eyes" / "config.pbtxt"
    with serving(repository, tmp_path / "run") as served:
        model_control = ModelControl(served.server_info)
        with calling(served, "eyes", 4) as calls:
            wait_until(lambda: len(served.stubs("eyes")) > 1, "a change", CHANGES_S)
            shutil.copytree(repository / "eyes" / "1", repository / "eyes" / "2")
            model_control.load("eyes")
            assert model_control.is_ready("eyes", 2)
            assert loaded(served) == Instances(2, False, 2)
            config.write_text(config.read_text().replace("1-2", "3-4"))
            wait_until(lambda: loaded(served).count >= 3, "the new lower bound", CHANGES_S)

        assert model_control.is_ready("eyes", 1)
        assert model_control.is_ready("eyes", 2)
        assert {*calls.since()} <= {11.0, 12.0}


@pytest.mark.nightly(minutes=2)
@pytest.mark.parametrize(
    ("bounds", "count", "clients", "goal"), [("2-3", 2, 6, 3), ("1-3", 3, 1, 2)], ids=["more", "fewer"]
)
def test_process_killed_during_a_change(tmp_path, bounds, count, clients, goal):
    store_bounded(tmp_path / "repository", bounds, count)
    with serving(tmp_path / "repository", tmp_path / "run") as served:
        with calling(served, "eyes", clients) as calls:
            stubs = wait_until(lambda: changing(served, count), "a change", CHANGES_S)
            last = [stub.process for stub in stubs if stub.instance == f"eyes_0_{count - 1}"]
            os.kill(min(last, key=lambda process: process.start_ticks).pid, signal.SIGKILL)
            wait_until(lambda: number(served) == goal and served.is_ready(), "the goal", CHANGES_S)
            back_s, repairs = time.monotonic(), served.metric("repairs_total")
            wait_until(lambda: len(calls.since(back_s)) > 50, "requests", CHANGES_S)

        assert {*calls.since(back_s)} == {11.0}
        assert served.metric("repairs_total") == repairs <= 1
        assert number(served) == loaded(served).count == goal
        assert served.is_ready()


def changing(served: Served, count: int) -> list[Stub]:
    """Return the processes while new ones start next to the old ones; otherwise none."""
    stubs = served.stubs("eyes")
    return stubs if len(stubs) > count else []
