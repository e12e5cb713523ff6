"""The supervisor's decisions, as tables of events and commands."""

from dataclasses import replace

import pytest

from nereid.backends.triton.stub_processes import Process, Stub
from nereid.server.supervision.supervisor import (
    DEAD_AFTER_S,
    KILL_AFTER_S,
    MAX_ACCEPTED_S,
    MAX_ATTEMPTS,
    MAX_DEAD_PROCESSES,
    MAX_PROBES,
    POLL_MODE_DELAY_S,
    REPAIR_DELAYS_S,
    Command,
    End,
    FindStubs,
    Kill,
    Log,
    Probe,
    ProbeSoon,
    ReadIndex,
    Reload,
    ReportBroken,
    Supervisor,
)
from tests.tables import cases

FIRST = Stub(Process(10, 100), "eyes", 1, "eyes_0_0")
SECOND = Stub(Process(11, 101), "eyes", 1, "eyes_0_1")
OTHER = Stub(Process(12, 102), "other", 1, "other_0_0")
NEW = replace(FIRST, process=Process(20, 500))
NEXT = replace(SECOND, process=Process(21, 501))
LAST = replace(FIRST, process=Process(30, 900))
BOTH = (FIRST, SECOND)
LIVES, STOPPED, ENDED = "S", "T", "Z"
READY = {"eyes": {1}, "other": {1}}
UNHEALTHY = """500 {"error":"Stub process 'eyes_0_0' is not healthy."}"""
DEAD = ReportBroken({"eyes": "the process of 'eyes_0_0' is dead"})
FAILED = ReportBroken({"eyes": "the device of 'eyes_0_0' failed"})
FEWER = "model 'eyes' has 1 instance(s) instead of 2: the repair started no new eyes_0_1"
BY_PID, BY_PROBE = Reload("eyes", frozenset({1}), "pid"), Reload("eyes", frozenset({1}), "probe")


class Driver:
    def __init__(self, mode: str = "explicit", stubs: tuple[Stub, ...] = BOTH) -> None:
        self.supervisor, self.now_s = Supervisor(mode), 1000.0
        self.states = {stub.process: LIVES for stub in stubs}
        self.found = stubs
        self.see()
        self.round()

    def see(self, find: bool = True, later_s: float = 0.0, **states: str) -> list[Command]:
        """Observe the processes; with new states, by pid, of some of them."""
        self.now_s += later_s
        for name, state in states.items():
            pid = int(name.removeprefix("pid"))
            self.states |= {process: state for process in self.states if process.pid == pid}
        living = tuple(stub for stub in self.found if self.states.get(stub.process) != ENDED)
        return self.supervisor.see(self.states, living if find else None, (), self.now_s)

    def report(self, *pids: int) -> list[Command]:
        return self.supervisor.see(self.states, self.found, pids, self.now_s)

    def round(self, *models: str) -> list[Command]:
        """Start a round of probes; without models, nothing takes images."""
        return self.supervisor.start_round(READY, models, models)

    def die(self, stub: Stub = FIRST) -> list[Command]:
        """Let a stub die and return the commands once it is known to be dead."""
        self.see(**{f"pid{stub.process.pid}": ENDED})
        return self.see(later_s=2 * DEAD_AFTER_S)

    def repair(self, refusal: str = "", took_s: float = 0.5) -> list[Command]:
        """Have the index read and the model loaded again; returns the commands of the end."""
        (order,) = self.start_repair()
        assert isinstance(order, Reload)
        return self.end_repair(refusal, took_s)

    def start_repair(self, ready: dict[str, set[int]] = READY) -> list[Command]:
        return self.supervisor.start_repair(ready, self.now_s)

    def end_repair(self, refusal: str = "", took_s: float = 0.0) -> list[Command]:
        self.now_s += took_s
        return self.supervisor.end_repair(refusal, self.now_s)

    def interrupt_repair(self) -> list[Command]:
        return self.supervisor.interrupt_repair(self.now_s)

    def change_instances(self) -> None:
        """Have Triton start new instances of the model for all old ones."""
        assert self.supervisor.change_instances("eyes", [stub.process for stub in BOTH], self.now_s) == []

    def add(self, *stubs: Stub) -> None:
        self.found, self.states = (*self.found, *stubs), self.states | {stub.process: LIVES for stub in stubs}
        self.see()

    def judge(
        self, probe: Probe, failure: str | None = UNHEALTHY, started_at: float | None = None
    ) -> list[Command]:
        """End a probe that began now or at a time."""
        start = self.now_s if started_at is None else started_at
        return self.supervisor.end_probe(probe, failure, start, self.now_s)

    def replace_all(self, *stubs: Stub) -> None:
        self.found, self.states = stubs, {stub.process: LIVES for stub in stubs}
        self.see()


