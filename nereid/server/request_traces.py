"""The collector of a server's request traces, in its supervisor."""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nereid.base.errors import WrongUsage
from nereid.base.tracing.collector import TailSampler, append_records, receiving
from nereid.base.tracing.records import Record
from nereid.base.tracing.request_log import request_log_entries
from nereid.server.command_line import ServerOptions
from nereid.server.run_dir import make_socket_folder, trace_socket

RECORDS_FILE = "records.jsonl"


@contextlib.contextmanager
def collecting(
    options: ServerOptions, run_dir: Path, log: Callable[[str], None]
) -> Iterator[Callable[[], str]]:
    """Collect the traces of a server while the context is open; yield a function that returns the metrics.

    Raises:
        WrongUsage: the export packages are missing.
    """
    with contextlib.ExitStack() as stack:
        export: Callable[[Sequence[Any]], None] = lambda records: None  # noqa: E731
        if options.otlp:
            exporter = open_exporter(options.otlp)
            stack.callback(exporter.close)
            export = exporter.export
        socket = trace_socket(run_dir)
        make_socket_folder(socket.parent)
        stack.callback(shutil.rmtree, socket.parent, ignore_errors=True)
        write = partial(append_records, run_dir / RECORDS_FILE)
        traces = TailSampler(write, export, log_requests if options.logs_requests else None)
        stack.enter_context(receiving(socket, traces, log))
        yield traces.metrics


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
