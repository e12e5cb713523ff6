"""A server's trace collector: joins records from all processes into traces and keeps some of them."""

import contextlib
import json
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from nereid.base.prometheus_text import MetricLabels, counter, render
from nereid.base.tracing.records import SERVER, Record

# A trace's root record comes last; each process sends its records within `records.FLUSH_INTERVAL_S`.
HOLD_S = 2.0
# A trace without a root may belong to a slow request, or the root was lost.
HOLD_WITHOUT_ROOT_S = 60.0
ROOTS = frozenset({"gateway", "route", "attempt", "shadow"})
MAX_TRACES = 20_000
# A client may put all of its requests into one trace.
MAX_RECORDS = 200
# Ids of kept traces, for records that arrive late, such as shadow requests.
MAX_KEPT_IDS = 4096
# Callers can force sampling of every request, so half is reserved for server failures and slow requests.
MAX_KEPT_PER_S = 50.0
# More than the sender's datagram limit.
RECEIVE_BYTES = 2**18
BUFFER_BYTES = 8 * 2**20
PREFIX = "nereid_traces_"
METRICS = {
    "kept_total": counter("Traces that were kept."),
    "dropped_total": counter("Traces over the limit per second, and records that were lost.", "reason"),
}


class RecordHead(msgspec.Struct):
    """The fields of a record that decide whether its trace is kept; `dropped` counts lost records."""

    trace: str = ""
    kind: str = ""
    parent: str = ""
    keep: str = ""
    sampled: bool = False
    dropped: int = 0

    @property
    def is_root(self) -> bool:
        """Whether no later record of the same request is expected, except the gateway's."""
        return self.kind in ROOTS or not self.parent


_decode_head = msgspec.json.Decoder(RecordHead).decode


@dataclass(slots=True)
class _Trace:
    """The records of one trace in order of arrival, and when the last one arrived, in seconds.

    `has_priority` marks a server failure or slow request; `is_wanted` any other reason to keep the trace.
    """

    seen_at: float
    records: list[bytes] = field(default_factory=list)
    has_priority: bool = False
    is_wanted: bool = False


