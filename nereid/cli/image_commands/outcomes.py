"""Results of many images, printed as tables, JSON or CSV, and drawn."""

import csv
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from nereid.base.errors import OperationFailed
from nereid.base.processes import StopFlag
from nereid.base.units import format_ms
from nereid.base.watched_folder import Arrivals, changes
from nereid.cli.image_commands.view import View
from nereid.cli.options import images_in, show_progress
from nereid.cli.tables import console
from nereid.client.client_errors import NereidError

# A file counts as complete once it has not changed for this long.
SETTLE_S = 1.0

Format = Literal["table", "json", "jsonl", "csv"]
# A result of any kind, or the error of an image; both have the name of the image.
FileOutcome: TypeAlias = Any
Write: TypeAlias = Callable[[str, FileOutcome], None]


def printing(output_format: Format, view: View) -> AbstractContextManager[Write]:
    """Yield the function that prints each outcome; the format's brackets and headings are printed once."""
    return contextmanager(_FORMATS[output_format])(view)


def arrivals_in(folder: Path, more: Sequence[str] = ()) -> Arrivals:
    """List the images of a folder, and files with `more` suffixes, so that only later ones count as new.

    Raises:
        OperationFailed: a package is missing.
    """
    if not importlib.util.find_spec("watchfiles"):
        raise OperationFailed(
            "--watch needs the package 'watchfiles'; fix: pip install 'nereid-serving[publish]'"
        )
    return Arrivals(lambda: images_in(folder, more), SETTLE_S)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of a command's images.

    Attributes:
        infer_many: returns the outcomes of images, in their order.
        write: prints an outcome.
        savers: write a file for each result, from the path of its image; raise OSError.
    """

    infer_many: Callable[[Sequence[Path]], Iterable[FileOutcome]]
    write: Write
    savers: Sequence[Callable[[Path, FileOutcome], None]] = ()

    def all_of(self, images: Sequence[Path], label: str) -> int:
        """Print the outcomes of images, with progress; returns the number that failed."""
        with _progress(len(images)) as progress:
            task = progress.add_task(label, total=len(images))
            failed = 0
            for outcome in self.infer_many(images):
                failed += self._print_and_save(outcome)
                progress.advance(task)
        return failed

    def watched(self, folder: Path, arrivals: Arrivals) -> None:
        """Print the outcomes of complete new images in a folder, until SIGINT or SIGTERM."""
        stop = StopFlag()
        show_progress(f"watching {folder}")
        for _ in changes(folder, SETTLE_S / 2, False, stop, show_progress):
            for outcome in self.infer_many(arrivals.step()):
                self._print_and_save(outcome)
        show_progress("stopped")

    def _print_and_save(self, outcome: FileOutcome) -> bool:
        """Print and draw an outcome; returns whether it is a failure, which also goes to stderr."""
        # A file name may hold bytes that are not text.
        name = os.fsencode(outcome.image).decode(errors="replace")
        self.write(name, outcome)
        if isinstance(outcome, NereidError):
            show_progress(f"{name}: {outcome}")
            return True
        is_saved = True
        for save in self.savers:
            try:
                save(Path(outcome.image), outcome)
            except OSError as error:
                show_progress(f"{name}: {error}")
                is_saved = False
        return not is_saved


def _as_table(view: View) -> Iterator[Write]:
    def write(name: str, outcome: FileOutcome) -> None:
        if not isinstance(outcome, NereidError):
            route = f"variant {outcome.variant} by {outcome.reason}, " if outcome.variant else ""
            print(f"{name}: {route}model version {outcome.version}, {format_ms(outcome.timings.total_ms)}")
            view.show(outcome)

    yield write


def _as_json_lines(view: View) -> Iterator[Write]:
    yield lambda name, outcome: print(_document(name, outcome), flush=True)


def _as_json(view: View) -> Iterator[Write]:
    count = 0

    def write(name: str, outcome: FileOutcome) -> None:
        nonlocal count
        print(",\n" if count else "[\n", _document(name, outcome), sep="", end="", flush=True)
        count += 1

    try:
        yield write
    finally:
        print("\n]" if count else "[]", flush=True)


def _as_csv(view: View) -> Iterator[Write]:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(("image", *view.columns, "variant", "version", "latency_ms", "error"))
    empty = ("",) * len(view.columns)

    def write(name: str, outcome: FileOutcome) -> None:
        if isinstance(outcome, NereidError):
            table.writerow((name, *empty, *[""] * 3, str(outcome)))
        else:
            who = (outcome.variant, outcome.version, f"{outcome.timings.total_ms:.3f}", "")
            table.writerows((name, *cells, *who) for cells in view.rows(outcome) or [empty])
        sys.stdout.flush()

    yield write


_FORMATS: dict[Format, Callable[[View], Any]] = {
    "table": _as_table,
    "json": _as_json,
    "jsonl": _as_json_lines,
    "csv": _as_csv,
}


def _document(name: str, outcome: FileOutcome) -> str:
    if isinstance(outcome, NereidError):
        return json.dumps({"image": name, "error": str(outcome)})
    fields = asdict(outcome)
    del fields["image"]
    return json.dumps({"image": name} | fields, default=lambda array: array.tolist())


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.0f} images/s")


def _progress(count: int) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        console=console(sys.stderr),  # stdout has only the responses
        # Only where both streams share a terminal would the bar overwrite responses.
        redirect_stdout=sys.stdout.isatty(),
        disable=count < 2 or not sys.stderr.isatty(),
    )
