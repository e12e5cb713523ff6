"""Label files of models: one line per class of an output."""

from math import prod
from pathlib import Path

from nereid.config.model_config import TensorSpec
from nereid.errors import OperationFailed


class InvalidLabels(OperationFailed):
    """The labels do not fit the output."""


def check_count(labels: Path, output: TensorSpec) -> int:
    """Check that a label file has one line per class of an output; return the number of lines.

    Raises:
        InvalidLabels: the numbers differ, or the file cannot be read.
    """
    try:
        count = len(labels.read_text().removesuffix("\n").split("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidLabels(f"cannot read label file '{labels}': {error}") from None
    if -1 not in output.dims and count != (classes := prod(output.dims)):
        raise InvalidLabels(
            f"{labels.name}: expected {classes} labels for the classes of output '{output.name}', got {count}"
        )
    return count
