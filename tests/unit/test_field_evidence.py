"""What proves a number: labels, check digits, bars and carriers; and pages with numbers of other kinds."""

import re
from collections import Counter

import pytest

from nereid.tasks.read.fields.field_search import find_fields
from nereid.tasks.read.fields.specification import Specification, forms_of, judge
from tests.tables import cases
from tests.unit.test_field_search import FEDEX, UPS, WAYBILL, line
from tests.waybills.decoys import page

NUMBER = Specification(fields=WAYBILL.fields[:1])
FORMS = forms_of(NUMBER.fields[0])
ZTO, ORDER_LIKE_UPS = "73100012345678", "120101199003074513"
# FedEx's 34 digits end with the number of the parcel.
OTHER_FEDEX, LONG_FEDEX = "986578788855", f"9622001900000000000000{FEDEX}"


def found(*texts, barcodes=()):
    lines = [line(text, top=40.0 * number) for number, text in enumerate(texts)]
    return find_fields(lines, NUMBER, [(each, line(each, top=500).box) for each in barcodes])[0]


@pytest.mark.parametrize(("form", "carrier"), FORMS, ids=lambda value: getattr(value, "name", ""))
def test_examples_are_found_beside_their_label(form, carrier):
    name = carrier.labels[0] if carrier and carrier.labels else ""

    answers = {each: found("12 MAIN STREET", f"{name} TRACKING #", each) for each in form.examples}

    values = {each: judge(form, re.sub("[^0-9A-Za-z]", "", each))[0] for each in form.examples}
    assert {each: answer.value for each, answer in answers.items()} == values
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
    bars_and_label_agree=([f"单号 {ZTO}"], [ZTO], (ZTO, None, "barcode+text", "ZTO Express", True)),
    bars_of_any_number=([ZTO], [ZTO], (ZTO, None, "barcode+text", "ZTO Express", False)),
    bars_of_an_order=([f"Order no: {ZTO}"], [ZTO], (None, None)),
    only_bars=(["TO: A"], [UPS], (UPS, True, "barcode+checksum", "UPS", True)),
    bars_of_goods=(["TO: A"], ["4006381333931"], (None, None)),
    chance_beside_a_label=([f"单号：{ZTO}", f"证件号 {ORDER_LIKE_UPS}"], [], (ZTO, None)),
    end_of_another_word=([f"业务单号：{FEDEX}"], [], (None, None)),
    end_of_a_carriers_name=([f"中通单号：{ZTO}"], [], (ZTO, None, "label", "ZTO Express")),
    number_beside_another_label=([f"Order no: {FEDEX}"], [], (None, None)),
    label_of_another_number_is_nearer=(["TRACKING", f"Invoice {FEDEX}"], [], (None, None)),
    address_of_a_page=(["www.example.com/tracking", FEDEX], [], (None, None)),
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


def test_two_numbers_with_equal_evidence_are_both_returned():
    answer = found(f"TRK# {FEDEX}", "", f"TRK# {OTHER_FEDEX}")

    assert (answer.value, answer.certain) == (FEDEX, False)
    assert answer.candidates == (FEDEX, OTHER_FEDEX)


def test_the_same_number_in_a_longer_one_is_no_rival():
    answer = found(f"TRK# {FEDEX}", LONG_FEDEX)

    assert (answer.value, answer.certain, answer.candidates) == (FEDEX, True, ())


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
