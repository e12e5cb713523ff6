"""Text, fields and barcodes on a terminal, in CSV and drawn on the image."""

from dataclasses import replace

import numpy as np

from nereid.cli.image_commands.view import Cells, Mark, View
from nereid.cli.tables import print_table
from nereid.tasks.read import pdf
from nereid.tasks.read.result import Corners, Field, Reading

# Field boxes are rounded to a tenth of a pixel.
ROUNDING_PX = 0.1
COLUMNS = ("entry", "name", "text", "confidence", "valid", "box", "proof", "carrier", "certain", "page")


def _rows(result: Reading) -> list[Cells]:
    empty = ("", "", "")
    lines = [
        ("line", "", line.text, line.confidence, "", _flat(line.box), *empty, line.page)
        for line in result.lines
    ]
    barcodes = [
        ("barcode", code.symbology, code.text, "", "", _flat(code.box), *empty, code.page)
        for code in result.barcodes
    ]
    return [*lines, *map(_field_row, result.fields), *barcodes]


def _field_row(field: Field) -> Cells:
    box = "" if field.box is None else _flat(field.box)
    about = field.value or "", field.confidence, _verdict(field), box
    return "field", field.name, *about, *_proof(field), field.page


def _proof(field: Field) -> tuple[str, str, str]:
    """Return the proof, the carrier, and whether the value is certain."""
    certain = "" if field.value is None else "yes" if field.certain else "no"
    return field.proof or "", field.carrier or "", certain


def _verdict(field: Field) -> str:
    """Describe in one word whether a field's checksum matches; empty without a checksum or value."""
    return "" if field.valid is None else "yes" if field.valid else "no"


def _flat(box: Corners) -> str:
    return " ".join(f"{number:g}" for point in box for number in point)


def _show_texts(result: Reading) -> None:
    for page in range(1, max(len(result.pages), 1) + 1):
        if len(result.pages) > 1:
            print(f"page {page}")
        _show_page(_on_page(result, page))


def _on_page(result: Reading, page: int) -> Reading:
    return replace(
        result,
        lines=tuple(line for line in result.lines if line.page == page),
        fields=tuple(field for field in result.fields if field.page == page),
        barcodes=tuple(barcode for barcode in result.barcodes if barcode.page == page),
    )


def _show_page(result: Reading) -> None:
    if result.lines:
        rows = [(line.text, f"{line.confidence:.3f}", _format_box(line.box)) for line in result.lines]
        print_table("text", "confidence", "left, top", rows=rows)
    else:
        print("no text")
    if result.fields:
        columns = ("field", "value", "confidence", "valid", "corrected", "proof", "carrier", "certain")
        print_table(*columns, rows=map(_field_cells, result.fields))
    if result.barcodes:
        codes = [(code.text, code.symbology, _format_box(code.box)) for code in result.barcodes]
        print_table("barcode", "symbology", "left, top", rows=codes)


def _field_cells(field: Field) -> tuple[str, ...]:
    if field.value is None:
        return field.name, "not found", *[""] * 6
    corrected = ", ".join(f"{change.read}→{change.value} at {change.position}" for change in field.corrected)
    return field.name, field.value, f"{field.confidence:.3f}", _verdict(field), corrected, *_proof(field)


def _format_box(box: Corners) -> str:
    return ", ".join(f"{min(side):.0f}" for side in zip(*box, strict=True))


def _marked_texts(reading: Reading) -> list[Mark]:
    result = _on_page(reading, 1)
    fields = [(field.box, f"{field.name}: {field.value}") for field in result.fields if field.box]
    named = np.array([box for box, _ in fields]).reshape(-1, 4, 2)
    barcodes = [(code.box, code.text) for code in result.barcodes]
    lines = [(line.box, line.text) for line in result.lines if not _is_any(line.box, named)]
    return [*lines, *barcodes, *fields]


def _is_any(box: Corners, others: np.ndarray) -> bool:
    """Return whether a box equals one of the others [N, 4, 2], within the rounding of their corners."""
    return bool((np.abs(others - np.array(box)) <= ROUNDING_PX).all(axis=(1, 2)).any())


VIEW = View(COLUMNS, _rows, _show_texts, _marked_texts, pdf.searchable)
