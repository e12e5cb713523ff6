"""A run of `nereid tune`: search, print the result, and write the profile if it is faster."""

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nereid.base.errors import OperationFailed, invalid_values
from nereid.base.processes import exit_on_sigterm
from nereid.cli.image_files import collect
from nereid.cli.options import show_progress
from nereid.cli.tables import console
from nereid.insight.tune import tuning
from nereid.insight.tune.profiles import TUNED
from nereid.insight.tune.tuning import TuneOptions, TuneReport

HEADINGS = ("", "settings", "concurrency", "images/s", "p50 ms", "p99 ms")


def run(options: TuneOptions, environment: Mapping[str, str], as_json: bool) -> None:
    """Search, print the result, and write the profile if the gain exceeds the noise.

    Raises:
        WrongUsage: the model cannot be tuned, or an image does not exist.
        OperationFailed: the model cannot be served, no setting meets the p99, or a package is missing.
    """
    tuning.check_packages()
    tuned = tuning.find(options)
    with invalid_values():
        images = [path.read_bytes() for path in collect(options.images)]
    for note in tuned.notes:
        show_progress(f"note: {note}")
    with exit_on_sigterm():
        report = tuning.run_search(options, tuned, images, environment, show_progress)
    written: list[str] = []
    if not as_json:
        show(report, console())
    try:
        if report.verdict == "better" and not options.is_dry:
            written = tuning.write(options, tuned, report, show_progress)
        if report.verdict == "infeasible":
            raise OperationFailed(report.reason())
    finally:  # the measurements are printed even if they cannot be written
        if as_json:
            print(json.dumps(report.document() | {"written": written}, indent=2))
        elif report.verdict != "infeasible":
            print(report.reason())
    if not as_json:
        print(_outcome(written))


def show(report: TuneReport, console: Console) -> None:
    """Print the Pareto front, the default and the best candidate as a table."""
    table = Table(*HEADINGS)
    for mark, settings, concurrency, load in report.points():
        numbers = (f"{number:.1f}" for number in (load.rate, load.p50_ms, load.p99_ms))
        table.add_row(mark, escape(settings), str(concurrency), *numbers)
    console.print(table)


def _outcome(written: Sequence[str]) -> str:
    if not written:
        return "nothing is written"
    models = ", ".join(written)
    return f"profile '{TUNED}' written for {models}: nereid serve --profile {TUNED}"
