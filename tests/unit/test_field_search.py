"""Fields out of lines: candidates, labels, corrections, and bounds."""

import json
import random
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereid.base.assets import TEXT_REPOSITORY
from nereid.base.contract import MAX_LINES
from nereid.tasks.read.characters import RecognisedLine
from nereid.tasks.read.fields.check_digits import CHECKSUMS
from nereid.tasks.read.fields.corrections import CharacterCorrection, NumberReading, read_number
from nereid.tasks.read.fields.field_search import FoundField, find_fields, missing_fields
from nereid.tasks.read.fields.specification import (
    Format,
    carrier_formats,
    parse_specification,
    read_specification,
)
from tests.tables import cases, rows

WAYBILL = read_specification(TEXT_REPOSITORY / "read_waybill_v1" / "waybill.json")
UPS, FEDEX, S10, SSCC = "1Z999AA10123456784", "790535312317", "RB123456785GB", "000123450000000027"


def line(text, left=0.0, top=0.0, width=None, height=20.0, confidence=0.9, others=""):
    wide = sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
    right, bottom = left + (wide * height / 2 if width is None else width), top + height
    box = np.array([[left, top], [right, top], [right, bottom], [left, bottom]], np.float32)
    return RecognisedLine(text, confidence, box, others=others)


def turned(given_line, degrees):
    angle = np.deg2rad(degrees)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    return RecognisedLine(given_line.text, given_line.confidence, (given_line.box @ turn).astype(np.float32))


def tracking(*lines):
    return find_fields(lines, WAYBILL)[0]


@rows(
    ([line("TRACKING #: 1Z 999 AA1 01 2345 6784")], UPS),
    ([line("1z999aa10123456784")], UPS),
    ([line("RB123456785.GB")], S10),
    ([line("ＲＢ１２３４５６７８５ＧＢ")], S10),
    ([line("TRK# 7905-3531-2317")], FEDEX),
    ([line("TRKB"), line("7905 3531 2317", top=30)], FEDEX),
    ([line("TRK#"), line("7905 3531", left=60), line("2317", left=160)], FEDEX),
    ([line("(00) 0 0012345 000000002 7")], SSCC),
    ([line("运单号SF1234567890123收件人")], "SF1234567890123"),
    ([line("运单号:SF 1234 5678 9012 3")], "SF1234567890123"),
    ([line("追踪号：JDVA12345678901-1-1-")], "JDVA12345678901"),
    ([line("KQ 1234 5678 5GB")], "KQ123456785GB"),
    ([line("SF1111111111111"), line("运单号", top=100), line("SF2222222222222", top=130)], "SF2222222222222"),
    # Letters that the format prescribes, dirt between digits, and a label with a wrong letter.
    ([line("运单号:5F 1234 5678 9012 3")], "SF1234567890123"),
    ([line("SF :1234 5678 9012 3")], "SF1234567890123"),
    ([line("TRK# 1234.5678 9012")], "123456789012"),
    ([line("TRACKING NO. 1234 5678 90:12")], "123456789012"),
    ([line("Sendungsmummer:"), line("42345678901", top=30)], "42345678901"),
    ([line("N de suiv| 7905 3531 2317")], FEDEX),
    ([line("ORIGIN ID:LAXA"), line("7905 3531 2317", top=300)], FEDEX),
    # Labels: far away with nothing between, another parcel's, and a small line between.
    ([line("Tracking No."), line(FEDEX, left=700)], FEDEX),
    ([line("Tracking No."), line("EUR", left=400), line(FEDEX, left=700)], None),
    ([line(f"Return tracking number {FEDEX}"), line("Tracking number 394812736453", top=30)], "394812736453"),
    ([line("Tracking number"), line("Ref 12345", top=22, height=14), line(FEDEX, top=45)], FEDEX),
    ([line("00369012344716113412"), line("00923986657310", top=24)], "369012344716113412"),
    # A part of a number is not a number.
    ([line("运单号:5X 1234 5678 9012 3")], None),
    ([line("5F 1234 5678 9012 3")], None),
    ([line("TRK# 1234.5678 9013")], None),
    ([line("Sendungsmummmer"), line("42345678901", top=30)], None),
    ([line("Tracking Number"), line("Kundennunmer: 42345678901", top=30)], None),
    ([line("TRK# 1234 5678 9012"), line("3", left=260)], "123456789012"),
    ids=lambda value: repr(value)[:40],
)
def test_number_is_found(lines, value):
    assert tracking(*lines).value == value


