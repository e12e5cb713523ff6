"""A recogniser's characters before it is served: their origin, lines and count."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from nereid.base.errors import WrongUsage
from nereid.base.units import split_lines
from nereid.repository import onnx_graph
from nereid.tasks.read.characters import KEY

# Origins of characters.
FILE, LABELS, CURRENT = f"the file's metadata '{KEY}'", "--labels", "the current version"
FIXES = {
    LABELS: "fix: --labels with one character per line, in the order of the classes",
    CURRENT: f"fix: write the characters to the file's metadata '{KEY}', one per line",
}
# First lines of lists that include the blank. Source: class lists of PaddleOCR and of CTC decoders.
BLANKS = frozenset({"blank", "<blank>", "[blank]"})


class Classes(NamedTuple):
    """The output with a network's classes, and their number; 0 if the file does not contain it."""

    output: str = ""
    total: int = 0


def characters_of(model: Any) -> tuple[str, ...]:
    """Return the characters in a file's metadata; () if it has none."""
    text = onnx_graph.metadata(model).get(KEY)
    return tuple(split_lines(text)) if text else ()


def choose(
    characters: Sequence[str], labels: Sequence[str], origin: str, classes: Classes
) -> tuple[str, ...]:
    """Return the file's own characters; the labels if the file has none, or only the labels match.

    Args:
        characters: characters in the file's metadata.
        labels: characters from the user, or from the current version.
        origin: origin of the labels, `LABELS` or `CURRENT`.
        classes: the network's classes.

    Raises:
        WrongUsage: there are none, they do not match the classes, or the two lists differ.
    """
    if not characters and not labels:
        raise WrongUsage(
            f"expected the characters of the recogniser, got none: the file has no metadata '{KEY}'; "
            f"{FIXES[origin]}"
        )
    file_problem = _problem(characters, FILE, FIXES[origin], classes) if characters else ""
    if characters and (not labels or tuple(characters) == tuple(labels)):
        if file_problem:
            raise WrongUsage(file_problem)
        return tuple(characters)
    if characters and not file_problem:
        raise WrongUsage(
            f"expected the {len(characters):,} characters of {FILE}, got {len(labels):,} others from "
            f"{origin}; fix: leave out {origin}"
        )
    if problem := _problem(labels, origin, FIXES[origin], classes):
        raise WrongUsage(problem)
    return tuple(labels)


def notes(characters: Sequence[str], classes: Classes) -> list[str]:
    """Return what the user should check about matching characters."""
    if not classes.total:
        return [
            "the number of characters cannot be checked, because the file does not contain the number of "
            "classes; fix: compare the lines that are read with the images"
        ]
    if len(characters) == classes.total - 1 and characters[-1] != " ":
        return [
            f"the {classes.total:,} classes are the blank and {len(characters):,} characters, without a "
            "space; fix: remove the line too many, if the network reads spaces"
        ]
    return []


def _problem(found: Sequence[str], origin: str, fix: str, classes: Classes) -> str:
    """Return why characters cannot belong to a network; empty if they can."""
    if "" in found:
        return (
            f"expected a character in each line of {origin}, got an empty line {found.index('') + 1}; fix: "
            "remove that line, or write a space into it if the network was trained with the line"
        )
    if found[0].lower() in BLANKS:
        return (
            f"expected the first character in line 1 of {origin}, got '{found[0]}'; fix: remove that line, "
            "because the blank is always the first class"
        )
    if classes.total and len(found) not in (classes.total - 1, classes.total - 2):
        return (
            f"expected {classes.total - 1:,} characters, or {classes.total - 2:,} and a space, for the "
            f"{classes.total:,} classes of output '{classes.output}', whose first is the blank, got "
            f"{len(found):,} from {origin}; {fix}"
        )
    return ""
