"""Signals, death with the parent, waits that grow with repeated failures, and background threads."""

import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from nereid.base.processes import STOP_SIGNALS, BackOff, StopFlag, exit_on_sigterm, in_background, on_signals
from tests.tables import cases

WATCHDOG_S = 60


@contextmanager
def handlers():
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_signals_call_their_actions_in_order():
    seen = []
    with handlers():
        on_signals(
            lambda n: seen.append(("first", n)), lambda n: seen.append(("second", n)), then=signal.SIG_IGN
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)

    assert seen == [("first", signal.SIGTERM), ("second", signal.SIGINT)]


def test_stop_flag_leaves_the_second_signal_to_the_kernel():
    with handlers():
        stop = StopFlag()
        before = stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert (before, stop.is_set()) == (False, True)
        assert {signal.getsignal(each) for each in STOP_SIGNALS} == {signal.SIG_DFL}


def test_sigterm_closes_contexts():
    before = signal.getsignal(signal.SIGTERM)
    closed = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            closed.append(True)

    with pytest.raises(SystemExit) as left, exit_on_sigterm():
        work()

    assert closed == [True]
    assert (left.value.code, signal.getsignal(signal.SIGTERM)) == (128 + signal.SIGTERM, before)


def test_child_ends_with_its_parent():
    program = (
        "import subprocess, time; from nereid.base.processes import end_with_parent;"
        "child = subprocess.Popen(['sleep', '600'], preexec_fn=end_with_parent(), stdout=subprocess.DEVNULL);"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.communicate()
        assert select.select([child], [], [], WATCHDOG_S)[0] == [child]
    finally:
        os.close(child)


def test_child_of_a_dead_parent_ends_itself():
    """The parent may die between the fork and the request to the kernel."""
    program = (
        "import os, sys; from nereid.base.processes import end_with_parent; prepare = end_with_parent();"
        "wait = lambda pid: os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]));"
        "(child := os.fork()) and wait(child); (grandchild := os.fork()) and wait(grandchild);"
        "prepare(); os._exit(0)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1


@cases(
    ("ran_s", "expected"),
    {
        "fails before it is calm": ([0, 59, 59, 59, 59], [0.2, 1, 4, 4, 4]),
        "was calm once": ([0, 0, 60, 0, 0], [0.2, 1, 0.2, 1, 4]),
    },
)
def test_waits_grow_until_a_calm_time(ran_s, expected):
    back_off, now_s, found = BackOff([0.2, 1, 4], calm_s=60), 1000.0, []
    for each in ran_s:
        back_off.began(now_s)
        assert back_off.due_s is None
        now_s += each
        found.append(back_off.failed(now_s))
        assert back_off.due_s == now_s + found[-1]
        now_s = back_off.due_s  # the pause is no calm time

    assert found == expected


def test_background_work_ends_with_its_context():
    ended = []

    with in_background("work", lambda stop: ended.append(stop.wait(WATCHDOG_S)), WATCHDOG_S):
        assert ended == []

    assert ended == [True]
