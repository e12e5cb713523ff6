"""An image's embedding on a terminal and in CSV."""

from nereid.cli.image_commands.view import Cells, View
from nereid.cli.tables import print_table
from nereid.tasks.embed.result import Embedding

SHOWN = 6


def _rows(result: Embedding) -> list[Cells]:
    return [(len(result.vector), " ".join(map(str, result.vector)))]


def _show(result: Embedding) -> None:
    first = "  ".join(f"{number:.3f}" for number in result.vector[:SHOWN])
    print_table("dims", "first numbers", rows=[(str(len(result.vector)), f"{first}  …")])


VIEW = View(("dims", "vector"), _rows, _show)
