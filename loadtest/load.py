"""The load test that a build must pass: a closed loop, then an open loop at a share of its rate.

    python -m loadtest.load [--seconds 10] [--url http://127.0.0.1:8000]

It serves the repository on free ports, or uses a running server.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from loadtest import record
from loadtest.servers import served
from loadtest.users import thresholds
from nereid.base import assets
from nereid.base.errors import ServerError
from nereid.base.processes import SIGNALLED
from nereid.server.command_line import DEFAULT_PROFILE

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
# The rate of the open loop as a share of the rate in the closed loop.
SHARE = 0.6
# Callers in the closed loop, and the limit on requests in flight in the open loop.
CALLERS, POOL = 8, 64


# A server's URL for HTTP and HOST:PORT for gRPC; empty for the port after that of HTTP.
Target: TypeAlias = tuple[str, str]


def run_locust(target: Target, seconds: float, report: Path, words: Sequence[str]) -> int:
    """Run Locust without its web page; returns its exit code (128 and more for a signal).

    A run without a report has failed, even if its exit code is 0; an old report is removed first.
    """
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"]
    command += ["--host", target[0], "--grpc", target[1], "--run-time", f"{seconds:g}s"]
    # Locust writes its own table into a file, and appends .json to the name.
    command += ["--json-file", str(report.with_suffix(".locust")), "--loglevel", "WARNING"]
    code = subprocess.run([*command, "--report", str(report), *words]).returncode
    return SIGNALLED - code if code < 0 else code or int(not report.exists())


@contextlib.contextmanager
def _target(args: argparse.Namespace, folder: Path) -> Iterator[Target]:
    if args.url:
        yield args.url, args.grpc
        return
    with served(folder, os.environ, args.profile, args.repository) as server:
        ports = server.options.ports
        yield f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}"


def both_loops(target: Target, args: argparse.Namespace, folder: Path) -> list[int]:
    """Run the closed loop, then the open one; returns their exit codes."""
    common = ["--thresholds", args.thresholds, *args.locust]
    closed, opened = folder / "closed.json", folder / "open.json"
    words = ["--scenario", "closed", "--users", str(CALLERS)]
    codes = [run_locust(target, args.seconds, closed, [*words, *common])]
    if not closed.exists():
        return codes
    if not (per_s := SHARE * sum(row["rate_per_s"] for row in json.loads(closed.read_text())["rows"])):
        print("the open loop has no rate: the closed loop got no correct response", file=sys.stderr)
        return [codes[0] or 1]
    words = ["--scenario", "open", "--users", str(POOL), "--rate", f"{per_s:.2f}"]
    return [*codes, run_locust(target, args.seconds, opened, [*words, *common])]


def main() -> int:
    """Run both loops; the exit status is the larger one of the two.

    It is 1 for a missed threshold, 2 for an unknown option, and 128 and more for a signal.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="", help="http://HOST:PORT of a running server")
    grpc_help = "HOST:PORT of its gRPC; default: the port after that of HTTP"
    parser.add_argument("--grpc", default="", help=grpc_help)
    parser.add_argument("--repository", type=Path, default=assets.REPOSITORY, help="models to serve")
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help="profile to serve")
    seconds = "seconds of each loop, default: 10"
    parser.add_argument("--seconds", type=record.positive, default=10.0, help=seconds)
    parser.add_argument("--reports", type=Path, help="folder for closed.json and open.json")
    limits = str(thresholds.DEFAULT)
    parser.add_argument("--thresholds", type=thresholds.checked, default=limits, help="file with the limits")
    parser.add_argument("locust", nargs="*", help="after --: more options of Locust and of our users")
    args = parser.parse_args()
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
