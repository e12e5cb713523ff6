"""The load test that a build must pass: callers in a closed loop, then arrivals at a share of what that gave.

    python -m loadtest.load [--seconds 10] [--url http://127.0.0.1:8000]

Serves the repository on free ports, or asks a server that runs already.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.servers import served
from loadtest.users import thresholds
from nereid import assets
from nereid.errors import ServerError
from nereid.processes import SIGNALLED
from nereid.server.command_line import DEFAULT_PROFILE

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
# What arrives in the open loop, compared with what the closed one has shown to be possible.
SHARE = 0.6
# Callers in the closed loop, and the bound on how many are under way in the open one.
CALLERS, POOL = 8, 64


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is: an URL for HTTP, HOST:PORT for gRPC (empty for the port after that of HTTP)."""

    http: str
    grpc: str = ""


def run_locust(target: Target, seconds: float, report: Path, words: Sequence[str]) -> int:
    """Run Locust without its web page; returns its exit code (as a shell's, if a signal ended it).

    It leaves the report in a file; without one it has failed, whatever it says.

    Args:
        target: the server.
        seconds: for how long.
        report: takes the report; one that stands there is removed before.
        words: further options of Locust and of our users.
    """
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"]
    command += ["--host", target.http, "--grpc", target.grpc, "--run-time", f"{seconds:g}s"]
    # Locust's own table stays out of the way in a file, to whose name it adds .json.
    command += ["--json-file", str(report.with_suffix(".locust")), "--loglevel", "WARNING"]
    code = subprocess.run([*command, "--report", str(report), *words]).returncode
    return SIGNALLED - code if code < 0 else code or int(not report.exists())


def read(report: Path) -> dict[str, Any]:
    """Return the report that a run has left.

    Raises:
        SystemExit: it has left none.
    """
    if not report.exists():
        raise SystemExit("Locust ended without a report")
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def rate(report: dict[str, Any]) -> float:
    """Return how many right answers a second a run has got, all protocols together."""
    return float(sum(row["rate_per_s"] for row in report["rows"]))


@contextlib.contextmanager
def _target(args: argparse.Namespace, folder: Path) -> Iterator[Target]:
    if args.url:
        yield Target(args.url, args.grpc)
        return
    with served(folder, os.environ, args.profile, args.repository) as server:
        ports = server.options.ports
        yield Target(f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}")


def both_loops(target: Target, args: argparse.Namespace, folder: Path) -> list[int]:
    """Run the closed loop, then the open one; returns their exit codes."""
    common = ["--thresholds", str(args.thresholds), *args.locust]
    closed, opened = folder / "closed.json", folder / "open.json"
    words = ["--scenario", "closed", "--users", str(CALLERS)]
    codes = [run_locust(target, args.seconds, closed, [*words, *common])]
    if not closed.exists():
        return codes
    if not (per_s := args.rate or SHARE * rate(read(closed))):
        print("nothing was answered, so there is no rate for the open loop", file=sys.stderr)
        return [codes[0] or 1]
    words = ["--scenario", "open", "--users", str(POOL), "--rate", f"{per_s:.2f}"]
    return [*codes, run_locust(target, args.seconds, opened, [*words, *common])]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="", help="http://HOST:PORT of a server that runs already")
    parser.add_argument(
        "--grpc", default="", help="its HOST:PORT over gRPC, if not the port after that of HTTP"
    )
    parser.add_argument("--repository", type=Path, default=assets.REPOSITORY, help="what is served else")
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help="in which profile")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each loop")
    parser.add_argument(
        "--rate", type=float, help=f"of the open loop; {SHARE:.0%} of the closed one's if not given"
    )
    parser.add_argument("--reports", type=Path, help="a folder for closed.json and open.json")
    parser.add_argument("--thresholds", type=Path, default=thresholds.DEFAULT, help="what must be reached")
    parser.add_argument("locust", nargs="*", help="after --: further options of Locust and of our users")
    args = parser.parse_args(words)
    try:
        thresholds.read(args.thresholds)
    except thresholds.BadThresholds as error:
        parser.error(str(error))
    if not all(0 < number < math.inf for number in (args.seconds, 1.0 if args.rate is None else args.rate)):
        parser.error("--seconds and --rate must be more than 0")
    return args


def main() -> int:
    """Run both loops; the exit status is the greater of Locust's two.

    1 is for a missed threshold, 2 for an option that Locust does not know, 128 and more for a signal.
    """
    args = parse()
    with tempfile.TemporaryDirectory() as scratch, _target(args, Path(scratch)) as target:
        folder = args.reports or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        codes = both_loops(target, args, folder)
    if any(codes):
        print("the load test failed; see above", file=sys.stderr)
    return max(codes)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as error:
        sys.exit(str(error))