@pytest.fixture
def driver():
    return Driver()


def test_dead_stub_is_confirmed_reported_and_repaired_once(driver):
    """A zombie that stays is observed again; then the index is read and the model loaded again."""
    assert driver.see(find=False, pid10=ENDED) == [ReportBroken({})]
    assert driver.see(find=False, later_s=2 * DEAD_AFTER_S) == [FindStubs()]
    assert driver.see() == [DEAD, ReadIndex()]
    assert driver.see() == [DEAD]
    assert driver.start_repair() == [BY_PID]
    assert driver.see() == [ReportBroken({"eyes": "is being loaded again"})]
    driver.add(NEW, NEXT)
    done = driver.end_repair(took_s=0.5)

    assert done == [Log("model 'eyes' version 1 had a dead stub (found by pid): loaded again in 0.5 s")]
    assert driver.see() == [ReportBroken({})]


@pytest.mark.parametrize("ready", [{}, {"eyes": {2}}], ids=["unloaded", "another version"])
def test_stub_of_an_unserved_version_is_not_repaired(driver, ready):
    """The index decides, also if it was read only for the repair; the next observation tries again."""
    assert driver.die() == [DEAD, ReadIndex()]
    assert driver.start_repair(ready) == []
    assert driver.see() == [DEAD, ReadIndex()]
    assert driver.interrupt_repair() == []
    assert driver.see() == [DEAD, ReadIndex()]
    driver.interrupt_repair()
    driver.supervisor.start_round(ready, (), ())
    assert driver.see() == [ReportBroken({})]


@pytest.mark.parametrize("cause", ["dead stub", "failed device"])
def test_refused_reload_is_tried_again_after_growing_waits(cause):
    """Until then, the processes of a failed device live on, and reject requests with the reason."""
    driver = Driver(stubs=(FIRST,))
    broken = DEAD if cause == "dead stub" else FAILED
    first = driver.die() if broken is DEAD else driver.report(FIRST.process.pid)
    assert first == [broken, ReadIndex()]
    for delay_s in REPAIR_DELAYS_S:
        (line,) = driver.repair(refusal="bad file", took_s=0.0)
        refused = f"model 'eyes' version 1 has a {cause} and cannot be loaded: bad file; next try in"
        assert line == Log(f"{refused} {delay_s:g} s")
        assert driver.see(later_s=delay_s - 0.01) == [broken]
        assert driver.see(later_s=0.02) == [broken, ReadIndex()]


def test_calm_time_resets_the_waits(driver):
    """After a repair that lasted, the next failure waits for the first delay again."""
    for stub in (FIRST, NEW):
        driver.die(stub)
        driver.repair()
        driver.replace_all(SECOND, NEW)
        driver.see(later_s=2.0 if stub is FIRST else 60.0)
    driver.replace_all(LAST)
    driver.die(LAST)

    (line,) = driver.repair(refusal="bad file")

    assert isinstance(line, Log)
    assert line.text.endswith("next try in 1 s")


def test_instance_that_a_repair_does_not_start_again_stays_gone(driver):
    """The load may start fewer instances than before: the machine may serve more models meanwhile."""
    assert driver.die(SECOND) == [ReportBroken({"eyes": "the process of 'eyes_0_1' is dead"}), ReadIndex()]
    driver.start_repair()
    driver.add(NEW)

    done = driver.end_repair()

    assert done[1:] == [Log(FEWER)]
    assert driver.see() == [ReportBroken({})]
    assert driver.see(later_s=max(REPAIR_DELAYS_S) + 1)[-1] == ReportBroken({})


