"""How a task displays its results: the entry point `view` of the tasks that have a command."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Cells: TypeAlias = tuple[Any, ...]
# Corners (x, y) of a box in pixels of the upright image, and the text drawn beside it.
Mark: TypeAlias = tuple[Sequence[tuple[float, float]], str]


@dataclass(frozen=True, slots=True)
class View:
    """How the results of one task are shown.

    Attributes:
        columns: headings of CSV.
        rows: returns the rows of CSV; a result without rows becomes one row of empty cells.
        show: prints the tables of a terminal.
        marks: returns the boxes to draw.
        searchable: returns a file, given its bytes, as a PDF with searchable text; raises InvalidImage.
    """

    columns: tuple[str, ...]
    rows: Callable[[Any], Sequence[Cells]]
    show: Callable[[Any], None]
    marks: Callable[[Any], Sequence[Mark]] = lambda result: ()
    searchable: Callable[[bytes, Any], bytes] | None = None
