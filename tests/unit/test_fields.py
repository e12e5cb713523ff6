"""Fields of documents: the file that defines them, what proves a number, and checksums of numbers."""

import json
import os
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from nereid.base.errors import InvalidConfig
from nereid.tasks.read.fields import specification as field_file
from nereid.tasks.read.fields.check_digits import ALPHANUMERIC, CHECKSUMS
from nereid.tasks.read.fields.field_search import find_fields
from nereid.tasks.read.fields.shapes import MAX_WAYS, count_ways
from tests.tables import cases, rows
from tests.unit.test_field_search import FEDEX, UPS, WAYBILL, line
from tests.waybills.decoys import page
from tests.waybills.labels import FIELDS, FORMS

FIELD = b'{"name": "a", "formats": [{"pattern": "1"}]}'


def specification(**changes):
    form = {"pattern": r"\d{12}", **changes}
    return json.dumps({"fields": [{"name": "number", "formats": [form]}]}).encode()


def test_default_file_is_valid(root):
    schema = json.loads((root / "docs" / "fields.schema.json").read_text())

    Draft202012Validator(schema).validate(json.loads(FIELDS.read_text()))


@rows(
    (b"\xff", "JSON"),
    (b'{"fields": []}', "Expected `array` of length >= 1"),
    (specification(checksum="crc"), "Invalid enum value 'crc'"),
    (specification(paterns=""), "Object contains unknown field `paterns`"),
    (specification(pattern="("), "pattern '(': missing ), unterminated subpattern"),
    (specification(pattern="(a+)+"), "pattern '(a+)+': expected at most 1,000 ways to match, got more"),
    (specification(pattern="(a|a){30}"), "pattern '(a|a){30}': expected at most 1,000 ways"),
    (specification(pattern=r"(\d)\1"), r"pattern '(\d)\1': expected at most 1,000 ways"),
    (specification(pattern=".{12}", checksum="gs1"), "pattern '.{12}': expected letters, digits"),
    (specification(checksum="gs1", joined=False), "expected joined with a checksum"),
    (specification(examples=["12"]), r"pattern '\d{12}': expected the example to fit: '12'"),
    (specification(counterexamples=["1234 5678 9012"]), "the counterexample not to fit: '1234 5678 9012'"),
    (b'{"fields": [{"name": "a"}]}', "field 'a': expected formats or carriers, got none"),
    (b'{"fields": [%s, %s]}' % (FIELD, FIELD), "names of fields must differ, got a, a"),
    (specification(needs_label=True), "field 'number': expected labels for a format with needs_label"),
    ids=lambda value: repr(value)[:60],
)
def test_wrong_file_is_rejected(text, message):
    with pytest.raises(InvalidConfig) as error:
        field_file.parse_specification(text)

    assert message in str(error.value)


def test_file_that_cannot_be_read_is_named(tmp_path):
    """A pipe does not block."""
    path = tmp_path / "fields.json"
    with pytest.raises(InvalidConfig, match=re.escape(f"cannot read '{path}': No such file")):
        field_file.read_specification(path)
    os.mkfifo(path)
    with pytest.raises(InvalidConfig, match=re.escape(f"'{path}': expected a regular file")):
        field_file.read_specification(path)


def test_ways_are_counted():
    ways = {"abc": 1, r"\d{2,4}": 3, r"\d+": 64, "ab|cd|e": 3, "(?:a?b?)c": 4, "(?:ab?)?": 3, "(?:ab?){2}": 4}

    assert {pattern: count_ways(pattern) for pattern in ways} == ways
    assert [count_ways(pattern) for pattern in ("(a*)*", "(?=a*)b*")] == [MAX_WAYS + 1] * 2


NUMBER = field_file.Specification(fields=WAYBILL.fields[:1])
ZTO, ORDER_LIKE_UPS = "73100012345678", "120101199003074513"
STO, ZIP_USPS = "771675250812506", "4206187370069129606601845628057166"
USPS = "9400111206206406260787"
# FedEx's 34 digits end with the number of the parcel.
OTHER_FEDEX, LONG_FEDEX = "986578788855", f"9622001900000000000000{FEDEX}"


def found(*texts, barcodes=()):
    lines = [line(text, top=40.0 * number, confidence=0.99) for number, text in enumerate(texts)]
    return find_fields(lines, NUMBER, [(barcode, line(barcode, top=500).box) for barcode in barcodes])[0]


@pytest.mark.parametrize(("form", "carrier"), FORMS, ids=lambda value: getattr(value, "name", ""))
def test_examples_are_found_beside_their_label(form, carrier):
    name = carrier.labels[0] if carrier and carrier.labels else ""

    answers = {text: found("12 MAIN STREET", f"{name} TRACKING #", text) for text in form.examples}

    values = {
        text: field_file.parse_value(form, re.sub("[^0-9A-Za-z]", "", text))[0] for text in form.examples
    }
    assert {text: answer.value for text, answer in answers.items()} == values
    assert not any(answer.valid is False for answer in answers.values())


