"""The generator of rendered waybills, and the score of what is read on them."""

import numpy as np
import pytest

from loadtest.reading_score import KINDS, Passage, errors, has_number, kind, passages
from nereid.tasks.read.characters import RecognisedLine
from nereid.tasks.read.fields.field_search import find_fields
from nereid.tasks.read.fields.specification import read_specification
from tests.waybills.generator import CHECKED, LAYOUTS, waybill
from tests.waybills.labels import FIELDS, collection_label
from tests.waybills.paper import Printed, missing_fonts, rectangle

pytestmark = pytest.mark.skipif(
    bool(missing_fonts()),
    reason="needs fonts; fix: apt-get install fonts-dejavu-core fonts-liberation fonts-wqy-zenhei",
)
WAYBILL = read_specification(FIELDS)


@pytest.mark.parametrize("seed", range(len(LAYOUTS)), ids=list(LAYOUTS))
def test_printed_text_has_the_number(seed):
    image = waybill(seed)
    lines = [RecognisedLine(line.text, 1.0, line.box.astype(np.float32)) for line in image.lines]

    (number,) = [field for field in find_fields(lines, WAYBILL) if field.name == "tracking_number"]

    assert (image.layout, number.value) == (list(LAYOUTS)[seed], image.tracking_number)
    assert number.valid is (True if image.layout in CHECKED else None)


@pytest.mark.parametrize("index", range(0, 120, 8))
def test_label_has_the_number_of_the_collection(index):
    image = collection_label(index)
    lines = [RecognisedLine(line.text, 1.0, line.box.astype(np.float32)) for line in image.lines]

    assert find_fields(lines, WAYBILL)[0].value == image.tracking_number


def test_lines_are_matched_by_their_boxes():
    printed = [Printed("TRK# 1234", rectangle(0, 0, 90, 20)), Printed("5678", rectangle(120, 0, 160, 20))]
    read = [
        RecognisedLine("TRK#", 0.9, rectangle(0, 0, 40, 20)),
        RecognisedLine("1234 5679", 0.9, rectangle(45, 0, 160, 20)),
        RecognisedLine("noise", 0.9, rectangle(300, 300, 350, 320)),
        RecognisedLine("PAID", 0.9, rectangle(500, 500, 550, 520)),
    ]

    matches = passages(printed, read, [rectangle(490, 490, 600, 600)])

    assert matches == [Passage("TRK#12345678", "TRK#12345679"), Passage("", "noise")]
    assert sum(map(errors, matches)) == 6
    assert not has_number("12345678", matches)
    assert has_number("1234", matches)
    asked = (("1234", "1234"), (None, "9"), ("1234", "9"), ("1234", None), ("12345678", "9"), ("77", "9"))
    assert [kind(*pair, matches) for pair in asked] == ["", *KINDS]
