"""Threads around the supervisor: they observe a running server and carry out the supervisor's commands.

One thread waits for processes to exit, one starts probes, and one makes repairs, so that a slow server
delays only one of them.
"""

import contextlib
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from nereid.backends.triton import stub_processes
from nereid.backends.triton.stub_processes import Process, Stub
from nereid.server.autoscaling import InstanceController
from nereid.server.embedded_server import EmbeddedServer, image_models
from nereid.server.model_control import ModelControl, NotReached, Refused
from nereid.server.supervision import supervisor
from nereid.server.supervision.health import ServerHealth
from nereid.server.supervision.supervisor import Command, Commands, Supervisor

# Linux before 5.3 and some sandboxes cannot wait for the process of another parent.
FALLBACK_POLL_INTERVAL_S = 0.1
MS_PER_S = 1000
POLL_INTERVAL_S = 2.0
# A model without requests is probed this long after its last answer.
IDLE_PROBE_INTERVAL_S = 4.0
# So is a model with requests: one of two instances may hang while the other answers, and Triton 24.10 counts
# error responses as successes.
BUSY_PROBE_INTERVAL_S = 10.0
# An exit is seen immediately, a stopped process after `OBSERVE_INTERVAL_S`. Zombies are checked again after
# `CONFIRM_INTERVAL_S`, and so are stopped processes, which take many probes to find while others answer.
# Without new shared memory, no stub has started, and the processes are rarely listed.
OBSERVE_INTERVAL_S, CONFIRM_INTERVAL_S, FIND_INTERVAL_S = 1.0, 0.1, 5.0
PROBE_SOON_S, PROBE_TIMEOUT_S = 0.11, 5.0
MAX_PROBERS = 16
JOIN_TIMEOUT_S = 1.0


class ExitWaiter:
    """Waits in one thread for processes to exit; other threads may call `interrupt`."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._interrupted = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._interrupted, select.POLLIN)

    def wait(self, pids: Collection[int], timeout_s: float) -> None:
        """Return when one of the processes has exited, after `interrupt`, or after `timeout_s`.

        A zombie has already exited, so it must not be among `pids`.
        """
        for pid in self._files.keys() - pids:
            self._forget(pid)
        for pid in set(pids) - self._files.keys():
            try:
                self._files[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            except OSError:
                timeout_s = min(timeout_s, FALLBACK_POLL_INTERVAL_S)
            else:
                self._poll.register(self._files[pid], select.POLLIN)
        self._poll.poll(timeout_s * MS_PER_S)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._interrupted)

    def interrupt(self) -> None:
        """End the current call of `wait`, or the next one."""
        os.eventfd_write(self._interrupted, 1)

    def close(self) -> None:
        """Stop waiting for processes."""
        for pid in [*self._files]:
            self._forget(pid)
        os.close(self._interrupted)

    def _forget(self, pid: int) -> None:
        file = self._files.pop(pid)
        self._poll.unregister(file)
        os.close(file)


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Successful and failed requests to a model since it was loaded, from Triton's statistics."""

    succeeded: int = 0
    failed: int = 0


@dataclass(slots=True)
class _ProbedModel:
    """The requests and probes of one model."""

    counts: RequestCounts = RequestCounts()
    answered_at: float = -inf
    probed_at: float = -inf
    is_suspect: bool = True
    has_failed_probe: bool = False

    def poll(self, counts: RequestCounts, now_s: float) -> bool:
        """Apply new counts; return whether the model has answered, without failures, since the last ones."""
        before, self.counts = self.counts, counts
        if counts.succeeded < before.succeeded or counts.failed < before.failed:  # it was reloaded
            before = RequestCounts()
        if counts.failed > before.failed:
            self.is_suspect = True
        elif counts.succeeded > before.succeeded:
            self.is_suspect, self.answered_at = False, now_s
            return not self.has_failed_probe
        return False

    def due_at(self) -> float:
        """Return the time of the next probe."""
        if self.is_urgent:
            return -inf
        return min(
            max(self.answered_at, self.probed_at) + IDLE_PROBE_INTERVAL_S,
            self.probed_at + BUSY_PROBE_INTERVAL_S,
        )

    @property
    def is_urgent(self) -> bool:
        """Whether the model is probed at every poll."""
        return self.is_suspect or self.has_failed_probe


