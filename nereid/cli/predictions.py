"""Classification of many images, printed as tables, JSON or CSV."""

import csv
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console
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

from nereid.cli.options import show_progress
from nereid.cli.tables import print_table
from nereid.client.batch_split import Outcome
from nereid.client.classifier import Classifier
from nereid.client.prediction import Prediction
from nereid.errors import OperationFailed
from nereid.processes import StopFlag
from nereid.units import format_ms
from nereid.watched_folder import Arrivals, changes

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
COLUMNS = ("image", "label", "index", "score", "variant", "version", "latency_ms", "error")
# A file counts as complete once it has not changed for this long.
SETTLE_S = 1.0

Format = Literal["table", "json", "jsonl", "csv"]
Write: TypeAlias = Callable[[str, Outcome], None]


def collect(paths: Sequence[Path]) -> list[Path]:
    """Return the files among `paths` and the images in its folders, sorted within each folder.

    Raises:
        ValueError: a path does not exist, or a folder holds no image.
    """
    return [image for path in paths for image in _images(path)]


def printing(output_format: Format) -> AbstractContextManager[Write]:
    """Give the function that prints each outcome; brackets and headings of the format are printed once."""
    return contextmanager(_FORMATS[output_format])()


def classify_all(classifier: Classifier, images: Sequence[Path], top_k: int, write: Write) -> int:
    """Classify `images` and print each outcome; returns the number that failed (reasons go to stderr)."""
    with _progress(len(images)) as progress:
        task = progress.add_task("classifying", total=len(images))
        failed = 0
        for outcome in classifier.classify_many(images, top_k=top_k):
            failed += _print_outcome(write, outcome)
            progress.advance(task)
    return failed


def arrivals_in(folder: Path) -> Arrivals:
    """List the images of a folder, so that only later ones count as new.

    Raises:
        OperationFailed: a package is missing.
    """
    if not importlib.util.find_spec("watchfiles"):
        raise OperationFailed(
            "--watch needs the package 'watchfiles'; fix: pip install 'nereid-serving[publish]'"
        )
    return Arrivals(lambda: _images_in(folder), SETTLE_S)


def watch_folder(classifier: Classifier, folder: Path, arrivals: Arrivals, top_k: int, write: Write) -> None:
    """Classify the images that appear in a folder, each once it is complete, until SIGINT or SIGTERM."""
    stop = StopFlag()
    show_progress(f"watching {folder}")
    for _ in changes(folder, SETTLE_S / 2, False, stop, show_progress):
        images = arrivals.step()
        for outcome in classifier.classify_many(images, top_k=top_k):
            _print_outcome(write, outcome)
    show_progress("stopped")


def _print_outcome(write: Write, outcome: Outcome) -> bool:
    """Print an outcome; returns whether it is a failure."""
    # A file name may hold bytes that are not text.
    name = os.fsencode(outcome.image).decode(errors="replace")
    write(name, outcome)
    if isinstance(outcome, Prediction):
        return False
    show_progress(f"{name}: {outcome}")
    return True


def _as_table() -> Iterator[Write]:
    def write(name: str, outcome: Outcome) -> None:
        if isinstance(outcome, Prediction):
            route = f"variant {outcome.variant} by {outcome.reason}, " if outcome.variant else ""
            print(f"{name}: {route}model version {outcome.version}, {format_ms(outcome.timings.total_ms)}")
            rows = [(label.name, str(label.index), f"{label.score:.3f}") for label in outcome.labels]
            print_table("label", "index", "probability", rows=rows)

    yield write


def _as_json_lines() -> Iterator[Write]:
    yield lambda name, outcome: print(json.dumps(_plain(name, outcome)), flush=True)


def _as_json() -> Iterator[Write]:
    count = 0

    def write(name: str, outcome: Outcome) -> None:
        nonlocal count
        print(",\n" if count else "[\n", json.dumps(_plain(name, outcome)), sep="", end="", flush=True)
        count += 1

    try:
        yield write
    finally:
        print("\n]" if count else "[]", flush=True)


def _as_csv() -> Iterator[Write]:
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(COLUMNS)

    def write(name: str, outcome: Outcome) -> None:
        if isinstance(outcome, Prediction):
            best = outcome.labels[0]
            who = (outcome.variant, outcome.version, f"{outcome.timings.total_ms:.3f}")
            rows.writerow((name, best.name, best.index, best.score, *who, ""))
        else:
            rows.writerow((name, *[""] * 6, str(outcome)))
        sys.stdout.flush()

    yield write


_FORMATS: dict[Format, Callable[[], Any]] = {
    "table": _as_table,
    "json": _as_json,
    "jsonl": _as_json_lines,
    "csv": _as_csv,
}


def _plain(name: str, outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Prediction):
        fields = asdict(outcome)
        del fields["image"]
        return {"image": name} | fields
    return {"image": name, "error": str(outcome)}


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
        console=Console(stderr=True),  # stdout has only the responses
        # Only where both streams share a terminal would the bar overwrite responses.
        redirect_stdout=sys.stdout.isatty(),
        disable=count < 2 or not sys.stderr.isatty(),
    )


def _images(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"'{path}' does not exist")
    if not path.is_dir():
        return [path]
    if not (images := _images_in(path)):
        raise ValueError(f"'{path}' has no image, expected {', '.join(sorted(SUFFIXES))}")
    return images


def _images_in(folder: Path) -> list[Path]:
    # Only regular files: reading a named pipe would block.
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
