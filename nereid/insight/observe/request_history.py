"""The records of the last requests, which `nereid serve` keeps in its run directory."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nereid.base.errors import OperationFailed
from nereid.base.tracing.collector import read_records
from nereid.base.tracing.records import Record
from nereid.base.tracing.request_lines import request_lines
from nereid.server.run_dir import ServerRecord


def read(record: ServerRecord, since_s: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the line of each request; damaged records are left out.

    Args:
        since_s: only requests that ended after this Unix time, in seconds.

    Raises:
        OperationFailed: the server records no requests.
    """
    if not record.records:
        raise OperationFailed(
            "this server records no requests: expected one that `nereid serve` started without --no-trace"
        )
    traces: dict[str, list[Record]] = defaultdict(list)
    for trace_record in read_records(Path(record.records)):
        if trace_record["end"] >= since_s * 1e9:
            traces[trace_record["trace"]].append(trace_record)
    for records in traces.values():
        yield from request_lines(records)
