"""`nereid classify`: files and folders in, a table or JSON lines out."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from clients.classifier import Classifier
from clients.prediction import Prediction

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


def collect(paths: Sequence[Path]) -> list[Path]:
    """Return the files among `paths` and the images in its folders, sorted within each folder.

    Raises:
        ValueError: a path does not exist, or a folder holds no image.
    """
    return [image for path in paths for image in _images(path)]


def classify(classifier: Classifier, images: Sequence[Path], top_k: int, as_json: bool) -> int:
    """Classify `images` and print each answer; returns how many failed (reasons go to stderr)."""
    failed = 0
    console = Console()
    for path, outcome in zip(images, _progress(classifier, images, top_k), strict=True):
        if not isinstance(outcome, Prediction):
            failed += 1
            print(f"{path}: {outcome}", file=sys.stderr)
        elif as_json:
            print(json.dumps({"image": str(path)} | asdict(outcome)), flush=True)
        else:
            print(f"{path}: {answered(outcome)}")
            console.print(prediction_table(outcome))
    return failed


def answered(prediction: Prediction) -> str:
    """Say who answered, why, and how long it took."""
    route = f"variant {prediction.variant} by {prediction.reason}, " if prediction.variant else ""
    return f"{route}model version {prediction.version}, {prediction.timings.total_ms:.1f} ms"


def prediction_table(prediction: Prediction) -> Table:
    """Render one prediction: a row per class."""
    table = Table("label", "index", "probability")
    for label in prediction.labels:
        table.add_row(label.name, str(label.index), f"{label.score:.3f}")
    return table


def _progress(classifier: Classifier, images: Sequence[Path], top_k: int) -> Iterator[Prediction | Exception]:
    outcomes = classifier.classify_many(images, top_k=top_k)
    # On stderr, so that stdout stays clean for the answers.
    return iter(
        track(
            outcomes,
            "classifying",
            total=len(images),
            console=Console(stderr=True),
            disable=len(images) < 2 or not sys.stderr.isatty(),
        )
    )


def _images(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if not path.is_dir():
        return [path]
    images = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not images:
        raise ValueError(f"{path} holds no image ({', '.join(sorted(SUFFIXES))})")
    return images