@cases(
    "texts, barcodes, expected",
    label_and_checksum=(["TRK#", FEDEX], [], (FEDEX, True, "label+checksum", "FedEx", True)),
    checksum=([UPS], [], (UPS, True, "checksum", "UPS", True)),
    label=([f"中通 运单号 {ZTO}"], [], (ZTO, None, "label", "ZTO Express", False)),
    format_only=(["TBA123456789012"], [], ("TBA123456789012", None, "format only", "Amazon", False)),
    name_of_the_carrier=(["FEDEX", FEDEX], [], (FEDEX, True, "checksum", "FedEx", False)),
    form_before_the_number=(["TRK# 0201 7995 3127 4483"], [], ("799531274483", True)),
    form_behind_the_number=(["TRK# 7995 3127 4483 0201"], [], ("799531274483", True)),
    bars_agree=([FEDEX], [f"96220019000000000000{'00' + FEDEX}"], (FEDEX, True, "barcode+text+checksum")),
    bars_and_label_agree=([f"运单号 {ZTO}"], [ZTO], (ZTO, None, "barcode+text", "ZTO Express", True)),
    label_in_compatibility_characters=(["Nº de seguimiento", FEDEX], [], (FEDEX, True, "label+checksum")),
    label_may_be_cut=([f"单号 {ZTO}"], [ZTO], (ZTO, None, "barcode+text", "ZTO Express", False)),
    label_without_bars_may_be_cut=([f"单号：{FEDEX}"], [], (FEDEX, True, "label+checksum", "FedEx", False)),
    bars_of_any_number=([ZTO], [ZTO], (ZTO, None, "barcode+text", "ZTO Express", False)),
    bars_of_an_order=([f"Order no: {ZTO}"], [ZTO], (None, None)),
    only_bars=(["TO: A"], [UPS], (UPS, True, "barcode+checksum", "UPS", True)),
    bars_correct_a_labelled_number=(
        ["单号 77167525081250"],
        [STO],
        (STO, None, "barcode", "STO Express", False),
    ),
    bars_have_a_part_that_was_read=(["TRK# 9400 1112 0620"], [USPS], (USPS, True, "barcode+checksum")),
    other_bars_were_not_misread=([f"单号 {STO}"], [ZTO], (STO, None, "label", "STO Express", False)),
    bars_beside_a_label_without_number=(["TRK#"], [FEDEX], (FEDEX, True, "barcode+checksum")),
    bars_without_a_label=(["TO: A"], [FEDEX], (None, None)),
    bars_beside_a_label_with_number=([f"TRK# {OTHER_FEDEX}"], [FEDEX], (OTHER_FEDEX, True, "label+checksum")),
    bars_without_a_check=(["TRK#"], [ZTO], (None, None)),
    bars_are_not_corrected=(["TRK#"], ["24171862018601S"], (None, None)),
    group_beside_the_number=(
        ["N° de suivi", "4843 7431 3561 024"],
        [],
        ("484374313561024", True, "label+checksum", "DPD", False),
    ),
    bars_end_with_it_by_chance=(["622 348 2646"], ["1356223482646"], (None, None)),
    bars_of_a_number_without_check=(["Vorgang: 7730387146"], ["7730387146"], (None, None)),
    digits_without_a_check=(["TRACKING #", ZIP_USPS], [], (ZIP_USPS, True, "label+checksum", "USPS", False)),
    letter_behind_a_label=(["运单号MI2115503"], [], ("MI2115503", None, "label", "UPS")),
    bars_of_goods=(["TO: A"], ["4006381333931"], (None, None)),
    chance_beside_a_label=([f"单号：{ZTO}", f"证件号 {ORDER_LIKE_UPS}"], [], (ZTO, None)),
    end_of_another_word=([f"业务单号：{FEDEX}"], [], (None, None)),
    end_of_a_carriers_name=([f"中通单号：{ZTO}"], [], (ZTO, None, "label", "ZTO Express")),
    number_beside_another_label=([f"Order no: {FEDEX}"], [], (None, None)),
    label_of_another_number_is_nearer=(["TRACKING", f"Invoice {FEDEX}"], [], (None, None)),
    address_of_a_page=(["www.example.com/tracking", FEDEX], [], (None, None)),
    path_of_a_page=(["https://example.com/en/tracking", FEDEX], [], (None, None)),
    count_of_parcels=([f"Tracking No: {FEDEX} 1 of 2"], [], (FEDEX, True, "label+checksum", "FedEx")),
    letters_between_digits=([f"Tracking No: {FEDEX} 1DE2"], [], (None, None)),
    label_in_two_languages=([f"Tracking No./运单号: {FEDEX}"], [], (FEDEX, True, "label+checksum", "FedEx")),
    telephone=(["TRACKING #", "(800) 463-3339"], [], (None, None)),
    date=(["TRACKING #", "2026-11-27 14"], [], (None, None)),
    part_of_a_longer_number=(["SF1234567890123 4567"], [], (None, None)),
    zeros=(["TRK#", "0000 0000 0000"], [], ("000000000000", None, "label")),
    letters_for_zeros=(["TRK#", "OO00 0000 0000"], [], ("OO0000000000", False, "label")),
    zeros_without_a_label=(["TBA000000000000"], [], (None, None)),
    letters_for_digits=(["TRK#", "GS2951 1749 4011 1690 41"], [], (None, None)),
)
def test_evidence_decides(texts, barcodes, expected):
    answer = found(*texts, barcodes=barcodes)

    known = answer.value, answer.valid, answer.proof, answer.carrier, answer.certain
    assert known[: len(expected)] == expected


