"""The classes of a mask on a terminal and in CSV."""

import numpy as np
from nereid.tasks.segment.result import Mask

from nereid.cli.image_commands.view import View
from nereid.cli.tables import print_table


def _rows(result: Mask) -> list[tuple[str]]:
    return [(" ".join(map(str, np.unique(result.classes))),)]


def _show(result: Mask) -> None:
    print_table("classes", rows=_rows(result))


VIEW = View(("classes",), _rows, _show)
