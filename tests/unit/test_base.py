"""Units, errors, texts of the wire, limits of control groups, processes, files and watched folders."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid.backends.routing.interfaces import check_deadline, deadline_parameter
from nereid.base import contract, errors, files, processes
from nereid.base.contract import DEADLINE_PARAMETER
from nereid.base.control_groups import ControlGroups
from nereid.base.errors import DeadlineExceeded, InvalidRequest
from nereid.base.units import format_bytes, format_duration, format_ms
from nereid.base.watched_folder import Arrivals
from tests.commands import captured
from tests.tables import cases


@cases(
    bytes=(
        format_bytes,
        (0, 53_100, 18_600_000, 33_554_432, 2_500_000_000),
        ["0 bytes", "53.1 kB", "18.6 MB", "32 MiB", "2.5 GB"],
    ),
    ms=(format_ms, (0, 0.001, 0.04, 12.54, 1250), ["0.0 ms", "< 0.01 ms", "0.04 ms", "12.5 ms", "1.25 s"]),
    minutes=(format_duration, (0, 59.6, 61, 3599), ["0 s", "60 s", "1 min", "59 min"]),
    hours=(format_duration, (19_300, 273_700), ["5 h 21 min", "3 d 4 h"]),
)
def test_number_has_a_readable_unit(formatted, values, texts):
    """A small size is not 0.0 MB, and a limit is not 33554432 bytes; durations have two units at most."""
    assert [formatted(value) for value in values] == texts


@pytest.mark.parametrize("kind", [kind for kind in errors._ERRORS.values() if kind is not errors.StubDied])
@pytest.mark.parametrize("words", ["", "in ensemble 'classify_v1', "], ids=["plain", "through an ensemble"])
def test_error_survives_as_text(kind, words):
    restored = errors.from_message(f"{words}{kind('x')}")

    assert (type(restored), str(restored)) == (kind, str(kind("x")))


@cases(
    dead=("Stub process 'classify_v1_0_1' is not healthy.", errors.StubDied),
    not_ready=("Failed to execute the request. Model 'nope' is not ready.", errors.Unavailable),
    late=("Request timeout expired", errors.DeadlineExceeded),
    queue=("[request id: 1] Exceeds maximum queue size", errors.Overloaded),
    memory=("Failed to increase the shared memory pool size for key 'a'", errors.Overloaded),
    other=("onnx runtime error 2: Unexpected input data type", errors.InferenceFailed),
    quotes_another=("invalid request: variant said invalid image: x", errors.InvalidRequest),
)
def test_class_follows_from_the_text(text, expected):
    assert type(errors.from_message(text)) is expected


@given(
    reasons=st.dictionaries(st.integers(0, 15), st.text(), min_size=1),
    more=st.integers(0, 4),
    prefix=st.sampled_from(["", "in ensemble 'x', invalid image: "]),
)
def test_bad_images_are_read_as_they_were_written(reasons, more, prefix):
    count = max(reasons) + 1 + more

    bad_images = contract.read_bad_images(prefix + contract.format_bad_images(reasons, count), count)

    is_ambiguous = any(re.search(r"; image \d+: |^image \d+: ", reason) for reason in reasons.values())
    assert bad_images == contract.BadImages(prefix, reasons) or (is_ambiguous and bad_images.reasons == {})


def test_list_that_does_not_fit_is_empty():
    """A wrong list must not put the blame on an image."""
    for text in (
        "1 of 3 images cannot be used: image 0: bad",
        "2 of 2 images cannot be used: image 0: bad",
        "1 of 2 images cannot be used: image 2: bad",
        "1 of 2 images cannot be used: bad",
        "0 of 2 images cannot be used: ",
    ):
        assert contract.read_bad_images(text, 2) == contract.BadImages("", {}), text


def test_report_of_a_failed_device_is_read_as_it_was_written():
    """The supervisor takes only the process from the log."""
    line = contract.format_failed_device(41, "'net' version 1", "CUDA failure 700")

    assert contract.read_failed_device(line) == 41
    assert contract.read_failed_device(f"loading {line}") is None


def test_deadline_is_the_timeout_from_now():
    before = time.monotonic_ns()
    (at,) = deadline_parameter(1.5).values()

    assert before + 1_500_000_000 <= at <= time.monotonic_ns() + 1_500_000_000


def test_only_a_request_with_time_left_passes():
    for parameters in ({}, {"other": 1}, deadline_parameter(86_400)):
        check_deadline(parameters)
    with pytest.raises(DeadlineExceeded, match="expired while queued"):
        check_deadline(deadline_parameter(-1e-9))


@pytest.mark.parametrize("value", ["1", 1.5, True])
def test_invalid_deadline_is_rejected(value):
    with pytest.raises(InvalidRequest, match=f"must be an integer, got {value!r}"):
        check_deadline({DEADLINE_PARAMETER: value})


LIMIT_1, USED_1 = "memory/a/memory.limit_in_bytes", "memory/a/memory.usage_in_bytes"
CORES = len(os.sched_getaffinity(0))


def groups(folder: Path, membership: str, files: dict[str, str]) -> ControlGroups:
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "membership").write_text(membership)
    return ControlGroups(folder / "groups", folder / "membership")


def version_1(quota: str) -> dict[str, str]:
    return {"cpu/a/cpu.cfs_quota_us": f"{quota}\n", "cpu/a/cpu.cfs_period_us": "100000\n"}


@cases(
    half_a_core=("50000 100000\n", 1),
    a_core_and_a_half=("150000 100000\n", 2),
    more_than_there_are=("9900000 100000\n", CORES),
    no_quota=("max 100000\n", CORES),
)
def test_quota_limits_the_cores(content, expected, tmp_path):
    assert processes.available_cores(groups(tmp_path, "0::/\n", {"cpu.max": content})) == min(CORES, expected)


@cases(
    own_group_version_2=("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "cpu.max": "max 100000"}, 0.5),
    group_around_it=("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "70000 100000"}, 0.7),
    anothers_group=("0::/a/b\n", {"c/cpu.max": "50000 100000"}, inf),
    name_outside_the_container=("0::/a/b\n", {"cpu.max": "50000 100000"}, 0.5),
    version_1=("1:cpu,cpuacct:/a\n", version_1("200000"), 2.0),
    version_1_without_a_quota=("1:cpu:/a\n", version_1("-1"), inf),
    no_control_groups=("", {}, inf),
)
def test_quota_of_each_enclosing_group_counts(membership, files, expected, tmp_path):
    assert groups(tmp_path, membership, files).cores() == expected


@cases(
    version_2=("0::/a\n", {"a/memory.max": "5000", "a/memory.current": "1000"}, 4000),
    more_used_than_allowed=("0::/a\n", {"a/memory.max": "5000", "a/memory.current": "6000"}, 0),
    without_a_limit=("0::/a\n", {"a/memory.max": "max", "a/memory.current": "1000"}, 1_024_000),
    version_1=("4:memory:/a\n", {LIMIT_1: "5000", USED_1: "4000"}, 1000),
    version_1_without_a_limit=("4:memory:/a\n", {LIMIT_1: str(2**63 - 4096), USED_1: "1"}, 1_024_000),
)
def test_memory_is_what_the_groups_leave(membership, files, left, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")

    assert processes.available_bytes(tmp_path / "meminfo", groups(tmp_path, membership, files)) == left


@cases(
    version_2=(
        "0::/a\n",
        {"a/memory.max": "350000000", "a/memory.current": "1"},
        "a/memory.events",
        "low 0\nmax 9\noom 1\noom_kill {}\noom_group_kill 0\n",
    ),
    version_1=(
        "4:memory:/a\n",
        {LIMIT_1: "350000000", USED_1: "1"},
        "memory/a/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
    ),
)
def test_kills_for_lack_of_memory_are_described(membership, limits, name, text, tmp_path):
    reached = processes.ReachedLimits(groups(tmp_path, membership, {name: text.format(3)} | limits))

    assert reached.new_kills() == ""
    groups(tmp_path, membership, {name: text.format(5)})
    assert reached.new_kills() == (
        "out of memory: the kernel killed 2 process(es) of this control group; the limit is 350 MB; "
        "fix: a higher limit, or fewer instances (count in config.pbtxt)"
    )
    assert reached.new_kills() == ""


@cases(
    version_2=("0::/a/b\n", ("a/b", "a"), "260"),
    version_1=("8:pids:/a/b\n", ("pids/a/b", "pids/a"), "260"),
    without_a_limit=("0::/a\n", ("a",), "max"),
)
def test_refused_processes_are_described(membership, folders, limit, tmp_path):
    """A group around the own one may have the limit."""
    events = {f"{folder}/pids.events": "max 3\n" for folder in folders}
    limits = {f"{folders[-1]}/pids.max": limit, f"{folders[0]}/pids.current": "1"}
    reached = processes.ReachedLimits(groups(tmp_path, membership, events | limits))

    assert reached.new_refusals() == ""
    groups(tmp_path, membership, {f"{folders[0]}/pids.events": "max 5\n"})
    assert reached.new_refusals() == (
        "process limit reached: the kernel refused 2 process(es) or thread(s) of this control group; the "
        f"limit is {limit.replace('max', 'inf')}; fix: a higher limit (pids.max, TasksMax=, or --pids-limit)"
    )
    assert reached.new_refusals() == ""


def test_kills_are_unknown_without_control_groups(tmp_path):
    assert processes.ReachedLimits(ControlGroups(tmp_path, tmp_path / "none")).new_kills() == ""
    older = groups(tmp_path, "0::/\n", {"memory.events": "low 0\noom 1\n"})
    assert processes.ReachedLimits(older).new_kills() == ""


WATCHDOG_S = 60


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in processes.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_call_their_actions_in_order(handlers):
    first, second = [], []
    processes.on_signals(first.append, second.append, then=signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)

    assert (first, second) == ([signal.SIGTERM], [signal.SIGINT])


def test_stop_flag_leaves_the_second_signal_to_the_kernel(handlers):
    stop = processes.StopFlag()
    before = stop.is_set()
    signal.raise_signal(signal.SIGINT)

    assert (before, stop.is_set()) == (False, True)
    assert {signal.getsignal(number) for number in processes.STOP_SIGNALS} == {signal.SIG_DFL}


def test_sigterm_closes_contexts():
    before = signal.getsignal(signal.SIGTERM)
    closed = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            closed.append(True)

    with pytest.raises(SystemExit) as left, processes.exit_on_sigterm():
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


FORKS = """
import subprocess, sys, threading
from contextlib import suppress
from nereid.base.processes import end_with_parent

