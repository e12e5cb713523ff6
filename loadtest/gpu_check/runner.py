"""One run: a section after the other, and the results after each section in a file."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.gpu_check import claims, processes
from loadtest.gpu_check.sections import BY_NAME, Context, Findings, Section, missing
from nereid import files

# Fields of the run's header that each section has, too: a later run may replace single sections.
ABOUT = ("date", "commit", "machine")
NOT_REACHED = {"status": "not reached", "reason": "the run ended before", "results": {}}


@dataclass(frozen=True, slots=True)
class Plan:
    """A run: its sections, its time, its files, and the command of a section's process.

    `command` takes the name of a section, the file of its results and its seconds. `targets` are the files
    that get the results of the run. A section has `stop_s` of its seconds to end. `earlier` has the results
    of other sections from an earlier run, which stay.
    """

    sections: Sequence[Section]
    limit_s: float
    folder: Path
    targets: Sequence[Path]
    header: Mapping[str, Any]
    command: Callable[[str, Path, float], list[str]]
    environment: Mapping[str, str]
    is_dry: bool = False
    stop_s: float = processes.STOP_S
    earlier: Mapping[str, Any] = field(default_factory=dict)


def run(plan: Plan, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the sections, and write the results after each one; returns the results."""
    end_s = time.monotonic() + plan.limit_s
    sections: dict[str, Any] = {section.name: dict(NOT_REACHED) for section in plan.sections}
    _write(plan, sections)
    for section in plan.sections:
        show(f"{section.number}. {section.title} (at most {section.limit_s:.0f} s)")
        found = run_section(section, plan, end_s - time.monotonic())
        sections[section.name] = found | {key: plan.header[key] for key in ABOUT if key in plan.header}
        _write(plan, sections)
        show("   " + " ".join(filter(None, [found["status"], found["reason"]])))
    return _document(plan, sections)


def run_section(section: Section, plan: Plan, left_s: float) -> dict[str, Any]:
    """Run a section in a process of its own; returns its status, reason, seconds and results."""
    limit_s = min(section.limit_s, left_s)
    absent = missing(section.needed)
    about = {"limit_s": section.limit_s, "missing": [*absent, *missing(section.useful)]}
    if absent and not plan.is_dry:
        return {"status": "missing parts", "reason": "; ".join(absent), **about, "results": {}}
    if limit_s < 2 * plan.stop_s:
        reason = f"{max(0.0, left_s):.0f} s of the run were left"
        return {**NOT_REACHED, "reason": reason, **about}
    stem = f"{section.number}-{section.name}"
    file, log = plan.folder / f"{stem}.json", plan.folder / f"{stem}.log"
    file.unlink(missing_ok=True)
    words = plan.command(section.name, file, limit_s - plan.stop_s)
    ended = processes.run(words, log, limit_s, plan.environment, plan.stop_s)
    found = read(file)
    reason = found.pop("error", "") if ended.status == "failed" else ended.reason
    return {
        "status": ended.status,
        "reason": reason or ended.reason,
        "seconds": round(ended.seconds, 1),
        **about,
        "results": found,
    }


def run_in_this_process(findings: Iterator[Findings], file: Path) -> int:
    """Write what a section has found so far after each result; returns the exit status."""
    found: Findings = {}
    try:
        for part in findings:
            found |= part
            write(file, found)
    except Exception as error:  # its text is the result of this section
        traceback.print_exc()
        write(file, {**found, "error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def context(environment: Mapping[str, str], limit_s: float) -> Context:
    """Return the surroundings of a section that begins now."""
    end_s = time.monotonic() + limit_s
    return Context(environment, lambda: end_s - time.monotonic())


def read(file: Path) -> dict[str, Any]:
    """Read the results of a section; empty if the section ended before its first result."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def write(file: Path, document: Mapping[str, Any]) -> None:
    """Replace a file of results atomically."""
    files.replace(file, f"{json.dumps(document, indent=2)}\n".encode())


def _write(plan: Plan, sections: Mapping[str, Any]) -> None:
    for target in plan.targets:
        write(target, _document(plan, sections))


def _document(plan: Plan, sections: Mapping[str, Any]) -> dict[str, Any]:
    together = {**plan.earlier, **sections}
    ordered = {name: together[name] for name in BY_NAME if name in together}
    rows = [] if plan.is_dry else claims.rows(ordered)
    return {**plan.header, "is_dry_run": plan.is_dry, "sections": ordered, "claims": rows}


def unfinished(document: Mapping[str, Any]) -> list[str]:
    """Name the sections that are not done, with their reasons."""
    return [
        f"section {name}: {each['status']}: {each['reason']}"
        for name, each in document["sections"].items()
        if each["status"] != "done"
    ]


def this_command(name: str, file: Path, limit_s: float, is_dry: bool) -> list[str]:
    """Return the command of a section's process."""
    words = [sys.executable, "-m", "loadtest.gpu_check", "--section", name, "--file", str(file)]
    return [*words, "--seconds", f"{limit_s:.0f}", *["--dry-run"] * is_dry]