class TailSampler:
    """The traces in memory; not thread-safe, and has no clock of its own.

    Records stay encoded because only a few of them are needed.

    Args:
        write: receives the lines of records as they arrive.
        export: receives the records of kept traces.
        complete: receives the records of each complete trace, and whether it is kept; optional.
    """

    def __init__(
        self,
        write: Callable[[Sequence[bytes]], None],
        export: Callable[[Sequence[Record]], None],
        complete: Callable[[Sequence[Record], bool], None] | None = None,
    ) -> None:
        self._write, self._export, self._complete = write, export, complete
        # Traces with and without their root, each ordered by last record.
        self._rooted: OrderedDict[str, _Trace] = OrderedDict()
        self._open: OrderedDict[str, _Trace] = OrderedDict()
        self._kept_ids: OrderedDict[str, None] = OrderedDict()
        self._tokens, self._refilled_at = MAX_KEPT_PER_S, 0.0
        self.kept = self.over_limit = self.lost = 0

    def __len__(self) -> int:
        return len(self._rooted) + len(self._open)

    def add(self, lines: Sequence[bytes], now_s: float) -> None:
        """Add records, one JSON object per line.

        Raises:
            ValueError: a line is not a record; nothing is added.
        """
        pairs = [(line, _decode_head(line)) for line in lines]
        if not all(head.dropped or (head.trace and head.kind) for _, head in pairs):
            raise ValueError("expected records with the keys 'trace' and 'kind'")
        for record, head in pairs:
            self.lost += head.dropped
            if not head.dropped:
                self._add(record, head, now_s)
        self._write([record for record, head in pairs if not head.dropped])
        while len(self) > MAX_TRACES:
            self._finish(*(self._open or self._rooted).popitem(last=False), now_s)

    def expire(self, now_s: float) -> None:
        """Finish the traces whose records have all arrived."""
        for traces, hold_s in ((self._rooted, HOLD_S), (self._open, HOLD_WITHOUT_ROOT_S)):
            while traces and now_s - next(iter(traces.values())).seen_at >= hold_s:
                self._finish(*traces.popitem(last=False), now_s)

    def close(self, now_s: float) -> None:
        """Finish all traces."""
        for traces in (self._rooted, self._open):
            while traces:
                self._finish(*traces.popitem(last=False), now_s)

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        samples: dict[tuple[str, MetricLabels], float] = {
            ("kept_total", ()): self.kept,
            ("dropped_total", (("reason", "limit"),)): self.over_limit,
            ("dropped_total", (("reason", "lost"),)): self.lost,
        }
        return render(samples, PREFIX, METRICS)

    def _add(self, record: bytes, head: RecordHead, now_s: float) -> None:
        name = head.trace
        is_rooted = head.is_root or name in self._rooted
        trace = self._rooted.pop(name, None) or self._open.pop(name, None)
        if trace is None:
            trace = _Trace(now_s, is_wanted=name in self._kept_ids)
        trace.seen_at = now_s
        trace.records.append(record)
        trace.has_priority |= head.keep == SERVER
        trace.is_wanted |= head.sampled or bool(head.keep)
        if len(trace.records) >= MAX_RECORDS:
            self._finish(name, trace, now_s)
            return
        (self._rooted if is_rooted else self._open)[name] = trace

    def _finish(self, name: str, trace: _Trace, now_s: float) -> None:
        is_kept = (trace.has_priority or trace.is_wanted) and self._may_keep(name, trace, now_s)
        if not (is_kept or self._complete):
            return
        records = [json.loads(record) for record in trace.records]
        if self._complete:
            self._complete(records, is_kept)
        if is_kept:
            self._export(records)

    def _may_keep(self, name: str, trace: _Trace, now_s: float) -> bool:
        """Take one token per four records; a late record of a kept trace needs none."""
        is_late = name in self._kept_ids and len(trace.records) < MAX_RECORDS
        self._tokens = min(MAX_KEPT_PER_S, self._tokens + (now_s - self._refilled_at) * MAX_KEPT_PER_S)
        self._refilled_at = now_s
        if not is_late and self._tokens < (1 if trace.has_priority else MAX_KEPT_PER_S / 2):
            self.over_limit += 1
            return False
        self._tokens -= 0 if is_late else max(1, len(trace.records) // 4)
        self.kept += not is_late
        self._kept_ids[name] = None
        if len(self._kept_ids) > MAX_KEPT_IDS:
            self._kept_ids.popitem(last=False)
        return True


@contextlib.contextmanager
def receiving(path: Path, traces: TailSampler, log: Callable[[str], None]) -> Iterator[None]:
    """Receive the records of a server's processes in the background while the context is open.

    Args:
        path: the socket.
        log: receives a line about records that cannot be read.
    """
    path.unlink(missing_ok=True)
    is_closing = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        receiver.bind(str(path))
        arguments = [receiver, is_closing, traces, log]
        thread = threading.Thread(target=_receive, args=arguments, name="traces", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_closing.set()
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"", str(path))
            thread.join()
            path.unlink(missing_ok=True)


def _receive(
    receiver: socket.socket, is_closing: threading.Event, traces: TailSampler, log: Callable[[str], None]
) -> None:
    has_logged = False
    while not is_closing.is_set():
        # With no traces in memory, wake only for records.
        receiver.settimeout(HOLD_S / 4 if len(traces) else None)
        try:
            with contextlib.suppress(TimeoutError):
                if datagram := receiver.recv(RECEIVE_BYTES):
                    traces.add(datagram.split(b"\n"), time.monotonic())
            traces.expire(time.monotonic())
        except Exception as error:  # another program's record must not stop the collector
            traces.lost += 1
            if not has_logged:
                has_logged = True
                log(f"traces: a record was ignored, and later ones are only counted: {error!r}")
    with contextlib.suppress(Exception):  # such as a closed stderr
        traces.close(time.monotonic())


# About 25,000 requests.
MAX_FILE_BYTES = 32 * 2**20
_decode_record = msgspec.json.Decoder(dict[str, Any]).decode


def append_records(path: Path, records: Sequence[bytes]) -> None:
    """Append records to a file, unless the disk is full; a full file is first renamed, with suffix `.1`."""
    with contextlib.suppress(OSError):
        if path.exists() and path.stat().st_size > MAX_FILE_BYTES:
            path.replace(_before(path))
        path.touch(mode=0o600)
        size = path.stat().st_size
        try:
            with path.open("ab") as file:
                file.write(b"".join(record + b"\n" for record in records))
        except OSError:  # the next record must start on a new line
            with path.open("r+b") as file:
                file.truncate(size)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records, oldest first, skipping damaged ones and any still being written."""
    # Read the newer file first: it may be rotated in between.
    texts = [_text(path), _text(_before(path))]
    for text in reversed(texts):
        for line in text.split(b"\n"):
            with contextlib.suppress(msgspec.DecodeError):
                record = _decode_record(line)
                if record.keys() >= {"trace", "kind", "begin", "end", "parent", "span", "name", "about"}:
                    yield record


def _before(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