{prepare}

def use_grpc():
    while not is_over.is_set():
        with suppress(Exception):
            {ask}

is_over = threading.Event()
for _ in range(2):
    threading.Thread(target=use_grpc).start()
prepare = end_with_parent()
print({{subprocess.run(["true"], preexec_fn=prepare).returncode for _ in range(300)}})
is_over.set()
"""
CONTROL = """
from nereid.server.model_control import ModelControl
from nereid.server.run_dir import ServerInfo
from nereid.server.ports import Ports
model_control = ModelControl(ServerInfo(1, "127.0.0.1", Ports(1, 1, 1), "", "", ""))
"""
CLIENT = """
import loadtest.servers
from tritonclient.grpc import InferenceServerClient
client = InferenceServerClient("127.0.0.1:1")
"""


@cases(
    ["prepare", "ask"],
    model_control=(CONTROL, "model_control.is_ready('a', 1)"),
    tests=(CLIENT, "client.is_server_live()"),
)
def test_children_start_while_grpc_is_used(prepare, ask):
    """gRPC's handlers of a fork ended one of thirty before it became another program."""
    program = FORKS.format(prepare=prepare, ask=ask)

    done = captured([sys.executable, "-c", program], check=True, timeout=WATCHDOG_S)

    assert done.stdout == "{0}\n"


