"""Objects on a terminal, in CSV and drawn on the image."""

from nereid.cli.image_commands.view import Cells, Mark, View
from nereid.cli.tables import print_table
from nereid.tasks.detect.result import Detection


def _objects(result: Detection) -> list[Cells]:
    return [(entry.label, entry.score, *entry.box) for entry in result.objects]


def _show_objects(result: Detection) -> None:
    if not result.objects:
        print("no object")
        return
    rows = [
        (entry.label, f"{entry.score:.3f}", *(f"{side:.0f}" for side in entry.box))
        for entry in result.objects
    ]
    print_table("label", "score", "left", "top", "right", "bottom", rows=rows)


def _marked_objects(result: Detection) -> list[Mark]:
    marks: list[Mark] = []
    for entry in result.objects:
        left, top, right, bottom = entry.box
        corners = (left, top), (right, top), (right, bottom), (left, bottom)
        marks.append((corners, f"{entry.label} {entry.score:.2f}"))
    return marks


VIEW = View(("label", "score", "left", "top", "right", "bottom"), _objects, _show_objects, _marked_objects)