def test_polled_instance_that_a_repair_does_not_start_again_is_given_up():
    """Triton loads by itself: only the next look tells whether it started new instances."""
    driver = Driver("poll")
    driver.die(SECOND)
    driver.repair()
    driver.add(NEW)

    assert driver.see(later_s=POLL_MODE_DELAY_S + 1)[-1] == ReadIndex()
    assert driver.start_repair() == [Log(FEWER)]
    assert driver.see()[-1] == ReportBroken({})


def test_repairs_that_do_not_help_wait_longer_and_say_so(driver):
    """A stub dies again after each repair; the longest wait does not count as a calm time."""
    stub, waits = FIRST, []
    delays_s = [min(wait_s, MAX_ACCEPTED_S) for wait_s in REPAIR_DELAYS_S]
    for number, delay_s in enumerate(delays_s):
        driver.die(stub)
        driver.start_repair()
        stub = replace(FIRST, process=Process(50 + number, 1000 + number))
        driver.replace_all(stub)
        (line,) = driver.end_repair()
        waits.append(line.text.partition("; ")[2])
        driver.see(later_s=delay_s)

    longer = [f"it was repaired recently, so the next repair waits for {wait_s:g} s" for wait_s in delays_s]
    assert waits == ["", *longer[1:]]


def test_other_models_do_not_wait_for_a_refused_one():
    driver = Driver(stubs=(*BOTH, OTHER))
    driver.see(pid10=ENDED, pid12=ENDED)
    driver.see(later_s=2 * DEAD_AFTER_S)
    (first,) = driver.start_repair()

    commands = driver.end_repair("bad file")

    assert isinstance(first, Reload)
    assert commands[1:] == [ReadIndex()]
    assert driver.start_repair() == [Reload(({"eyes", "other"} - {first.model}).pop(), first.versions, "pid")]


def test_polled_repository_gets_time_until_the_next_look():
    """In the poll mode Triton loads by itself, so the next try waits for at least two of its checks."""
    driver = Driver("poll", stubs=(FIRST,))
    assert driver.die() == [DEAD, ReadIndex()]
    driver.repair(took_s=0.0)

    assert driver.see(later_s=POLL_MODE_DELAY_S - 1) == [DEAD]
    assert driver.see(later_s=1.1) == [DEAD, ReadIndex()]


def test_stub_with_a_failed_device_is_replaced(driver):
    assert driver.report(FIRST.process.pid) == [FAILED, ReadIndex()]
    assert driver.start_repair() == [Reload("eyes", frozenset({1}), "device")]
    driver.add(NEW, NEXT)
    (line,) = driver.end_repair(took_s=0.5)

    assert line == Log("model 'eyes' version 1 had a failed device: loaded again in 0.5 s")
    assert driver.see() == [ReportBroken({})]
    assert driver.see(later_s=KILL_AFTER_S + 1)[0] == Kill(FIRST.process)


def test_report_of_an_unknown_process_repairs_nothing(driver):
    """It may be one that Triton has ended already; a later process with its pid is not the same."""
    assert driver.report(NEW.process.pid) == [ReportBroken({})]
    driver.replace_all(SECOND, NEW)
    assert driver.see() == [ReportBroken({})]


def test_server_without_model_control_is_restarted():
    """In the mode `none` a dead stub needs a restart; the old stubs do not delay the stop."""
    driver = Driver("none")
    driver.die()

    reason = "a stub of 'eyes' died, and this mode does not allow loading models"
    assert driver.start_repair() == [End(reason)]
    assert driver.see() == [DEAD]
    assert driver.supervisor.is_emptied(BOTH)


def test_ended_server_ends_the_supervision_once(driver):
    assert [driver.supervisor.end() for _ in range(2)] == [[End("")], []]


def test_each_image_model_has_one_probe_at_a_time(driver):
    assert driver.round("eyes", "other") == [Probe("eyes", 1), Probe("other", 2)]
    assert driver.round("eyes", "other") == []
    driver.judge(Probe("eyes", 1), None)
    assert driver.round("eyes", "other") == [Probe("eyes", 3)]


