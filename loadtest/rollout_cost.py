"""The cost of a rollout for served requests: the same route with and without a rollout that measures it.

Each round measures the route without a rollout, with one, and without one again. The difference
between the two without one is the noise of the machine.

    python -m loadtest.rollout_cost [--rounds 5] [--seconds 6]      needs `wrk` (Debian: apt-get install wrk)
"""

import os
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from loadtest import record, servers, wrk
from nereid import assets
from nereid.errors import OperationFailed
from nereid.rollout import orders
from nereid.rollout.plan import make_plan
from nereid.rollout.rollout_journal import Journals
from nereid.routes.change import change, reweighted
from nereid.routes.served import RunningServer
from nereid.routes.target import find_route
from nereid.server.embedded_server import infer_path
from nereid.server.run_dir import ServerRecord
from nereid.tune import photos

SIZE_WH, CONCURRENCY = (1040, 694), 32
WITHOUT, WITH, AGAIN = "without a rollout", "with a rollout", "without a rollout, again"
HEADINGS = ("route", "images/s", "compared", "p99", "compared")
PLAN = {"candidate": "v2", "steps": [20, 100], "hold_s": 86400, "patience_s": 86400}
WEIGHTS = {"v1": 80, "v2": 20}
START_S = 30.0


def measured_state(server: ServerRecord, repository: Path, has_rollout: bool) -> None:
    """Bring the route to its weights, with or without a rollout that measures them.

    Raises:
        SystemExit: the rollout does not measure.
    """
    location = find_route(repository)
    try:
        orders.order(location, "abort")
        orders.finish(location, lambda: server, print)
    except OperationFailed:
        pass  # no rollout is active
    if not has_rollout:
        change(location, reweighted(WEIGHTS), RunningServer(server))
        return
    change(location, reweighted({"v1": 100, "v2": 0}), RunningServer(server))
    orders.start(location, make_plan(**PLAN), server)
    deadline, logs = time.monotonic() + START_S, Journals.of(location)
    while (state := logs.latest()) and state.phase != "measuring":
        if time.monotonic() > deadline:
            raise SystemExit(f"the rollout does not measure: {state}")
        time.sleep(0.1)


def check_state(repository: Path, has_rollout: bool) -> None:
    """Raise `SystemExit` if a rollout has ended, or still runs."""
    active = Journals.of(find_route(repository)).active()
    if has_rollout != bool(active and active.phase == "measuring"):
        raise SystemExit(f"the measurement is invalid: expected a rollout: {has_rollout}, got {active}")


def summarise(rates: dict[str, list[float]], p99s: dict[str, list[float]]) -> list[record.Row]:
    """Return a row for each state; comparisons are medians over the rounds, with the first state."""
    return [
        {
            "state": state,
            "rate": record.spread(rates[state], 1),
            "rate_compared": record.median_ratio(rates[state], rates[WITHOUT]),
            "p99_ms": record.spread(p99s[state], 1),
            "p99_compared": record.median_ratio(p99s[state], p99s[WITHOUT]),
        }
        for state in rates
    ]


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/rollouts.md."""
    return record.markdown(
        HEADINGS,
        (
            (
                row["state"],
                row["rate"]["median"],
                f"{row['rate_compared']:g} ×",
                f"{row['p99_ms']['median']:g} ms",
                f"{row['p99_compared']:g} ×",
            )
            for row in rows
        ),
    )


def main() -> int:
    """Measure, print and record."""
    args = record.parsed(record.parser(__doc__, rounds=5, seconds=6.0), wrk.missing())
    rates: dict[str, list[float]] = defaultdict(list)
    p99s: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        photo = folder / "photo.jpg"
        photo.write_bytes(photos.jpeg(SIZE_WH))
        repository = shutil.copytree(assets.REPOSITORY, folder / "models")
        (folder / "run").mkdir()
        with servers.supervised(repository, folder / "run", os.environ) as running:
            for _ in range(args.rounds):
                for state in (WITHOUT, WITH, AGAIN):
                    measured_state(running.record, repository, state == WITH)
                    port = running.record.ports.http
                    load = wrk.post(port, infer_path("classify"), photo, CONCURRENCY, args.seconds)
                    rates[state].append(load.rate)
                    p99s[state].append(load.p99_ms)
                    check_state(repository, state == WITH)
    rows = summarise(rates, p99s)
    print(markdown(rows))
    return record.finish(args.record, {"concurrency": CONCURRENCY, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    record.end(main)
