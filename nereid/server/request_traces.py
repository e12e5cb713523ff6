"""The collector of a server's request traces, in its supervisor."""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid.base import prometheus_text
from nereid.base.errors import WrongUsage
from nereid.base.tracing.collector import METRICS, PREFIX, Collector, RecordFile, TailSampler
from nereid.base.tracing.records import DEFAULT_SAMPLING, TRACING_BACKEND, Record, Sampling
from nereid.base.tracing.request_log import request_log_entries
from nereid.server.run_dir import make_socket_folder, trace_socket

RECORDS_FILE = "records.jsonl"


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The traces to keep, and their receivers.

    Attributes:
        otlp: address of an OTLP receiver over HTTP, "" for none.
        is_logged: whether each request is logged to stderr.
    """

    sampling: Sampling = DEFAULT_SAMPLING
    otlp: str = ""
    is_logged: bool = False


def flags(socket: Path, sampling: Sampling) -> list[str]:
    """Return the flags of `tritonserver` that our backends read."""
    settings = {
        "socket": socket,
        "share": f"{sampling.share:g}",
        "objective-ms": f"{sampling.objective_s * 1e3:g}",
    }
    return [f"--backend-config={TRACING_BACKEND},{name}={value}" for name, value in settings.items()]


def trace_fields(run_dir: Path, sampling: Sampling | None) -> dict[str, Any]:
    """Return the trace fields of `ServerInfo`; none without tracing."""
    if sampling is None:
        return {}
    return {
        "traces": str(trace_socket(run_dir)),
        "records": str(run_dir / RECORDS_FILE),
        "trace_share": sampling.share,
        "objective_ms": sampling.objective_s * 1e3,
    }


@contextlib.contextmanager
def collecting(
    folder: Path, options: TraceOptions, log: Callable[[str], None]
) -> Iterator[Callable[[], str]]:
    """Collect the traces of a server while the context is open; yield a function that returns the metrics.

    Raises:
        WrongUsage: the export packages are missing.
    """
    file = RecordFile(folder / RECORDS_FILE)
    with contextlib.ExitStack() as stack:
        export: Callable[[Sequence[Any]], None] = lambda records: None  # noqa: E731
        if options.otlp:
            exporter = open_exporter(options.otlp)
            stack.callback(exporter.close)
            export = exporter.export
        socket = trace_socket(folder)
        make_socket_folder(socket.parent)
        stack.callback(shutil.rmtree, socket.parent, ignore_errors=True)
        traces = TailSampler(file.write, export, log_requests if options.is_logged else None)
        collector = Collector(socket, traces, log)
        stack.enter_context(collector.running())
        yield lambda: prometheus_text.render(collector.samples(), PREFIX, METRICS)


def log_requests(records: Sequence[Record], is_kept: bool) -> None:
    """Write a line of JSON for each request of a trace to stderr."""
    for line in request_log_entries(records):
        sys.stderr.write(json.dumps({**line, "is_kept": is_kept}, separators=(",", ":")) + "\n")


def open_exporter(endpoint: str) -> Any:
    """Return a span exporter.

    Raises:
        WrongUsage: its packages are missing.
    """
    try:
        from nereid.base.tracing.export import Exporter
    except ImportError as error:
        raise WrongUsage(f"--otlp: {error}; fix: pip install 'nereid-serving[traces]'") from None
    return Exporter(endpoint)