def test_second_verdict_on_an_instance_kills_and_repairs_it(driver):
    """The first verdict repeats the probe; after the second the hanging process goes first."""
    (probe,) = driver.round("eyes")
    (again,) = driver.judge(probe)

    assert again == Probe("eyes", 1, attempt=2)
    assert driver.judge(again) == [ReadIndex()]
    assert driver.start_repair() == [Kill(FIRST.process), BY_PROBE]
    (line,) = driver.end_repair(took_s=2.0)
    assert line == Log("model 'eyes' version 1 had a dead stub (found by probe): loaded again in 2.0 s")
    assert driver.see(later_s=60) == [*(Kill(stub.process) for stub in BOTH), ReportBroken({})]


def test_verdicts_of_different_instances_end_with_the_attempts(driver):
    (probe,) = driver.round("eyes")
    for number in range(MAX_ATTEMPTS - 1):
        failure = UNHEALTHY.replace("eyes_0_0", f"eyes_0_{number}")
        (probe,) = driver.judge(probe, failure)

    assert driver.judge(probe, UNHEALTHY.replace("eyes_0_0", "eyes_0_9")) == []
    assert driver.round("eyes") == [Probe("eyes", 2)]


def test_instance_name_of_several_versions_kills_no_process():
    """If two versions have an instance of the name, the one that hangs is unknown: both are loaded again."""
    twin = replace(FIRST, process=Process(13, 103), version=2)
    driver = Driver(stubs=(*BOTH, twin))
    ready = {"eyes": {1, 2}}
    driver.supervisor.start_round(ready, ["eyes"], ["eyes"])
    for attempt in (1, 2):
        driver.judge(Probe("eyes", 1, attempt))

    assert driver.start_repair(ready) == [Reload("eyes", frozenset({1, 2}), "probe")]


def test_verdict_on_a_model_that_was_unloaded_repairs_nothing(driver):
    (probe,) = driver.round("eyes")
    for attempt in (1, 2):
        driver.judge(Probe(probe.model, probe.number, attempt))

    assert driver.start_repair({}) == [Kill(FIRST.process)]
    assert driver.see() == [ReportBroken({})]


def test_stopped_stub_is_probed_by_several_and_judged_by_one_verdict(driver):
    driver.round("eyes")
    assert driver.see(pid10=STOPPED) == [ReportBroken({}), ProbeSoon()]
    assert driver.round("eyes") == [Probe("eyes", 2)]

    assert driver.judge(Probe("eyes", 2)) == [ReadIndex()]
    assert driver.start_repair() == [Kill(FIRST.process), BY_PROBE]


@cases(
    stopped=(STOPPED, "timed out", [ReadIndex()], [Kill(FIRST.process), BY_PROBE]),
    running=(LIVES, "timed out", [], []),
    no_instance_is_named=(LIVES, "503 unavailable", [], []),
)
def test_late_probe_is_a_verdict_on_a_stopped_stub(state, failure, answer, commands, driver):
    """Triton's thread hangs if a process is stopped while it holds the lock of their shared memory."""
    driver.round("eyes")
    driver.see(pid10=state)
    start_s = driver.now_s
    driver.now_s += 5.0

    assert driver.judge(Probe("eyes", 1), failure, start_s) == answer
    assert driver.start_repair() == commands


def test_number_of_probes_is_limited():
    many = tuple(Stub(Process(10 + n, n), "eyes", 1, f"eyes_0_{n}") for n in range(MAX_PROBES + 3))
    driver = Driver(stubs=many)
    driver.round("eyes")
    driver.see(pid10=STOPPED)

    assert len(driver.round("eyes")) == MAX_PROBES - 1


def test_stopped_stub_of_a_model_without_images_is_left_alone(driver):
    """Such a model cannot be probed, so the next round is not brought forward."""
    driver.round("other")

    assert driver.see(pid10=STOPPED) == [ReportBroken({})]