class Activity:
    """The models of one server that take images; not thread-safe."""

    def __init__(self) -> None:
        self._models: dict[str, _ProbedModel] = {}

    def poll(self, counts: Mapping[str, RequestCounts], now_s: float) -> set[str]:
        """Apply the counts of all models; return those that have answered requests since the last poll."""
        self._models = {name: self._models.get(name) or _ProbedModel(probed_at=now_s) for name in counts}
        return {name for name, new in counts.items() if self._models[name].poll(new, now_s)}

    def take_due(self, now_s: float) -> set[str]:
        """Return the models to probe now.

        All models that failed or never answered are returned; of the others, only as many as keep the pace.
        A probe of a route also counts for its variant, which is then no longer due.
        """
        due = [name for name, model in self._models.items() if model.due_at() <= now_s]
        due.sort(key=lambda name: (self._models[name].due_at(), name))
        urgent = sum(self._models[name].is_urgent for name in due)
        taken = due[: urgent + max(1, int(len(self._models) * POLL_INTERVAL_S / IDLE_PROBE_INTERVAL_S))]
        for name in taken:
            self._models[name].probed_at = now_s
        return set(taken)

    def record_probe(self, model: str, is_success: bool) -> None:
        """Record the end of a probe; after a failure, the model is probed until a probe succeeds."""
        if model in self._models:
            self._models[model].has_failed_probe = not is_success


def read_counts(statistics: Mapping[str, Any]) -> tuple[dict[str, set[int]], dict[str, RequestCounts]]:
    """Return the ready versions and the counts, by model, of Triton's answer to `/v2/models/stats`."""
    ready: dict[str, set[int]] = {}
    counts: dict[str, RequestCounts] = {}
    for entry in statistics["model_stats"]:
        name, outcomes = entry["name"], entry["inference_stats"]
        ready.setdefault(name, set()).add(int(entry["version"]))
        before = counts.get(name, RequestCounts())
        counts[name] = RequestCounts(
            before.succeeded + outcomes["success"]["count"], before.failed + outcomes["fail"]["count"]
        )
    return ready, counts


