"""Rendered waybills by seed: encoded photo, tracking number, and the text with its boxes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import numpy as np

from tests.waybills import chinese, latin
from tests.waybills.damage import bad_print, folded, mapped, photographed, recorded, stamped
from tests.waybills.paper import Paper, Printed

# Two disjoint sets. Only the record of accuracy reads the second: no code may be tuned on it.
DEVELOPMENT, PROOF = range(500), range(200_000, 200_500)
SETS = {"development": DEVELOPMENT, "proof": PROOF}

LAYOUTS: Mapping[str, Callable[[Random], tuple[Paper, str]]] = {
    "parcel": latin.parcel,
    "express": latin.express,
    "postal": latin.postal,
    "logistic": latin.logistic,
    "chinese courier": chinese.courier,
    "chinese postal": chinese.postal,
}
# Layouts whose number has a check digit that is published.
CHECKED = frozenset(LAYOUTS) - {"chinese courier"}


@dataclass(frozen=True, slots=True)
class Waybill:
    """A photo of a waybill.

    Attributes:
        seed: of its random parts.
        layout: a key of `LAYOUTS`, or what else it shows.
        encoded: JPEG.
        tracking_number: without spaces; None if there is none.
        lines: printed text; corners are in pixels of the photo.
        ignored: corners [4, 2] of marks whose text does not count, such as stamps.
    """

    seed: int
    layout: str
    encoded: bytes
    tracking_number: str | None
    lines: tuple[Printed, ...]
    ignored: tuple[np.ndarray, ...]


def waybill(seed: int, has_barcodes: bool = False) -> Waybill:
    """Return the waybill of a seed, perhaps with bars that say it; equal seeds give equal ones."""
    draw = Random(seed)
    layout = list(LAYOUTS)[seed % len(LAYOUTS)]
    paper, number = LAYOUTS[layout](draw)
    if has_barcodes:
        paper.print_numbers()
    return photo(seed, layout, paper, number, draw)


def photo(seed: int, layout: str, paper: Paper, number: str | None, draw: Random) -> Waybill:
    """Return the photo of a sheet that was printed, stamped and folded."""
    bad_print(paper, draw)
    image, matrix = photographed(folded(stamped(paper, draw), draw), draw)
    return Waybill(
        seed,
        layout,
        recorded(image, draw),
        number,
        tuple(Printed(line.text, mapped(matrix, line.box)) for line in paper.lines),
        tuple(mapped(matrix, area) for area in paper.ignored),
    )
