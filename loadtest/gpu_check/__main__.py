"""The checks that need an NVIDIA GPU, in one run of at most ten minutes.

python -m loadtest.gpu_check [--sections speed,memory] [--record NAME] [--dry-run]
"""

import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from loadtest import record
from loadtest.gpu_check import claims, machine, processes
from loadtest.gpu_check.processes import ROOT, STOP_S, Context
from nereid.base import files
from nereid.base.errors import WrongUsage
from nereid.server.installation import cuda_folders

DRIVER = Path("/proc/driver/nvidia/version")
NO_GPU = "no NVIDIA GPU with its driver (/proc/driver/nvidia/version); fix: another machine, or --dry-run"
# Each section is a module of this package, with its time limit in seconds. The most valuable come first,
# because a run may be cut short.
SECTIONS = {
    "machine": 25.0,
    "speed": 45.0,
    "served": 130.0,
    "zero_copy": 25.0,
    "tests": 235.0,
    "memory": 70.0,
    "precisions": 40.0,
}
# The results are written, and the last process is ended, before the time is over.
MARGIN_S = 10.0
# Fields of the run's header that each section has, too: a later run may replace single sections.
ABOUT = ("date", "commit", "machine")
NOT_REACHED = {"status": "not reached", "reason": "the run ended before", "results": {}}


@dataclass(frozen=True, slots=True)
class Plan:
    """A run: the time limits of its sections, its time, and its files.

    `target` gets the results of the run. `earlier` has other sections, which stay.
    """

    sections: Mapping[str, float]
    limit_s: float
    folder: Path
    target: Path
    header: Mapping[str, Any]
    environment: Mapping[str, str]
    earlier: Mapping[str, Any]


def run(plan: Plan) -> dict[str, Any]:
    """Run the sections, and write the results after each one; returns the results."""
    end_s = time.monotonic() + plan.limit_s
    sections: dict[str, Any] = {name: dict(NOT_REACHED) for name in plan.sections}
    _store(plan.target, _document(plan, sections))
    for name, limit_s in plan.sections.items():
        print(f"{name} (at most {limit_s:.0f} s)", flush=True)
        section = run_section(name, plan, min(limit_s, end_s - time.monotonic()))
        sections[name] = {**section, **{key: plan.header[key] for key in ABOUT if key in plan.header}}
        _store(plan.target, _document(plan, sections))
        print("   " + " ".join(filter(None, [section["status"], section["reason"]])), flush=True)
    return _document(plan, sections)


def run_section(name: str, plan: Plan, limit_s: float) -> dict[str, Any]:
    """Run a section in a process of its own; returns its status, reason, seconds and results."""
    if limit_s < 2 * STOP_S:
        return {**NOT_REACHED, "reason": f"{max(0.0, limit_s):.0f} s of the run were left"}
    begin_s, file = time.monotonic(), plan.folder / f"{name}.json"
    file.unlink(missing_ok=True)
    words = [sys.executable, "-m", "loadtest.gpu_check", "--folder", str(plan.folder)]
    words += ["--section", name, "--seconds", f"{limit_s - STOP_S:.0f}"]
    ended = processes.run(words, plan.folder / f"{name}.log", limit_s, plan.environment)
    results = _read(file)
    return {
        "status": ended.status,
        "reason": results.pop("error", "") or ended.reason,
        "seconds": round(time.monotonic() - begin_s, 1),
        "results": results,
    }


def run_here(name: str, seconds: float, folder: Path) -> int:
    """Run a section in this process; its results so far are in a file after each one."""
    # A section that hangs leaves the stacks of its threads in the log; one that crashes, too.
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds)
    end_s = time.monotonic() + seconds
    context = Context(os.environ, folder, lambda: end_s - time.monotonic())
    results: dict[str, Any] = {}
    try:
        for part in import_module(f"{__package__}.{name}").measure(context):
            results |= part
            _store(folder / f"{name}.json", results)
    except Exception as error:  # its text is the result of this section
        traceback.print_exc()
        _store(folder / f"{name}.json", {**results, "error": f"{type(error).__name__}: {error}"})
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