class Watchdog:
    """Supervises one server while the context is open."""

    def __init__(self, server: EmbeddedServer, health: ServerHealth, log: Callable[[str], None]) -> None:
        self._server, self._health, self._log = server, health, log
        self._options, self._model_control = server.options, ModelControl(server.info())
        self._supervisor, self._lock = Supervisor(server.options.model_control_mode), threading.Lock()
        self._observing, self._exits = threading.RLock(), ExitWaiter()
        self._found_at = self._changed_at = float("-inf")
        self._zombies: set[Process] = set()
        self._activity = Activity()
        self._image_models: list[str] = []
        self._orders: queue.SimpleQueue[supervisor.ReadIndex | supervisor.Reload | None] = queue.SimpleQueue()
        self._probers = ThreadPoolExecutor(MAX_PROBERS, "probe")
        self._is_closed, self._has_ended, self._probe_soon = (threading.Event() for _ in range(3))
        self._last_error = ""
        # One load of a model at a time, so that a repair and a change of instances know what they replace.
        self._loading, self._has_noted_mode = threading.Lock(), False
        self._instances = InstanceController(
            server.info(), health, self._processes_of, self._change_instances, self._say
        )
        self.restart_reason = ""
        steps = [self._observe_processes, self._poll_models, self._repair]
        if self._options.model_control_mode == "explicit":
            steps.append(self._instances.step)
        self._threads = [
            threading.Thread(target=self._repeat, args=[step], name=step.__name__, daemon=True)
            for step in steps
        ]

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_closed.set()
        self._probe_soon.set()
        self._exits.interrupt()
        self._orders.put(None)
        self._probers.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # for example, one that waits for Triton
            self._exits.close()

    @property
    def ready(self) -> dict[str, set[int]]:
        """The versions that were last ready, by model."""
        return self._supervisor.ready or {}

    def wait(self, timeout_s: float) -> bool:
        """Wait until the server exits or must be restarted (see `restart_reason`); false on timeout."""
        return self._has_ended.wait(timeout_s)

    def is_emptied(self) -> bool:
        """Return whether a stopping server has ended all models, except instances it will never end."""
        return self._supervisor.is_emptied(self._living())

    def _repeat(self, step: Callable[[], float]) -> None:
        """Call `step` until the end; it returns the seconds to wait before the next call."""
        while not self._is_closed.is_set():
            try:
                pause_s = step()
            except NotReached:
                pause_s = POLL_INTERVAL_S  # the server is ending or hangs; the probes tell which
            except Exception as error:
                # An unforeseen error is logged; it must not end the supervision.
                problem = f"failed and continues: {type(error).__name__}: {error}"
                if problem != self._last_error:
                    self._say(problem)
                self._last_error, pause_s = problem, POLL_INTERVAL_S
            self._is_closed.wait(pause_s)

    def _observe_processes(self) -> float:
        if self._server.poll() is not None or self._is_signalled():
            self._handle(lambda now_s: self._supervisor.end())
            return OBSERVE_INTERVAL_S
        now_s = time.monotonic()
        if self._server.memory.has_changed():
            self._changed_at = now_s
        # A stub starts some time after its shared memory was created.
        is_due = now_s - self._changed_at < FIND_INTERVAL_S or now_s - self._found_at >= FIND_INTERVAL_S
        failed = self._server.log.take_failed_devices()
        states = self._observe(find=is_due or bool(failed), failed=failed)
        zombies = {process for process, state in states.items() if state == stub_processes.ZOMBIE}
        is_news, self._zombies = bool(zombies - self._zombies), zombies
        if is_news or stub_processes.STOPPED in states.values():
            return CONFIRM_INTERVAL_S
        living = states.keys() - zombies
        self._exits.wait({self._server.pid, *(process.pid for process in living)}, OBSERVE_INTERVAL_S)
        return 0.0

    def _is_signalled(self) -> bool:
        """Return whether a signal is ending the server, which then accepts no connections.

        Models write to the same log, so a single line is not enough.
        """
        return bool(self._server.log.signal) and self._server.probe_server(PROBE_TIMEOUT_S) is not None

    def _observe(self, find: bool, failed: Collection[int] = ()) -> Mapping[Process, str]:
        with self._observing:
            living = self._living() if find else []
            if find:
                self._server.memory.protect()
                self._found_at = time.monotonic()
            with self._lock:
                processes = self._supervisor.processes
            states = stub_processes.states({*processes, *(stub.process for stub in living)})
            self._handle(partial(self._supervisor.see, states, living if find else None, failed))
            return states

    def _living(self) -> list[Stub]:
        return stub_processes.find(self._server.pid, self._options.repository)

    def _poll_models(self) -> float:
        started_at = time.monotonic()
        self._probe_soon.clear()
        ready, counts = read_counts(self._server.statistics(PROBE_TIMEOUT_S))
        if ready != self._supervisor.ready:  # a model's inputs change only with its versions; reading is slow
            self._image_models = image_models(self._options)
        models = [name for name in self._image_models if name in ready]
        with self._lock:
            answered = self._activity.poll({name: counts[name] for name in models}, started_at)
            due = self._activity.take_due(started_at)
        server_failure = None if models else self._server.probe_server(PROBE_TIMEOUT_S)
        if not self._is_closed.is_set():
            self._health.record_round_start(server_failure, models)
            self._health.record_answers(answered, started_at)
        mode = self._options.model_control_mode
        if self._instances.discover(ready) and mode != "explicit" and not self._has_noted_mode:
            self._has_noted_mode = True
            self._say(f"numbers of instances stay: expected --model-control-mode explicit, got {mode}")
        self._handle(lambda now_s: self._supervisor.start_round(ready, models, due))
        self._probe_soon.wait(max(0.0, POLL_INTERVAL_S - (time.monotonic() - started_at)))
        return PROBE_SOON_S if self._probe_soon.is_set() else 0.0

    def _probe(self, probe: supervisor.Probe) -> None:
        started_at = time.monotonic()
        failure: str | None = "the probe was not sent"
        try:
            failure = self._server.probe(probe.model, PROBE_TIMEOUT_S)
        finally:
            if not self._is_closed.is_set():
                self._health.record_probe(probe.model, failure, started_at)
            with self._lock:
                self._activity.record_probe(probe.model, failure is None)
            self._handle(partial(self._supervisor.end_probe, probe, failure, started_at))

    def _processes_of(self, model: str) -> list[Process]:
        with self._lock:
            return self._supervisor.processes_of(model)

    def _change_instances(self, model: str, count: int) -> None:
        with self._loading:
            self._observe(find=True)
            old = self._processes_of(model)
            self._model_control.change_instances(model, count)
            self._handle(partial(self._supervisor.change_instances, model, old))
            self._observe(find=True)

    def _repair(self) -> float:
        order = self._orders.get()
        decide: Callable[[float], Commands] = self._supervisor.interrupt_repair
        try:
            if isinstance(order, supervisor.ReadIndex):
                decide = partial(self._supervisor.start_repair, self._model_control.ready_versions())
            elif order:
                decide = partial(self._supervisor.end_repair, self._reload(order))
        finally:
            self._handle(decide)
            self._exits.interrupt()  # the reason for not being ready may be gone
        return 0.0

    def _reload(self, order: supervisor.Reload) -> str:
        """Load a model again; return why Triton refused, empty if it did not."""
        folder = self._options.repository / order.model
        try:
            with self._loading:
                self._load_again(order, folder)
        except Refused as error:
            self._health.count("repair_failures_total", model=order.model)
            return str(error)
        self._observe(find=True)
        self._health.count("repairs_total", model=order.model, cause=order.cause)
        return ""

    def _load_again(self, order: supervisor.Reload, folder: Path) -> None:
        touched = [supervisor.touch(folder / str(version)) for version in order.versions]
        if self._options.model_control_mode != "poll":
            instance_count = self._model_control.instances(order.model).count
            if not all(touched):  # another user owns the files: the loaded versions must be unloaded first
                self._model_control.unload(order.model)
            self._model_control.load(order.model, instance_count)

    def _handle(self, decide: Callable[[float], Commands]) -> None:
        """Have the supervisor decide at the current time, and carry out its commands."""
        with self._lock:
            commands = decide(time.monotonic())
        for command in commands:
            if not self._is_closed.is_set():
                self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case supervisor.FindStubs():
                self._observe(find=True)
            case supervisor.ProbeSoon():
                self._probe_soon.set()
            case supervisor.Probe():
                self._probers.submit(self._probe, command)
            case supervisor.ReadIndex() | supervisor.Reload():
                self._orders.put(command)
            case supervisor.Kill():
                # It may have exited meanwhile, and further commands follow.
                with contextlib.suppress(ProcessLookupError):
                    if stub_processes.states([command.process]):
                        os.kill(command.process.pid, signal.SIGKILL)
            case supervisor.ReportBroken():
                self._health.record_observation(command.models)
            case supervisor.Log():
                self._say(command.text)
            case supervisor.End():
                self.restart_reason = command.reason
                self._has_ended.set()

    def _say(self, text: str) -> None:
        if not self._is_closed.is_set():
            self._log(f"supervisor: {text}")