@pytest.mark.parametrize("when", ["known", "in repair", "older"])
def test_probe_of_a_known_failure_is_not_a_verdict(driver, when):
    (probe,) = driver.round("eyes")
    start_s = driver.now_s
    driver.die()
    if when != "known":
        driver.start_repair()
    if when == "older":
        driver.replace_all(SECOND, NEW)
        driver.end_repair(took_s=1.0)

    commands = [driver.judge(probe, UNHEALTHY, start_s) for _ in range(2)]

    assert [c for batch in commands for c in batch if not isinstance(c, ReadIndex)] == []
    assert not any(isinstance(c, Kill) for c in driver.start_repair())


def test_probes_of_old_instances_do_not_delay_the_next_round(driver):
    driver.round("eyes")
    driver.die()
    driver.repair()

    assert driver.round("eyes") == [Probe("eyes", 2)]


@pytest.mark.parametrize("interrupted", [False, True], ids=["repaired", "interrupted"])
def test_old_stubs_are_killed_after_a_while(driver, interrupted):
    """Triton may never end them; a zombie cannot be killed again."""
    driver.die()
    driver.start_repair()
    driver.interrupt_repair() if interrupted else driver.end_repair()
    driver.add(NEW)

    assert not any(isinstance(command, Kill) for command in driver.see(later_s=KILL_AFTER_S - 1))
    assert Kill(SECOND.process) in (late := driver.see(later_s=1.1))
    assert Kill(FIRST.process) not in late
    assert driver.supervisor.is_emptied([SECOND])
    assert not driver.supervisor.is_emptied([NEW])


def test_healthy_stubs_stay_after_a_refused_reload(driver):
    """Only a reload replaces stubs: after a refusal, the healthy ones are neither killed nor left over."""
    driver.die()
    driver.repair(refusal="bad file")

    assert driver.see(later_s=KILL_AFTER_S + 1) == [DEAD, ReadIndex()]
    assert not driver.supervisor.is_emptied([SECOND])


def test_too_many_dead_instances_restart_the_server():
    """Each holds threads in the server, but running old ones do not count; the last one is not repaired."""
    old = [Stub(Process(100 + n, n), "eyes", 1, f"eyes_0_{n}") for n in range(MAX_DEAD_PROCESSES - 1)]
    driver = Driver(stubs=(*old, Stub(Process(99, 99), "eyes", 1, "eyes_1_0"), OTHER))
    driver.die(old[0])
    driver.repair()

    before = driver.see(**{f"pid{stub.process.pid}": ENDED for stub in old})
    after = driver.die(OTHER)

    assert not any(isinstance(command, End) for command in before)
    assert End(f"{MAX_DEAD_PROCESSES} dead instances still occupy its threads and memory") in after
    assert ReadIndex() not in after


def test_retired_instance_that_dies_is_not_repaired(driver):
    """After a change to fewer instances, no new stub takes the place of an old one."""
    driver.change_instances()
    driver.add(NEW)

    assert driver.die(SECOND) == [ReportBroken({})]
    assert driver.report(SECOND.process.pid) == [ReportBroken({})]
    assert driver.supervisor.processes_of("eyes") == [NEW.process]
    assert driver.die(NEW)[-1] == ReadIndex()


@pytest.mark.parametrize("has_died", [True, False], ids=["one is dead", "all answer"])
def test_retired_instances_that_never_end_are_killed(driver, has_died):
    """A dead one keeps the others forever; without one, they still answer long requests."""
    driver.change_instances()
    driver.add(NEW)
    driver.see(**{f"pid{SECOND.process.pid}": ENDED} if has_died else {})

    assert Kill(FIRST.process) not in driver.see(later_s=KILL_AFTER_S + 0.1)
    assert (Kill(FIRST.process) in driver.see(later_s=KILL_AFTER_S + 0.1)) is has_died


def test_verdicts_on_retired_instances_do_not_count(driver):
    """A probe that began before a change met an old instance."""
    driver.round("eyes")
    driver.now_s += 1.0
    driver.change_instances()
    driver.replace_all(NEW)

    for number in (1, 2):
        assert driver.judge(Probe("eyes", number), UNHEALTHY, driver.now_s - 0.5) == []
