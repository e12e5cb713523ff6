"""The photos that a load test sends, each with the classes that count as correct."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from nereid.cli.options import collect
from nereid.insight.tune import photos

ESPRESSO = 967
# Relative frequencies of the sample's sizes.
SIZES = {"640x427": 9, "1920x1080": 1}
OWN = "own photos"
# Indexes of classes, labels of objects, or lines of text.
Results: TypeAlias = frozenset[int | str]
# All photos stay in memory, because reading a file within a turn would count as the server's time.
MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Photo:
    """A photo to send; `kind` is its row in Locust's table.

    A response must have one of the expected results; any is correct if there are none.
    """

    kind: str
    content: bytes
    expected: Results = frozenset()


def expectation(text: str) -> Results:
    """Return the results that a text on the command line can mean: an index, a label, or a line."""
    return frozenset([text, int(text)] if text.isdecimal() else [text] if text else [])


def sample(expected: Results) -> list[Photo]:
    """Return the sample photo in its sizes, each as often as its frequency."""
    of_size = {
        size: Photo(size, photos.jpeg(photos.SIZES_WH[size]), expected or frozenset([ESPRESSO]))
        for size in SIZES
    }
    return [of_size[size] for size, frequency in SIZES.items() for _ in range(frequency)]


def own(
    folder: Path, expected: Results, labels: Callable[[bytes], Sequence[str]] | None = None
) -> list[Photo]:
    """Return the photos of a folder; those directly in it have the results `expected`.

    Args:
        folder: the name of a sub-folder is the label or the index of the class of its photos.
        labels: takes a photo, and returns the labels of the model in the order of its classes. None if the
            name of a sub-folder is itself the correct result.

    Raises:
        OSError: a file cannot be read.
        ValueError: the folder has no photos, or too many, or a sub-folder is not a class of the model.
    """
    if not folder.is_dir():
        raise ValueError(f"'{folder}' is not a folder")
    paths = collect([folder])
    if (size := sum(path.stat().st_size for path in paths)) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES >> 20} MiB of photos, got {size >> 20} MiB")
    names = {path.relative_to(folder).parts[0] for path in paths if path.parent != folder}
    of_name: dict[str, Results] = {name: frozenset([name]) for name in names}
    if names and labels:
        of_name = _classes(names, labels(paths[0].read_bytes()))
    return [
        Photo(OWN, path.read_bytes(), of_name.get(path.relative_to(folder).parts[0], expected))
        for path in paths
    ]


def _classes(names: set[str], labels: Sequence[str]) -> dict[str, Results]:
    """Return the classes of each name; several classes of a model may have the same label."""
    results: dict[str, Results] = {
        name: frozenset(index for index, label in enumerate(labels) if label == name or str(index) == name)
        for name in names
    }
    if unknown := sorted(name for name, classes in results.items() if not classes):
        label = f"a label such as '{labels[0]}', or " if labels[0] else ""
        raise ValueError(
            f"the sub-folder '{unknown[0]}' is not a class of the model; expected {label}an index from 0 to "
            f"{len(labels) - 1}"
        )
    return results
