"""Checksums of numbers on parcels, against published numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid.tasks.read.fields.check_digits import ALPHANUMERIC, CHECKSUMS

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
        assert [each for each in alphabet if CHECKSUMS[name].holds(number[:-1] + each)] == [number[-1]]


@given(st.sampled_from(sorted(CHECKSUMS)), st.text(max_size=40))
def test_any_text_is_judged(name, text):
    assert CHECKSUMS[name].holds(text) in {True, False}