def select(words: str) -> dict[str, float]:
    """Parse names of sections, separated by commas; nothing selects all.

    Raises:
        WrongUsage: there is no such section.
    """
    names = [word.strip() for word in words.split(",") if word.strip()] or [*SECTIONS]
    if unknown := [name for name in names if name not in SECTIONS]:
        raise WrongUsage(f"--sections: expected some of {', '.join(SECTIONS)}, got {unknown[0]!r}")
    return {name: limit_s for name, limit_s in SECTIONS.items() if name in names}


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the run that the command line selects.

    Raises:
        WrongUsage: a record has no commit to refer to, or a section does not exist.
    """
    sections = select(args.sections)
    begun = record.begin("" if args.commit else args.record)
    args.folder.mkdir(parents=True, exist_ok=True)
    target = record.RESULTS / f"{args.record}.json" if args.record else args.folder / "gpu_check.json"
    libraries = filter(None, [os.environ.get("LD_LIBRARY_PATH"), *map(str, cuda_folders())])
    return Plan(
        sections=sections,
        limit_s=args.minutes * 60 - MARGIN_S,
        folder=args.folder,
        target=target,
        header={**begun.header, **({"commit": args.commit} if args.commit else {})},
        # The CUDA libraries are those of the server. A process that is killed has written all of its log.
        environment={**os.environ, "LD_LIBRARY_PATH": ":".join(libraries), "PYTHONUNBUFFERED": "1"},
        earlier=_read(target).get("sections", {}) if args.sections else {},
    )


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = record.parser(str(__doc__), minutes=10.0)
    made.add_argument("--sections", default="", help=f"names with commas, default all: {', '.join(SECTIONS)}")
    made.add_argument("--folder", type=Path, default=ROOT / ".gpu_check", help="results and logs of the run")
    made.add_argument("--commit", default="", help="commit of a copy of the checkout without its history")
    made.add_argument("--dry-run", action="store_true", help="import the sections, and list missing parts")
    made.add_argument("--section", help=argparse.SUPPRESS)
    made.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return made


def main() -> int:
    """Run the sections, print and record; the exit status is 1 if a section or a target fails."""
    made = parser()
    args = made.parse_args()
    args.folder = args.folder.resolve()
    if args.section:
        return run_here(args.section, args.seconds, args.folder)
    if not args.dry_run and not DRIVER.exists():
        sys.exit(NO_GPU)
    try:
        if args.dry_run:
            return dry_run(select(args.sections))
        plan = plan_of(args)
    except WrongUsage as error:
        made.error(str(error))
    document = run(plan)
    rows = claims.rows(document["sections"])
    record.show(claims.HEADINGS, ([*row.values()] for row in rows))
    print(f"results and logs: {args.folder}")
    problems = [
        f"section {name}: {section['status']}: {section['reason']}"
        for name, section in document["sections"].items()
        if section["status"] != "done"
    ]
    problems += claims.missed(rows)
    print(*problems, sep="\n", end="\n" * bool(problems), file=sys.stderr)
    return int(bool(problems))


def dry_run(sections: Mapping[str, float]) -> int:
    """Import the sections, and print what they do and which parts are missing."""
    for name, limit_s in sections.items():
        module = import_module(f"{__package__}.{name}")
        print(f"{name} (at most {limit_s:.0f} s): {str(module.__doc__).splitlines()[0]}")
    print(*(f"missing: {part}" for part in machine.missing()), sep="\n")
    return 0


def _document(plan: Plan, sections: Mapping[str, Any]) -> dict[str, Any]:
    together = {**plan.earlier, **sections}
    return {**plan.header, "sections": {name: together[name] for name in SECTIONS if name in together}}


def _store(file: Path, document: Mapping[str, Any]) -> None:
    files.replace(file, f"{json.dumps(document, indent=2)}\n".encode())


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.exists() else {}


if __name__ == "__main__":
    record.end(main)