@pytest.mark.parametrize("degrees", [-90, -10, 3, 180])
def test_turned_page_is_read_alike(degrees):
    lines = [line("TRK#"), line("7905 3531", left=60), line("2317", left=160)]
    lines.append(line("9865 7878 8855", top=300))

    assert tracking(*(turned(text_line, degrees) for text_line in lines)).value == FEDEX


def test_number_with_a_valid_checksum_wins():
    field = tracking(line("TRACKING # 1Z999AA10123456785"), line(S10, top=300))

    assert (field.value, field.valid) == (S10, True)


@rows(
    ([], "", True),
    ([line("5967 87", top=54)], "596787", False),
    ([line("5967 87", left=310, top=30)], "596787", False),
    ([line("5967 88", top=54)], "", False),
    ([line("29", top=54)], "", False),
    ([line("5967 87 C", top=78)], "596787", False),
    ([line("5967 Main St", top=54)], "", True),
    ([line("5967 87", top=110)], "", True),
)
def test_number_that_may_go_on_is_not_certain(others, rest, is_certain):
    """It is read on two lines if the check digit of the whole is correct."""
    label = line("Tracking Number:", confidence=0.99)
    number = line("9460 2447 1029 1100 -", 0, 30, confidence=0.99)

    field = tracking(label, number, *others)

    assert (field.value, field.certain) == (f"9460244710291100{rest}", is_certain)
    assert field.box[:, 1].max() == 50


@rows(
    ("RB1Z34S6785GB", "", S10, [(3, "Z", "2"), (6, "S", "5")]),
    ("lZ999AA1O123456784", "", UPS, [(0, "l", "1"), (8, "O", "0")]),
    ("lZ 999 AAl 01 2345 6784", "", UPS, [(0, "l", "1"), (7, "l", "1")]),
    ("1Z 999 AA1 0I 2345 678A", "", UPS, [(9, "I", "1"), (17, "A", "4")]),
    ("RB 123 456 765 GB", "            8", S10, [(9, "6", "8")]),
    ("RB123456785 6B", "            G", S10, [(11, "6", "G")]),
    ("8B123458785GB", "R      6", S10, [(0, "8", "R"), (7, "8", "6")]),
    ("RB1Z3456765GB", "         8", S10, [(3, "Z", "2"), (9, "6", "8")]),
)
def test_checksum_chooses_look_alikes_and_second_best_characters(text, others, value, corrected):
    field = tracking(line(text, confidence=1.0, others=others.ljust(len(text))))

    assert (field.value, field.valid) == (value, True)
    assert not (others and field.certain)
    assert field.corrected == tuple(CharacterCorrection(*correction) for correction in corrected)


@rows(
    ("RB123456785GB", "  6          ", True),  # is valid as read
    ("RB523456785GB", "  1 6        ", False),  # both prove a number
    ("RB523456785GB", "  7 9        ", False),  # neither does
    ("RB523456785GB", "  1765432    ", False),  # too many
    ("1Z999AA10123456785", "", False),  # none
)
def test_second_best_characters_change_nothing_without_proof(text, others, is_valid):
    field = tracking(line(text, others=others))

    assert (field.value, field.valid, field.corrected) == (text, is_valid, ())


def test_nothing_is_corrected_without_proof():
    wrong_checksum, letters_without_checksum = "RBI23456784GB", "R8123456785GB"
    four_characters, not_alike = "RB1Z3AS678SGB", "RB12345678EGB"
    for text in (wrong_checksum, letters_without_checksum, four_characters, not_alike):
        field = tracking(line(text))
        assert (field.valid is True, field.corrected) == (False, ()), text


def test_two_corrections_that_fit_prove_nothing():
    numbers = [f"1Z{letters}1234567890123" for letters in ("OO", "QD")]
    check = next(digit for digit in "0123456789" if CHECKSUMS["ups_1z"].holds(numbers[0] + digit))
    assert CHECKSUMS["ups_1z"].holds(numbers[1] + check)

    form = Format(pattern=r"1Z[A-Z]{2}\d{14}", checksum="ups_1z")
    reading = read_number(f"1Z001234567890123{check}", ((form, None),)).reading

    assert reading == NumberReading(f"1Z001234567890123{check}", False)


