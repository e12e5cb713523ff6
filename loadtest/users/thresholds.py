"""The thresholds of a load test: read from a TOML file, and compared with a report."""

import argparse
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from loadtest import record
from loadtest.users.report import Report, Row

DEFAULT = Path(__file__).parents[1] / "thresholds.toml"

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of each protocol in a scenario; None for no limit."""

    p50_ms: Positive | None = None
    p99_ms: Positive | None = None
    error_ratio: Share | None = None
    achieved_ratio: Share | None = None


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits by scenario, and the share of a core that the generator may use."""

    generator_cpu: Positive = 0.8
    closed: Limits = Limits()
    open: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison: the number's name, its limit and its value."""

    name: str
    expected: str
    got: str
    is_met: bool


def read(path: str) -> Thresholds:
    """Read a file of thresholds.

    Raises:
        ArgumentTypeError: the file cannot be read, or has an invalid key or value.
    """
    try:
        return msgspec.convert(tomllib.loads(Path(path).read_text()), Thresholds)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def checked(path: str) -> str:
    """Return the path of a valid file, or an empty one for no thresholds; errors as `read`."""
    if path:
        read(path)
    return path


def compare(report: Report, thresholds: Thresholds) -> list[Line]:
    """Compare a report with the limits of its scenario."""
    limits: Limits = getattr(thresholds, report.scenario)
    lines = [
        _at_most("generator, share of a core", report.generator_cpu, thresholds.generator_cpu),
        _at_most("processes lost", report.lost, 0),
    ]
    if not report.rows:
        lines.append(Line("protocols", "≥ 1", "0", is_met=False))
    for row in report.rows:
        lines += _of(row, limits)
    return lines


def show(scenario: str, lines: Sequence[Line]) -> None:
    """Print the comparisons."""
    print(f"\nthresholds of the {scenario} loop")
    rows = [(line.name, line.expected, line.got, "met" if line.is_met else "FAILED") for line in lines]
    record.show(("threshold", "expected", "got", ""), rows, width=110)


def _of(row: Row, limits: Limits) -> list[Line]:
    lines = [_at_least(f"{row.protocol} correct responses", row.good, 1)]
    for name in ("p50", "p99"):
        if (limit := getattr(limits, f"{name}_ms")) is not None:
            lines.append(_at_most(f"{row.protocol} {name}", row.response_ms[name], limit, " ms"))
    if limits.error_ratio is not None:
        lines.append(_at_most(f"{row.protocol} error ratio", row.error_ratio, limits.error_ratio))
    if limits.achieved_ratio is not None and row.achieved_ratio is not None:
        lines.append(_at_least(f"{row.protocol} achieved ratio", row.achieved_ratio, limits.achieved_ratio))
    return lines


def _at_most(name: str, got: float, limit: float, unit: str = "") -> Line:
    return Line(name, f"≤ {limit:g}{unit}", f"{got:.5g}{unit}", got <= limit)


def _at_least(name: str, got: float, limit: float) -> Line:
    return Line(name, f"≥ {limit:g}", f"{got:.5g}", got >= limit)
