"""An image's classes on a terminal and in CSV."""

from nereid.cli.image_commands.view import Cells, View
from nereid.cli.tables import print_table
from nereid.tasks.classify.result import Prediction


def _best_class(result: Prediction) -> list[Cells]:
    best = result.labels[0]
    return [(best.name, best.index, best.score)]


def _show_classes(result: Prediction) -> None:
    rows = [(label.name, str(label.index), f"{label.score:.3f}") for label in result.labels]
    print_table("label", "index", "probability", rows=rows)


VIEW = View(("label", "index", "score"), _best_class, _show_classes)
