"""Output of `nereid drift show`: tables of signals, shadows and feedback."""

from nereid.base.units import format_duration
from nereid.cli.tables import print_table
from nereid.insight.drift.comparison import SignalDrift, VariantDrift
from nereid.insight.drift.drift_report import DriftReport

NONE = "—"


def show(found: DriftReport) -> None:
    """Print a report for a person."""
    route = found.route
    if route.problem:
        print(f"{route.route}: {route.problem}")
    for each in route.variants:
        print(_heading(each))
        if each.signals:
            print_table(
                *("signal", "verdict", "PSI", "limit", "JS", "limit", "images"),
                rows=[_row(signal) for signal in each.signals],
            )
    print(f"last {format_duration(found.window_s)}, of which {format_duration(found.covered_s)} are recorded")
    if found.agreement:
        rows = [
            (
                each.shadow,
                format_duration(each.age_s),
                f"{each.requests:,}",
                f"{each.agreed / each.requests:.1%}",
            )
            for each in found.agreement
        ]
        print_table("shadow", "ended before", "requests", "same best class", rows=rows)
    if found.accuracy:
        rows = [
            (
                each.variant,
                f"{each.answers:,}",
                f"{each.correct / each.answers:.1%}",
                f"{each.low:.1%} to {each.high:.1%}",
            )
            for each in found.accuracy
        ]
        print_table("variant", "feedback", "correct", "95 % interval", rows=rows)


def _heading(variant: VariantDrift) -> str:
    name = f"{variant.variant} (version {variant.version} of {variant.model})"
    if variant.problem:
        return f"{name}: not compared: {variant.problem}"
    age = format_duration(variant.reference_age_s or 0)
    verdict = "drift" if variant.has_drifted else "no drift"
    return f"{name}: {verdict}; {variant.requests:,} images in the window, reference {age} old"


def _row(signal: SignalDrift) -> tuple[str, ...]:
    numbers = [
        f"{values[measure]:.3f}" if measure in values else NONE
        for measure in ("psi", "js")
        for values in (signal.score, signal.limit)
    ]
    return signal.signal, signal.verdict, *numbers, f"{signal.images:,}"
