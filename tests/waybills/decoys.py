"""Pages of text without images: a tracking number of any carrier, or none, and numbers that are none.

Each number of a carrier is drawn from a format of the package's own table; its check digit is found by trial.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from nereid.tasks.read.characters import RecognisedLine
from nereid.tasks.read.fields.shapes import shapes
from nereid.tasks.read.fields.specification import CarrierFormat, Format, parse_value
from tests.waybills import words
from tests.waybills.numbers import digits, grouped
from tests.waybills.paper import rectangle

HEIGHT, LEADING = 20.0, 32.0
LENGTHS = (7, 9, 10, 10, 12, 12, 12, 13, 14, 15, 16, 18, 20, 22)
OWN_LABELS = "TRACKING #|Tracking number:|TRK#|Waybill No.|Sendungsnummer:|N° de suivi|运单号|快递单号："
# The table of the package does not list the last four.
OTHER_LABELS = (
    "Order No|Purchase order|Account|Invoice #|Customer reference|ID No.|Card no|EAN|Kundennummer|"
    "Rechnungsnummer|订单号|身份证号|客户编号|Vorgang|Locker|Permit|网点编码"
)


@dataclass(frozen=True, slots=True)
class Page:
    """Lines of text, the tracking number without spaces, or None, and digits of another number, or none."""

    lines: list[RecognisedLine]
    number: str | None
    other: str = ""


def page(seed: int, forms: Sequence[CarrierFormat]) -> Page:
    """Return the page of a seed: half of them have other numbers, and one of ten has no tracking number.

    Of the pages without one, some have its label and nothing beside it.
    """
    draw = Random(seed)
    has_number, has_decoys = seed % 10 != 0, seed % 2 == 0
    form, carrier = draw.choice([pair for pair in forms if pair[1] and pair[0].joined])
    blocks = [[words.person(draw), *words.address(draw)], [f"SHIP TO: {words.person(draw)}"]]
    if carrier and carrier.labels and draw.random() < 0.5:
        blocks.append([draw.choice(carrier.labels)])
    number = None
    if has_number:
        written, number = _number(draw, form)
        label, kind = words.one_of(draw, OWN_LABELS), draw.random()
        blocks.append([written] if kind < 0.1 else [label, written] if kind < 0.5 else [f"{label} {written}"])
    elif draw.random() < 0.3:
        blocks.append([words.one_of(draw, OWN_LABELS)])
    others = [_decoy(draw) for _ in range(draw.randint(2, 6))] if has_decoys else []
    blocks += others
    if has_decoys and draw.random() < 0.2:
        blocks.append(_table(draw))
    draw.shuffle(blocks)
    return Page(_set(draw, blocks), number, "".join(filter(str.isdigit, others[-1][-1])) if others else "")


def _number(draw: Random, form: Format) -> tuple[str, str]:
    """Return a number of a format as it is printed, and its value."""
    while True:
        shape = draw.choice(shapes(form.pattern))
        text = "".join(draw.choice(sorted(accepted)) for accepted, *_ in shape)
        verdict = parse_value(form, text)
        if verdict and verdict[1] is not False and len({*verdict[0]}) > 3:
            return grouped(text, *draw.choice(((99,), (4,), (3,), (2, 4)))), verdict[0]


def _decoy(draw: Random) -> list[str]:
    """Return the lines of another number: beside its label, below it, or alone."""
    kind = draw.random()
    if kind < 0.2:
        us, cn = f"+1 {words.phone(draw)}", f"+86 {words.chinese_phone(draw)}"
        free = f"1-800-{digits(draw, 3)}-{digits(draw, 4)}"
        phone = draw.choice((us, cn, free, words.phone(draw), words.chinese_phone(draw)))
        return [draw.choice(("", "TEL ", "电话：", "Questions? ", "For tracking call ", "运单查询")) + phone]
    if kind < 0.3:
        day = f"2026-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
        return [draw.choice((f"Date {day} 14:20", f"{day} {digits(draw, 2)}:12:09", f"PRINTED {day}"))]
    label = words.one_of(draw, OTHER_LABELS)
    number = digits(draw, draw.choice(LENGTHS))
    number = draw.choice(("", "", "", "SO", "INV", "A")) + number
    written = grouped(number, draw.choice((99, 99, 4)))
    if kind < 0.35:
        return [written]
    if kind < 0.4:
        return [draw.choice(("Track your parcel at www.example.com/tracking", "扫码查询运单")), written]
    return [label, written] if kind < 0.5 else [f"{label}{draw.choice((': ', ' '))}{written}"]


def _table(draw: Random) -> list[str]:
    """Return labels of other numbers in a row, and their numbers in the next one."""
    values = [digits(draw, draw.choice(LENGTHS)) for _ in range(2)]
    labels = [words.one_of(draw, "Order No|Invoice|Account|Permit") for _ in range(2)]
    return ["".join(f"{text:<24}" for text in texts).strip() for texts in (labels, values)]


def _set(draw: Random, blocks: Sequence[Sequence[str]]) -> list[RecognisedLine]:
    """Place the blocks below each other, or in two columns."""
    width, y = draw.choice((1, 1, 2)), 20.0
    lines: list[RecognisedLine] = []
    for start in range(0, len(blocks), width):
        for column, block in enumerate(blocks[start : start + width]):
            for row, text in enumerate(block):
                left, top = 30 + 560.0 * column, y + row * LEADING
                wide = sum(2 if ord(character) > 0x2E80 else 1 for character in text) * HEIGHT / 2
                box = rectangle(left, top, left + wide, top + HEIGHT).astype(np.float32)
                lines.append(RecognisedLine(text, draw.uniform(0.9, 1.0), box))
        y += LEADING * max(map(len, blocks[start : start + width])) + draw.choice((0, 12, 40))
    return lines
