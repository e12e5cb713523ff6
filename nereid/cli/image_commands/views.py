"""Results on a terminal and in CSV: the part of the output that depends on the task."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nereid.cli.tables import print_table
from nereid.tasks.classify.result import Prediction
from nereid.tasks.detect.result import Detection
from nereid.tasks.read.result import Corners, Field, Reading

Cells: TypeAlias = tuple[Any, ...]
# Corners of a box, and the text that is written at it.
Mark: TypeAlias = tuple[Corners, str]
# Boxes of fields are rounded to a tenth of a pixel.
ROUNDING_PX = 0.1
READ_COLUMNS = ("entry", "name", "text", "confidence", "valid", "box", "proof", "carrier", "certain")


@dataclass(frozen=True, slots=True)
class View:
    """How results of one kind are shown.

    Attributes:
        columns: headings of CSV.
        rows: returns the rows of CSV; a result without rows becomes one row of empty cells.
        show: prints the tables of a terminal.
        marks: returns the boxes to draw.
    """

    columns: tuple[str, ...]
    rows: Callable[[Any], Sequence[Cells]]
    show: Callable[[Any], None]
    marks: Callable[[Any], Sequence[Mark]] = lambda result: ()


def _best_class(found: Prediction) -> list[Cells]:
    best = found.labels[0]
    return [(best.name, best.index, best.score)]


def _show_classes(found: Prediction) -> None:
    rows = [(label.name, str(label.index), f"{label.score:.3f}") for label in found.labels]
    print_table("label", "index", "probability", rows=rows)


def _texts(found: Reading) -> list[Cells]:
    lines = [
        ("line", "", line.text, line.confidence, "", _flat(line.box), "", "", "") for line in found.lines
    ]
    barcodes = [
        ("barcode", each.symbology, each.text, "", "", _flat(each.box), "", "", "") for each in found.barcodes
    ]
    return [*lines, *map(_field_row, found.fields), *barcodes]


def _field_row(field: Field) -> Cells:
    box = "" if field.box is None else _flat(field.box)
    return "field", field.name, field.value or "", field.confidence, _verdict(field), box, *_proof(field)


def _proof(field: Field) -> tuple[str, str, str]:
    """Return proof, carrier, and whether the value is certain."""
    certain = "" if field.value is None else "yes" if field.certain else "no"
    return field.proof or "", field.carrier or "", certain


def _verdict(field: Field) -> str:
    """Return whether the checksum of a field is right, in a word; empty without a checksum or value."""
    return "" if field.valid is None else "yes" if field.valid else "no"


def _flat(box: Corners) -> str:
    return " ".join(f"{number:g}" for point in box for number in point)


def _show_texts(found: Reading) -> None:
    if found.lines:
        rows = [(line.text, f"{line.confidence:.3f}", _place(line.box)) for line in found.lines]
        print_table("text", "confidence", "left, top", rows=rows)
    else:
        print("no text")
    if found.fields:
        columns = ("field", "value", "confidence", "valid", "corrected", "proof", "carrier", "certain")
        print_table(*columns, rows=map(_field_cells, found.fields))
    if found.barcodes:
        codes = [(each.text, each.symbology, _place(each.box)) for each in found.barcodes]
        print_table("barcode", "symbology", "left, top", rows=codes)


def _field_cells(field: Field) -> tuple[str, ...]:
    if field.value is None:
        return field.name, "not found", *[""] * 6
    corrected = ", ".join(f"{each.read}→{each.value} at {each.position}" for each in field.corrected)
    return field.name, field.value, f"{field.confidence:.3f}", _verdict(field), corrected, *_proof(field)


def _place(box: Corners) -> str:
    return ", ".join(f"{min(side):.0f}" for side in zip(*box, strict=True))


def _marked_texts(found: Reading) -> list[Mark]:
    fields = [(each.box, f"{each.name}: {each.value}") for each in found.fields if each.box]
    named = [box for box, _ in fields]
    barcodes = [(each.box, each.text) for each in found.barcodes]
    lines = [(line.box, line.text) for line in found.lines if not _is_any(line.box, named)]
    return [*lines, *barcodes, *fields]


def _is_any(box: Corners, others: Sequence[Corners]) -> bool:
    """Return whether a box is one of others, up to the rounding of their corners."""
    return any(
        all(
            abs(side - rounded) <= ROUNDING_PX
            for point, near in zip(box, other, strict=True)
            for side, rounded in zip(point, near, strict=True)
        )
        for other in others
    )


def _objects(found: Detection) -> list[Cells]:
    return [(each.label, each.score, *each.box) for each in found.objects]


def _show_objects(found: Detection) -> None:
    if not found.objects:
        print("no object")
        return
    rows = [
        (each.label, f"{each.score:.3f}", *(f"{side:.0f}" for side in each.box)) for each in found.objects
    ]
    print_table("label", "score", "left", "top", "right", "bottom", rows=rows)


def _marked_objects(found: Detection) -> list[Mark]:
    return [(_corners(*each.box), f"{each.label} {each.score:.2f}") for each in found.objects]


def _corners(left: float, top: float, right: float, bottom: float) -> Corners:
    return (left, top), (right, top), (right, bottom), (left, bottom)


CLASSES = View(("label", "index", "score"), _best_class, _show_classes)
TEXTS = View(READ_COLUMNS, _texts, _show_texts, _marked_texts)
OBJECTS = View(("label", "score", "left", "top", "right", "bottom"), _objects, _show_objects, _marked_objects)
