"""Span records: each process sends one per request to the collector's socket, in batches.

A record is a JSON object, as is each of its inner spans. Times are nanoseconds since the Unix epoch.

| key | value |
|---|---|
| `kind` | `gateway`, `route`, `attempt`, `shadow` or `model`; inner spans have none |
| `name` | name of the span |
| `trace`, `span`, `parent` | ids; an inner span may have none, and its parent is the record |
| `begin`, `end` | times |
| `error` | message of a failure |
| `keep` | why the trace is kept although it was not sampled: `SERVER` or `CALLER` |
| `sampled` | whether the trace was sampled when it began |
| `link` | trace and span that this one belongs to, in a different trace |
| `about` | attributes |
| `inner` | inner spans |
"""

import functools
import json
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from nereid.base.tracing.context import TraceContext

log = logging.getLogger("nereid.tracing")
Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")
Record = dict[str, Any]
MAX_ERROR_LENGTH = 500
# Maximum seconds that a record waits in its process.
FLUSH_INTERVAL_S = 0.5
# Maximum queued records; the oldest are dropped first.
MAX_WAITING = 4096
# Datagrams are limited by net.core.wmem_max, 208 KiB by default.
MAX_DATAGRAM_BYTES = 48 * 1024
# Reasons to keep a trace: a server fault or slow request; or the caller's fault or choice.
SERVER, CALLER = "server", "caller"
# The "backend" name in the server flags that carry these settings.
TRACING_BACKEND = "nereid-tracing"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which traces to keep.

    Attributes:
        share: fraction of traces sampled when they begin, 0 to 1.
        objective_s: slower requests are kept too.
    """

    share: float = 0.01
    objective_s: float = 0.25


DEFAULT_SAMPLING = Sampling()


def never_raises(method: Callable[Parameters, Value]) -> Callable[Parameters, Value | None]:
    """Wrap a function so that it never raises: tracing must not break the traced request."""
    has_failed = False

    @functools.wraps(method)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Value | None:
        nonlocal has_failed
        try:
            return method(*args, **kwargs)
        except Exception:
            if not has_failed:  # every request could repeat the failure
                log.exception("a span was lost; further failures of this kind are not logged")
            has_failed = True
            return None

    return guarded


def shortened(text: str, max_length: int = 128) -> str:
    """Truncate a caller's text, because the size of records is limited."""
    return text if len(text) <= max_length else text[:max_length] + "…"


class Tracer:
    """Begins spans and sends their records.

    Args:
        sampling: which traces to keep.
    """

    def __init__(self, path: str, sampling: Sampling) -> None:
        self._path, self.sampling = path, sampling
        self._waiting: deque[Record] = deque(maxlen=MAX_WAITING)
        self._is_changed, self._is_closing = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._sender: threading.Thread | None = None
        self._dropped = 0

    @classmethod
    def from_flags(cls, settings: Mapping[str, str]) -> "Tracer | None":
        """Return the tracer configured by a server's flags, or None if tracing is off."""
        if not (path := settings.get("socket", "")):
            return None
        return cls(path, Sampling(float(settings["share"]), float(settings["objective-ms"]) / 1e3))

    def is_slow(self, begin_ns: int, end_ns: int) -> bool:
        """Return whether a request took longer than its objective."""
        return end_ns - begin_ns > self.sampling.objective_s * 1e9

    def send(self, record: Record) -> None:
        """Queue a record for sending; if records arrive faster than they are sent, the oldest are dropped."""
        self._dropped += len(self._waiting) == MAX_WAITING
        self._waiting.append(record)
        if not self._is_changed.is_set():
            self._is_changed.set()
        if self._sender is None:
            self._start()

    def close(self) -> None:
        """Send the queued records."""
        self._is_closing.set()
        self._is_changed.set()
        if self._sender:
            self._sender.join(timeout=1.0)

    def _start(self) -> None:
        # Started with the first record, because a process that forks would lose the thread.
        with self._lock:
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_all, name="spans", daemon=True)
                self._sender.start()

    def _send_all(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            is_last = False
            while not is_last:
                self._is_changed.wait()
                is_last = self._is_closing.wait(FLUSH_INTERVAL_S)
                self._is_changed.clear()
                self._flush(sender)

    @never_raises
    def _flush(self, sender: socket.socket) -> None:
        lines: list[bytes] = []
        size = 0
        while self._waiting:
            line = json.dumps(self._waiting.popleft(), separators=(",", ":")).encode()
            if size + len(line) > MAX_DATAGRAM_BYTES and lines:
                self._send(sender, lines)
                lines, size = [], 0
            lines.append(line)
            size += len(line) + 1
        if lines:
            self._send(sender, lines)

    def _send(self, sender: socket.socket, lines: list[bytes]) -> None:
        if self._dropped:
            lines, self._dropped = [*lines, b'{"dropped":%d}' % self._dropped], 0
        try:
            sender.sendto(b"\n".join(lines), self._path)
        except OSError:  # the collector is too slow, or there is none
            self._dropped += len(lines)


def error_field(error: object) -> Record:
    """Return a span's error field; empty if there was no error."""
    return {"error": shortened(str(error), MAX_ERROR_LENGTH)} if error else {}


def keep_field(has_priority: bool, is_wanted: bool) -> Record:
    """Return why a trace is kept, if it is.

    Args:
        has_priority: the server failed or was slow.
        is_wanted: there is another reason, such as the caller's fault.
    """
    return {"keep": SERVER if has_priority else CALLER} if has_priority or is_wanted else {}


def span(context: TraceContext, parent: str, name: str, begin_ns: int, end_ns: int) -> Record:
    """Return a span's ids, name and times."""
    return {
        "trace": context.trace_id,
        "span": context.span_id,
        "parent": parent,
        "name": name,
        "begin": begin_ns,
        "end": end_ns,
    }


def child_span(name: str, begin_ns: int, end_ns: int, **attributes: Any) -> Record:
    """Return a span inside a record."""
    return {"name": name, "begin": begin_ns, "end": end_ns, "about": attributes}
