"""Label files of models: one line per class of an output."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

from nereid.base.config.model_config import TensorSpec
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.base.units import escaped, split_lines


class InvalidLabels(OperationFailed):
    """The labels do not fit the output."""


def check_count(labels: Path, output: TensorSpec) -> int:
    """Check that a label file has one line per class of an output; return the number of lines.

    Raises:
        InvalidLabels: the numbers differ, or the file cannot be read.
    """
    try:
        count = len(labels.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidLabels(f"cannot read label file '{labels}': {error}") from None
    if -1 not in output.dims and count != (classes := prod(output.dims)):
        raise InvalidLabels(
            f"{labels.name}: expected {classes} labels for the classes of output '{output.name}', got {count}"
        )
    return count


def check_names(names: Sequence[str], origin: str) -> None:
    """Refuse class names with characters that act on a terminal, or end a text.

    Raises:
        WrongUsage: with the first one.
    """
    for number, name in enumerate(names, start=1):
        if (shown := escaped(name)) != name or "\t" in name:
            raise WrongUsage(
                f"label {number} of {origin}: expected no control characters, got '{shown[:64]}'; "
                "fix: --labels FILE with plain names"
            )


def read_lines(path: Path, classes: int = 0) -> tuple[str, ...]:
    """Return the lines of a user's file; other line breaks of Unicode may be characters of a recogniser.

    Args:
        classes: the number of lines that a network needs; 0 for any.

    Raises:
        WrongUsage: the number differs, or the file is not UTF-8.
    """
    try:
        lines = tuple(split_lines(path.read_text(encoding="utf-8-sig")))
    except UnicodeDecodeError as error:
        found = error.object[error.start]
        raise WrongUsage(
            f"--labels: expected text in UTF-8, got byte {found:#04x} in '{path.name}'; fix: convert the file"
        ) from None
    if classes and len(lines) != classes:
        raise WrongUsage(
            f"--labels: expected {classes:,} lines, one for each class of the network, got {len(lines):,} in "
            f"'{path.name}'"
        )
    return lines
