"""A model's label file: one line per class of the output that it is for."""

from math import prod
from pathlib import Path

from nereid.config.model_config import TensorSpec
from nereid.errors import OperationFailed


class InvalidLabels(OperationFailed):
    """The labels are not those of the output; the message says why."""


def check_count(labels: Path, output: TensorSpec) -> int:
    """Count the lines of a label file against the elements of an output; returns the count.

    Raises:
        InvalidLabels: they are not as many, or the file cannot be read.
    """
    try:
        count = len(labels.read_text().removesuffix("\n").split("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidLabels(f"cannot read the labels '{labels}': {error}") from None
    if -1 not in output.dims and count != (classes := prod(output.dims)):
        raise InvalidLabels(f"{labels.name} has {count} labels, output '{output.name}' has {classes} classes")
    return count
