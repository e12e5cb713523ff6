"""The cost of traces, access log and quality signals at full load: servers with and without them, in turn.

Each state is a server of its own. A round measures all of them, one after the other; the order rotates from
round to round. A second server without anything shows the noise of the machine. The CPU time of an image is
that of all processes of `nereid serve`; other programs hardly change it.

    python -m loadtest.observability_cost [--rounds 8] [--seconds 5]      needs `wrk`
"""

import contextlib
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from loadtest import record, resource_usage, servers, wrk
from loadtest.http_receiver import listening
from nereid import assets
from nereid.server.embedded_server import infer_path
from nereid.tune import photos

SIZE_WH, CONCURRENCY = (1040, 694), 32
OFF, AGAIN, ALL = "nothing", "nothing, again", "traces of 1 %, access log and signals"
NO_TRACE, NO_SIGNALS = "--no-trace", "--no-signals"
STATES = {
    OFF: [NO_TRACE, NO_SIGNALS],
    "signals": [NO_TRACE],
    "records of the stages": [NO_SIGNALS, "--trace-share", "0"],
    ALL: ["--trace-share", "0.01", "--access-log", "--otlp"],
    AGAIN: [NO_TRACE, NO_SIGNALS],
}
# Below the latency of a saturated server, every request would be slow, and kept.
OBJECTIVE_MS = "60000"
MAX_LOSS = 0.02
# By the name of a measurement and the state.
Series = dict[tuple[str, str], list[float]]
HEADINGS = ("server with", "images/s", "compared", "CPU of an image", "compared", "p99", "compared")


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    """Receive and discard exports of traces; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            """Write nothing."""

    with listening(Handler) as address:
        yield f"http://{address}"


@contextlib.contextmanager
def started(folder: Path, endpoint: str) -> Iterator[dict[str, servers.Supervised]]:
    """Run a server for each state."""
    with contextlib.ExitStack() as stack:
        found = {}
        for number, (state, words) in enumerate(STATES.items()):
            own = folder / str(number)
            own.mkdir()
            more = [endpoint, "--objective-ms", OBJECTIVE_MS] if "--otlp" in words else []
            supervised = servers.supervised(assets.REPOSITORY, own, os.environ, [*words, *more])
            found[state] = stack.enter_context(supervised)
        yield found


def summarise(series: Series) -> list[record.Row]:
    """Return a row for each state; comparisons are medians over the rounds, with the first state."""
    rows: list[record.Row] = []
    for state in STATES:
        row: record.Row = {"state": state}
        for name, digits in (("rate", 1), ("cpu_ms", 3), ("p99_ms", 1)):
            row[name] = record.spread(series[name, state], digits)
            row[f"{name}_compared"] = record.median_ratio(series[name, state], series[name, OFF])
        rows.append(row)
    return rows


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/traces.md."""
    return record.markdown(
        HEADINGS,
        (
            (
                row["state"],
                row["rate"]["median"],
                f"{row['rate_compared']:g} ×",
                f"{row['cpu_ms']['median']:g} ms",
                f"{row['cpu_ms_compared']:g} ×",
                f"{row['p99_ms']['median']:g} ms",
                f"{row['p99_ms_compared']:g} ×",
            )
            for row in rows
        ),
    )


def main() -> int:
    """Measure, print and record."""
    args = record.parsed(record.parser(__doc__, rounds=8, seconds=5.0), wrk.missing())
    series: Series = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch, receiver() as endpoint:
        photo = Path(scratch) / "photo.jpg"
        photo.write_bytes(photos.jpeg(SIZE_WH))
        with started(Path(scratch), endpoint) as running:
            names = [*STATES]
            for number in range(args.rounds):
                turn = number % len(names)
                for state in [*names[turn:], *names[:turn]]:
                    port = running[state].record.ports.http
                    before_s = resource_usage.cpu_s(running[state].pid)
                    load = wrk.post(port, infer_path("classify"), photo, CONCURRENCY, args.seconds)
                    used_s = resource_usage.cpu_s(running[state].pid) - before_s
                    series["rate", state].append(load.rate)
                    series["cpu_ms", state].append(used_s / load.answered * 1e3)
                    series["p99_ms", state].append(load.p99_ms)
    rows = summarise(series)
    print(markdown(rows))
    (measured,) = (row for row in rows if row["state"] == ALL)
    missed = []
    if measured["rate_compared"] < 1 - MAX_LOSS:
        missed.append(
            f"expected at least {1 - MAX_LOSS:g} of the images/s, got {measured['rate_compared']:g}"
        )
    result = {"concurrency": CONCURRENCY, "rounds": args.rounds, "rows": rows}
    return record.finish(args.record, result, missed)


if __name__ == "__main__":
    record.end(main)