@cases(
    fails_before_it_is_calm=([0, 59, 59, 59, 59], [0.2, 1, 4, 4, 4]),
    was_calm_once=([0, 0, 60, 0, 0], [0.2, 1, 0.2, 1, 4]),
)
def test_waits_grow_until_a_calm_time(ran_s, expected):
    back_off, now_s, waits_s = processes.BackOff([0.2, 1, 4], calm_s=60), 1000.0, []
    for run_s in ran_s:
        back_off.record_start(now_s)
        assert back_off.due_at is None
        now_s += run_s
        waits_s.append(back_off.record_failure(now_s))
        assert back_off.due_at == now_s + waits_s[-1]
        now_s = back_off.due_at  # the pause is no calm time

    assert waits_s == expected


def test_background_work_ends_with_its_context():
    ended = []

    with processes.in_background("work", lambda stop: ended.append(stop.wait(WATCHDOG_S)), WATCHDOG_S):
        assert ended == []

    assert ended == [True]


def test_link_and_mode_stay(tmp_path):
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "route.json", tmp_path / "route.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)

    files.replace(link, b"new")
    files.replace(tmp_path / "first", b"new")

    assert (real.read_text(), link.is_symlink(), real.stat().st_mode & 0o777) == ("new", True, 0o640)
    assert (tmp_path / "first").stat().st_mode & 0o777 == 0o644