@cases(
    two_numbers_with_equal_evidence=(["", f"TRK# {OTHER_FEDEX}"], False, (FEDEX, OTHER_FEDEX)),
    the_same_number_in_a_longer_one=([LONG_FEDEX], True, ()),
)
def test_rivals_of_a_number_are_returned(others, certain, candidates):
    answer = found(f"TRK# {FEDEX}", *others)

    assert (answer.value, answer.certain, answer.candidates) == (FEDEX, certain, candidates)


@rows((0.97, False), (0.98, True))
def test_checksum_of_a_line_that_was_read_badly_proves_nothing(confidence, certain):
    assert find_fields([line(f"TRK# {FEDEX}", confidence=confidence)], NUMBER)[0].certain == certain


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow(minutes=1))])
def test_no_wrong_number_is_certain(count):
    """Half of the pages have other numbers, and one of ten has no tracking number; -s prints the counts."""
    counts: Counter[str] = Counter()
    for seed in range(count):
        made = page(seed, FORMS)
        answer = find_fields(made.lines, NUMBER)[0]
        is_right = answer.value == made.number
        counts["right" if is_right else "wrong"] += made.number is not None
        counts["number without one"] += made.number is None and not is_right
        counts["certain"] += answer.certain
        counts["certain and wrong"] += answer.certain and not is_right
    print(counts)

    assert counts["certain and wrong"] == 0
    assert counts["right"] >= 0.94 * 0.9 * count


PUBLISHED = {
    "upu_s10": ("RB123456785GB", "RB123456785CV"),
    "ups_1z": ("1Z5R89390357567127", "1Z410E7W0392751591", "1Z999AA10123456784"),
    "gs1": ("6291041500213", "036000241457", "73513537", "10614141000415", "000123450000000027"),
    "fedex_12": ("986578788855", "477179081230", "974367662710", "00779017972697"),
    "mod_7": ("3318810025", "73891051146"),
    "mod_10_1_2": ("C11031500001879", "D10011354453707", "1506235620"),
    "mod_10_3_1": ("9400111206206406260787", "568283610012000", "0073938000549297"),
    "luhn": ("79927398713", "17893729974"),
    "mod_11": ("0306406152", "080442957X"),
    "mod_37_36": ("A12425GABC1234002M",),
}
REJECTED = {
    "upu_s10": ("RB123456786US", "RB123456785XX", "R8123456785GB"),
    "ups_1z": ("2Z5R89390357567127", "1A5R89390357567127", "1Z1111111111111111"),
    "gs1": ("000000000000000001", "62910415002131"),
    "fedex_12": ("996578788855",),
    "mod_7": ("3318810034", "9"),
    "mod_10_1_2": ("C11031500001889", "1506235622", "7"),
    "mod_10_3_1": ("568283610012732", "5002847016405018", "0"),
    "luhn": ("79927398710",),
    "mod_11": ("0306406153", "03064061X2"),
    "mod_37_36": ("A12425GABC1234002N",),
}


@pytest.mark.parametrize("name", CHECKSUMS)
def test_published_numbers_hold_and_wrong_ones_do_not(name):
    holds = CHECKSUMS[name].holds

    assert [number for number in PUBLISHED[name] if not holds(number)] == []
    assert [number for number in REJECTED[name] if holds(number)] == []


@pytest.mark.parametrize("name", ["gs1", "luhn", "mod_37_36"])
def test_every_other_last_character_is_rejected(name):
    alphabet = ALPHANUMERIC if name == "mod_37_36" else ALPHANUMERIC[:10]

    for number in PUBLISHED[name]:
        assert [letter for letter in alphabet if CHECKSUMS[name].holds(number[:-1] + letter)] == [number[-1]]


@given(st.sampled_from(sorted(CHECKSUMS)), st.text(max_size=40))
def test_any_text_is_judged(name, text):
    assert CHECKSUMS[name].holds(text) in {True, False}
