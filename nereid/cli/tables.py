"""Tables on a terminal, and in full width in a pipe or a file."""

import sys
from collections.abc import Iterable, Sequence
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from nereid.base.units import escaped

# Wider than any row, so that nothing is cut off without a terminal.
UNLIMITED = 10_000


class SafeConsole(Console):
    """A console that sends its own escape sequences to the terminal, and escapes those in texts."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the pieces of a text with their styles."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)


def console(file: IO[str] | None = None) -> Console:
    """Return a console as wide as its terminal, or of unlimited width without one."""
    target = file or sys.stdout
    raw = getattr(target, "rich_proxied_file", target)
    return SafeConsole(file=raw, width=None if target.isatty() else UNLIMITED)


def print_table(*columns: str, rows: Iterable[Sequence[str]]) -> None:
    """Print rows of text under their columns."""
    table = Table(*(Column(name, overflow="fold") for name in columns))
    for row in rows:
        table.add_row(*(Text(escaped(cell)) for cell in row))  # Text: a value may look like markup
    console().print(table)