def test_failed_write_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "route.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "disk full")))

    with pytest.raises(OSError, match="disk full") as failed:
        files.replace(path, b"new")

    assert failed.value.filename == str(path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("route.json", "old")]


def test_file_folder_and_moved_tree_reach_the_disk_in_order(tmp_path, monkeypatch):
    (tmp_path / "old" / "model").mkdir(parents=True)
    (tmp_path / "old" / "model" / "weights").write_text("w")
    synced: list[tuple[str, bool]] = []
    target = tmp_path / "new" / "model"

    def note(handle: int) -> None:
        synced.append((Path(f"/proc/self/fd/{handle}").readlink().name, target.exists()))

    monkeypatch.setattr(os, "fsync", note)

    files.move(tmp_path / "old" / "model", target)
    assert synced == [("weights", False), ("model", False), ("old", True), ("new", True)]
    synced.clear()
    files.replace(target / "weights", b"x", staging=tmp_path)
    assert synced[0][0].startswith(".weights.")
    assert synced[1:] == [("model", True)]


def test_locks_end_with_their_process(tmp_path):
    program = (
        "from pathlib import Path\nfrom nereid.base.files import *\n"
        f"with locked_folder(folder := Path({str(tmp_path)!r})), locked_file(folder / 'log', 'x'):\n"
        "    print(flush=True); input()"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            holder.stdout.readline()
            assert files.is_locked(tmp_path)
            with pytest.raises(files.LockTimeout, match="log' is locked by another `nereid x`; fix: "):
                files.locked_file(tmp_path / "log", "nereid x", 0.05).__enter__()
        finally:
            holder.kill()

    assert not files.is_locked(tmp_path)
    with files.locked_folder(tmp_path), files.locked_file(tmp_path / "log", "nereid x", WATCHDOG_S):
        assert files.is_locked(tmp_path)


def test_file_is_reported_once_it_is_stable(tmp_path):
    """A replaced file is new, too; one that was there before is not."""
    now, new, old = 0.0, tmp_path / "new", tmp_path / "old"
    old.write_bytes(b"1")
    arrivals = Arrivals(lambda: sorted(tmp_path.iterdir()), settle_s=1.0, clock=lambda: now)

    def after(seconds: float) -> list[str]:
        nonlocal now
        now += seconds
        return [path.name for path in arrivals.step()]

    new.write_bytes(b"")
    assert after(5) == after(5) == []
    new.write_bytes(b"12")
    assert after(0) == after(0.9) == []
    new.write_bytes(b"123")
    assert after(0.9) == after(0.9) == []
    assert after(0.2) == ["new"]
    assert after(9) == []
    new.write_bytes(b"1234")
    assert [after(0), after(1)] == [[], ["new"]]

    (tmp_path / ".part").write_bytes(b"1")
    (tmp_path / ".part").replace(old)
    assert [after(0), after(1)] == [[], ["old"]]
    old.unlink()
    assert after(1) == []
    old.write_bytes(b"2")
    assert [after(0), after(1)] == [[], ["old"]]
