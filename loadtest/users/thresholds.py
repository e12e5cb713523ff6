"""What a load test must reach: read from a TOML file, held against a report."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.users.report import Report, Row

DEFAULT = Path(__file__).parents[1] / "thresholds.toml"

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class BadThresholds(Exception):
    """The file cannot be meant; the message says what was expected."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each protocol of a scenario is held to; what is left out is not looked at."""

    p50_ms: Positive | None = None
    p99_ms: Positive | None = None
    error_ratio: Share | None = None
    achieved_ratio: Share | None = None


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits by scenario, and how much of a core the generator may take before it measures itself."""

    generator_cpu: Positive = 0.8
    closed: Limits = Limits()
    open: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison: what of, what was expected, what came."""

    what: str
    expected: str
    got: str
    is_met: bool


def read(path: Path) -> Thresholds:
    """Read a file of thresholds.

    Raises:
        BadThresholds: it cannot be read, or has a key or value that cannot be meant.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Thresholds)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadThresholds(f"{path}: {error}") from None


def hold(report: Report, thresholds: Thresholds) -> list[Line]:
    """Compare a report with the limits of its scenario."""
    limits: Limits = getattr(thresholds, report.scenario)
    cpu, most = report.generator_cpu, thresholds.generator_cpu
    lines = [
        _most("generator, share of a core", cpu, most, ""),
        _most("processes lost", report.lost, 0, ""),
    ]
    if not report.rows:
        lines.append(Line("protocols", "≥ 1", "0", is_met=False))
    for row in report.rows:
        lines += _of(row, limits)
    return lines


def show(scenario: str, lines: Sequence[Line]) -> None:
    """Print the comparisons, and which failed."""
    table = Table("threshold", "expected", "got", "")
    for line in lines:
        table.add_row(line.what, line.expected, line.got, "met" if line.is_met else "FAILED")
    console = Console(width=110)
    console.print(f"\nthresholds of the {scenario} loop")
    console.print(table)


def _of(row: Row, limits: Limits) -> list[Line]:
    lines = [_least(f"{row.protocol} right answers", row.good, 1)]
    for name in ("p50", "p99"):
        if (most := getattr(limits, f"{name}_ms")) is not None:
            lines.append(_most(f"{row.protocol} {name}", row.response_ms[name], most, " ms"))
    if limits.error_ratio is not None:
        lines.append(_most(f"{row.protocol} error ratio", row.error_ratio, limits.error_ratio, ""))
    if limits.achieved_ratio is not None and row.achieved_ratio is not None:
        lines.append(_least(f"{row.protocol} achieved ratio", row.achieved_ratio, limits.achieved_ratio))
    return lines


def _most(what: str, got: float, most: float, unit: str) -> Line:
    return Line(what, f"≤ {most:g}{unit}", f"{got:.5g}{unit}", got <= most)


def _least(what: str, got: float, least: float) -> Line:
    return Line(what, f"≥ {least:g}", f"{got:.5g}", got >= least)