def test_sides_have_their_own_numbers():
    lines = [
        line("寄件人：李雷 13800138000"),
        line("北京市朝阳区 100020", top=30),
        line("收件人", top=120),
        line("韩梅梅 +86 139-1234-5678", top=150),
        line("上海市 200120", top=180),
    ]
    values = {field.name: field.value for field in find_fields(lines, WAYBILL)}

    assert (values["sender_phone"], values["recipient_phone"]) == ("13800138000", "+86 139-1234-5678")
    assert (values["sender_postcode"], values["recipient_postcode"]) == ("100020", "200120")


def test_weight_and_date_are_found():
    data = {field.name: field.value for field in find_fields([line("重量: 2.5 kg 日期 2026-11-25")], WAYBILL)}

    assert (data["weight"], data["date"]) == ("2.5 kg", "2026-11-25")


def test_box_is_that_of_the_value():
    field = tracking(line("TRK# 7905", confidence=0.8), line("3531 2317", left=100))

    np.testing.assert_allclose(field.box, [[50, 0], [190, 0], [190, 20], [50, 20]], atol=0.01)
    assert field.confidence == pytest.approx(0.8)


def test_document_is_json():
    assert json.loads(json.dumps(tracking(line("RBI23456785GB")).document())) == {
        "name": "tracking_number",
        "value": S10,
        "confidence": 0.9,
        "box": [[0.0, 0.0], [130.0, 0.0], [130.0, 20.0], [0.0, 20.0]],
        "valid": True,
        "corrected": [{"position": 2, "from": "I", "to": "1"}],
        "proof": "checksum",
        "carrier": "Royal Mail",
        "certain": False,
        "candidates": [],
    }
    nothing = {"value": None, "confidence": 0.0, "box": None, "valid": None, "corrected": []}
    unproven = {"proof": None, "carrier": None, "certain": False, "candidates": []}
    assert FoundField("a").document() == {"name": "a", **nothing, **unproven}


def test_missing_required_fields_are_named():
    for text, missing in (("", ["tracking_number"]), ("1Z999AA10123456785", ["tracking_number"]), (UPS, [])):
        assert missing_fields(find_fields([line(text)], WAYBILL), WAYBILL) == missing


def test_group_of_a_pattern_is_the_value():
    form = {"pattern": r"PIN ?(?P<value>\d{4})", "joined": False}
    rules = parse_specification(json.dumps({"fields": [{"name": "pin", "formats": [form]}]}).encode())

    assert find_fields([line("your PIN 1234")], rules)[0].value == "1234"
    assert find_fields([line("your SPIN 1234")], rules)[0].value is None


CORNERS = st.lists(st.floats(allow_nan=True, width=32), min_size=8, max_size=8)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.text(max_size=60), CORNERS, st.floats(0, 1)), max_size=12))
def test_any_lines_are_answered(lines):
    made = [
        RecognisedLine(text, confidence, np.array(box, np.float32).reshape(4, 2))
        for text, box, confidence in lines
    ]

    with np.errstate(all="ignore"):
        fields = find_fields(made, WAYBILL)

    assert [field.name for field in fields] == [rule.name for rule in WAYBILL.fields]
    json.dumps([field.document() for field in fields])


@given(*[st.text(alphabet="0123456789OISBZGQlo ", min_size=1, max_size=20)] * 2)
def test_a_valid_reading_holds(text, others):
    read = read_number(text.replace(" ", ""), carrier_formats(WAYBILL.fields[0]), others=others)

    if read and read.reading.valid:
        value = read.reading.value
        assert read.form.checksum != "none"
        assert len({*value}) > 1
        assert all(value[correction.position] == correction.after for correction in read.reading.corrections)


@pytest.mark.slow
@cases("alphabet", words="0123456789OISBZ lAZ- ：收件人运单号tracking", digits="1111 ", doubtful="123 ")
def test_ten_thousand_lines_are_bounded(alphabet):
    draw = random.Random(1)
    texts = ["".join(draw.choices(alphabet, k=draw.randint(1, 150))) for _ in range(10_000)]
    lines = [
        line(text, draw.random() * 2000, draw.random() * 3000, draw.randint(1, 300), others=text[::-1])
        for text in texts
    ]

    fields, first = (find_fields(part, WAYBILL) for part in (lines, lines[:MAX_LINES]))
    assert [field.document() for field in fields] == [field.document() for field in first]
