"""The state that a worker shares with the others: buckets, answers, metrics, and the last minute's load."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from msgspec import Struct
from prometheus_client import values
from prometheus_client.multiprocess import mark_process_dead

from nereid.base.errors import OperationFailed
from nereid.gateway.admission.token_buckets import TokenBuckets
from nereid.gateway.gateway_metrics import LastMinute
from nereid.gateway.settings import Settings
from nereid.gateway.workers.answer_memory import AnswerMemory

# Seconds between two reports of a worker, and the age at which one no longer counts.
REPORT_S, MAX_AGE_S = 1.0, 5.0
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class Report(Struct):
    """One worker: requests in flight, their limit, and the last minute by model.

    `at_s` is the time of the report, of the monotonic clock that all processes share.
    """

    at_s: float
    in_flight: int
    limit: int
    models: dict[str, LastMinute]


@dataclass(frozen=True, slots=True)
class SharedState:
    """The shared state of worker `number` of `count`; `folder` is private to them."""

    number: int
    count: int
    folder: Path
    buckets: TokenBuckets
    memory: AnswerMemory = field(default_factory=AnswerMemory)

    def share_metrics(self) -> None:
        """Store the metrics that this process creates from now on in files, which every worker can add up.

        A worker that is started again goes on with the counts of the one before.
        """
        if (found := os.environ.setdefault(METRICS_FOLDER, str(self.folder))) != str(self.folder):
            raise OperationFailed(
                f"{METRICS_FOLDER} is set to '{found}', and would mix the metrics of several programs",
                f"unset {METRICS_FOLDER}",
            )
        shared = values.MultiProcessValue(lambda: self.number)  # type: ignore[no-untyped-call]
        values.ValueClass = shared

    def settings(self, whole: Settings) -> Settings:
        """Return this worker's part of the limits of a gateway."""
        # Not of `max_in_flight`: the limit adapts to what the server carries, and connections vary by worker.
        part = whole.max_buffered_bytes // self.count
        return replace(whole, max_buffered_bytes=max(whole.max_body_bytes, part))

    def report(self, report: Report) -> None:
        """Show the other workers a report; on a full disk they see none."""
        path = self._path(self.number)
        with contextlib.suppress(OSError):
            (new := path.with_suffix(".new")).write_bytes(msgspec.msgpack.encode(report))
            new.replace(path)

    def forget(self, number: int) -> None:
        """Remove the gauges of a worker that has ended."""
        mark_process_dead(number, str(self.folder))  # type: ignore[no-untyped-call]

    def others(self) -> Iterator[Report]:
        """Yield the recent reports of the other workers."""
        for number in range(self.count):
            if number == self.number:
                continue
            with contextlib.suppress(FileNotFoundError):
                report = msgspec.msgpack.decode(self._path(number).read_bytes(), type=Report)
                if time.monotonic() - report.at_s < MAX_AGE_S:
                    yield report

    def _path(self, number: int) -> Path:
        return self.folder / f"worker-{number}"
