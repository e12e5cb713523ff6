"""Several processes as one gateway: starting and stopping them, and the state they share."""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct
from prometheus_client import values
from prometheus_client.multiprocess import mark_process_dead

from nereid.base.errors import OperationFailed
from nereid.base.processes import STOP_SIGNALS, BackOff, end_with_parent
from nereid.gateway.gateway_metrics import LoadWindow
from nereid.gateway.keys import BUCKET_FORMAT
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.shared_tables import RecentPredictions, SharedTable

# Seconds between a worker's reports, and the age at which a report is ignored.
REPORT_INTERVAL_S, MAX_REPORT_AGE_S = 1.0, 5.0
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class Report(Struct):
    """One worker's requests in flight, their limit, and the last minute by model.

    `at` is the time of the report, from the monotonic clock that all processes share.
    """

    at: float
    in_flight: int
    limit: int
    models: dict[str, LoadWindow]


@dataclass(frozen=True, slots=True)
class SharedState:
    """The shared state of worker `number` of `count`; `folder` is private to them."""

    number: int
    count: int
    folder: Path
    buckets: SharedTable = field(default_factory=partial(SharedTable, BUCKET_FORMAT))
    recent_predictions: RecentPredictions = field(default_factory=RecentPredictions)

    def share_metrics(self) -> None:
        """Store metrics created from now on in files, so that any worker can sum them over all workers.

        A restarted worker continues from its predecessor's counts.
        """
        if (folder := os.environ.setdefault(METRICS_FOLDER, str(self.folder))) != str(self.folder):
            raise OperationFailed(
                f"{METRICS_FOLDER} is set to '{folder}', and would mix the metrics of several programs",
                f"unset {METRICS_FOLDER}",
            )
        shared = values.MultiProcessValue(lambda: self.number)  # type: ignore[no-untyped-call]
        values.ValueClass = shared

    def settings(self, whole: GatewaySettings) -> GatewaySettings:
        """Return this worker's share of a gateway's limits."""
        # Except `max_in_flight`: it adapts to what the server can handle, and connections vary by worker.
        part = whole.max_buffered_bytes // self.count
        return replace(whole, max_buffered_bytes=max(4 * whole.max_body_bytes, part))

    def report(self, report: Report) -> None:
        """Publish a report for the other workers; on a full disk they see none."""
        path = self._path(self.number)
        with contextlib.suppress(OSError):
            (new := path.with_suffix(".new")).write_bytes(msgspec.msgpack.encode(report))
            new.replace(path)

    def forget(self, number: int) -> None:
        """Remove the gauges of a worker that has exited."""
        mark_process_dead(number, str(self.folder))  # type: ignore[no-untyped-call]

    def others(self) -> Iterator[Report]:
        """Yield the recent reports of the other workers."""
        for number in range(self.count):
            if number == self.number:
                continue
            with contextlib.suppress(FileNotFoundError):
                report = msgspec.msgpack.decode(self._path(number).read_bytes(), type=Report)
                if time.monotonic() - report.at < MAX_REPORT_AGE_S:
                    yield report

    def _path(self, number: int) -> Path:
        return self.folder / f"worker-{number}"


START_POLL_INTERVAL_S = 0.05
WAITED_FOR = {signal.SIGCHLD, *STOP_SIGNALS}
# Called with the worker's number and a function to call once the worker is listening.
WorkerMain = Callable[[int, Callable[[], object]], None]


class WorkerPool:
    """Forked workers, which are restarted when they exit.

    This process must have no other threads. SIGINT and SIGTERM stop the workers after they finish their
    requests; a second signal stops them immediately.

    Args:
        worker_main: runs in each worker, with its number, until a signal arrives.
        log: called with a line for each restart.
        forget: called with the number of a worker that has exited.
    """

    def __init__(
        self, count: int, worker_main: WorkerMain, log: Callable[[str], None], forget: Callable[[int], None]
    ) -> None:
        self._count = count
        self._worker_main = worker_main
        self._log = log
        self._forget = forget
        self._number_by_pid: dict[int, int] = {}
        self._back_offs = [BackOff() for _ in range(count)]
        self._ready_reader, self._ready_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self, announce: Callable[[], None]) -> None:
        """Run until a signal arrives.

        Args:
            announce: called once all workers are listening.

        Raises:
            OperationFailed: a worker exited before listening, or all have exited; the reason is on stderr.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, children would leave no status
        signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
        try:
            for number in range(self._count):
                self._start(number)
            if self._are_listening():
                announce()
                self._keep()
        finally:
            self._end()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)

    def _are_listening(self) -> bool:
        """Wait until all workers are listening; return False after a signal."""
        listening = 0
        while listening < self._count:
            if self._is_stopped(START_POLL_INTERVAL_S):
                return False
            if self._ended():
                raise OperationFailed("a worker of the gateway did not start; see the error above")
            with contextlib.suppress(BlockingIOError):
                listening += len(os.read(self._ready_reader, self._count))
        return True

    def _keep(self) -> None:
        while True:
            for number, status in self._ended().items():
                self._forget(number)
                self._delay(number, f"exited with status {status}")
            if not self._number_by_pid:  # exit, so that this process's supervisor notices
                raise OperationFailed("all workers of the gateway have ended; their reasons are above")
            for number, back_off in enumerate(self._back_offs):
                if back_off.due_at is not None and back_off.due_at <= time.monotonic():
                    self._restart(number)
            due_at = [delay.due_at for delay in self._back_offs if delay.due_at is not None]
            if self._is_stopped(max(0.0, min(due_at) - time.monotonic()) if due_at else None):
                return

    def _restart(self, number: int) -> None:
        try:
            self._start(number)
        except OSError as error:  # too many processes, or too little memory
            self._delay(number, f"cannot start: {error.strerror}")

    def _delay(self, number: int, reason: str) -> None:
        pause_s = self._back_offs[number].record_failure(time.monotonic())
        self._log(f"worker {number} {reason}; restarting in {pause_s:g} s")

    def _is_stopped(self, timeout_s: float | None) -> bool:
        """Wait for a signal and return whether it stops the gateway."""
        if timeout_s is None:
            return signal.sigwait(WAITED_FOR) in STOP_SIGNALS
        info = signal.sigtimedwait(WAITED_FOR, timeout_s)
        return info is not None and info.si_signo in STOP_SIGNALS

    def _start(self, number: int) -> None:
        end_with_this = end_with_parent()
        if pid := os.fork():
            self._number_by_pid[pid] = number
            self._back_offs[number].record_start(time.monotonic())
            return
        status = 1
        try:
            end_with_this()
            os.setsid()  # so Ctrl-C reaches only the parent, which stops the workers
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
            self._worker_main(number, lambda: os.write(self._ready_writer, b"."))
            status = 0
        except OperationFailed as error:
            print(f"error: {error}", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            # Do not clean up the copies of the parent's objects.
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _ended(self) -> dict[int, int]:
        """Return the exit status, by number, of each worker that has exited since the last call."""
        statuses = {}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                # The first process in a container also inherits orphaned children of other processes.
                if (number := self._number_by_pid.pop(ended[0], None)) is not None:
                    statuses[number] = os.waitstatus_to_exitcode(ended[1])
        return statuses

    def _end(self) -> None:
        self._send(signal.SIGTERM)
        self._ended()
        while self._number_by_pid:
            if self._is_stopped(None):
                self._send(signal.SIGKILL)
            self._ended()
        for descriptor in (self._ready_reader, self._ready_writer):
            os.close(descriptor)

    def _send(self, signal_number: signal.Signals) -> None:
        for pid in self._number_by_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
