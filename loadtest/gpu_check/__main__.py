"""The checks that need an NVIDIA GPU, in one run of at most ten minutes.

python -m loadtest.gpu_check [--sections 1,4] [--record NAME] [--dry-run]
"""

import argparse
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from loadtest import record
from loadtest.gpu_check import claims, runner
from loadtest.gpu_check.sections import BY_NAME, SECTIONS, Section, missing, select
from nereid.errors import WrongUsage
from nereid.server.installation import cuda_folders

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path("/proc/driver/nvidia/version")
NO_GPU = "no NVIDIA GPU with its driver (/proc/driver/nvidia/version); fix: another machine, or --dry-run"
# The results are written, and the last process is ended, before the time is over.
MARGIN_S = 10.0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    names = ", ".join(f"{section.number} {section.name}" for section in SECTIONS)
    made.add_argument("--sections", default="", help=f"numbers or names with commas, default all: {names}")
    made.add_argument("--minutes", type=float, default=10.0, help="time limit of the run, default: 10")
    made.add_argument("--record", default="", help="store the result as loadtest/results/NAME.json")
    made.add_argument("--folder", type=Path, default=ROOT / ".gpu_check", help="results and logs of the run")
    made.add_argument("--commit", default="", help="commit of a copy of the checkout without its history")
    made.add_argument(
        "--dry-run", action="store_true", help="run only what needs no GPU; nothing is recorded"
    )
    for name, kind in (("section", str), ("file", Path), ("seconds", float)):
        made.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    return made


def run_one(section: Section, args: argparse.Namespace) -> int:
    """Run a section in this process."""
    context = runner.context(os.environ, args.seconds)
    findings = section.rehearse(context) if args.dry_run else section.measure(context)
    return runner.run_in_this_process(findings, args.file)


def describe(section: Section) -> list[str]:
    """Return what a section would run, and its missing parts."""
    absent = missing((*section.needed, *section.useful))
    return [*(f"   would {step}" for step in section.steps), *(f"   missing: {each}" for each in absent)]


def plan(args: argparse.Namespace) -> runner.Plan:
    """Return the run that the command line selects.

    Raises:
        WrongUsage: a record has no commit to refer to, or the sections do not exist.
    """
    try:
        sections = select(args.sections)
    except ValueError as error:
        raise WrongUsage(str(error)) from None
    name = "" if args.dry_run else args.record
    begun = record.begin("" if args.commit else name)
    args.folder.mkdir(parents=True, exist_ok=True)
    record.RESULTS.mkdir(exist_ok=True)
    targets = [args.folder / ("dry_run.json" if args.dry_run else "gpu_check.json")]
    targets += [record.RESULTS / f"{name}.json"] if name else []
    return runner.Plan(
        sections=sections,
        limit_s=args.minutes * 60 - MARGIN_S,
        folder=args.folder,
        targets=targets,
        earlier=runner.read(targets[-1]).get("sections", {}) if args.sections else {},
        header={**begun.header, **({"commit": args.commit} if args.commit else {})},
        command=partial(runner.this_command, is_dry=args.dry_run),
        environment=environment(os.environ),
        is_dry=args.dry_run,
    )


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the sections, whose CUDA libraries are those of the server."""
    libraries = [inherited.get("LD_LIBRARY_PATH", ""), *map(str, cuda_folders())]
    return {**inherited, "LD_LIBRARY_PATH": ":".join(filter(None, libraries))}


def main() -> int:
    """Run the sections, print and record; the exit status is 1 if a section or a target fails."""
    made = parser()
    args = made.parse_args()
    args.folder = args.folder.resolve()
    if args.section:
        return run_one(BY_NAME[args.section], args)
    if not args.dry_run and not DRIVER.exists():
        sys.exit(NO_GPU)
    try:
        planned = plan(args)
    except WrongUsage as error:
        made.error(str(error))
    if args.dry_run:
        for section in planned.sections:
            print(f"{section.number}. {section.title}", *describe(section), sep="\n")
        print("\nThe steps that need no GPU:")
    document = runner.run(planned, partial(print, flush=True))
    if document["claims"]:
        record.show(claims.HEADINGS, ([*row.values()] for row in document["claims"]))
    print(f"results and logs: {args.folder}")
    problems = [*runner.unfinished(document), *claims.missed(document["claims"])]
    print(*problems, sep="\n", end="\n" * bool(problems), file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    record.end(main)
