"""Checksums of numbers on parcels, against published numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid.text.fields.check_digits import ALPHANUMERIC, CHECKSUMS, COUNTRIES

PUBLISHED = [
    ("upu_s10", "RB123456785GB"),
    ("upu_s10", "RB123456785US"),
    ("upu_s10", "RB123456785CV"),
    ("ups_1z", "1Z5R89390357567127"),
    ("ups_1z", "1Z879E930346834440"),
    ("ups_1z", "1Z410E7W0392751591"),
    ("ups_1z", "1Z8V92A70367203024"),
    ("ups_1z", "1Z999AA10123456784"),
    ("gs1", "6291041500213"),
    ("gs1", "036000241457"),
    ("gs1", "73513537"),
    ("gs1", "10614141000415"),
    ("gs1", "000123450000000027"),
    ("fedex_12", "986578788855"),
    ("fedex_12", "477179081230"),
    ("fedex_12", "799531274483"),
    ("fedex_12", "790535312317"),
    ("fedex_12", "974367662710"),
    ("luhn", "79927398713"),
    ("luhn", "17893729974"),
    ("mod_11", "0306406152"),
    ("mod_11", "080442957X"),
    ("mod_37_36", "A12425GABC1234002M"),
]
REJECTED = [
    ("upu_s10", "RB123456786US"),
    ("upu_s10", "RB123456785XX"),
    ("upu_s10", "R8123456785GB"),
    ("ups_1z", "2Z5R89390357567127"),
    ("ups_1z", "1A5R89390357567127"),
    ("ups_1z", "1Z1111111111111111"),
    ("gs1", "000000000000000001"),
    ("gs1", "62910415002131"),
    ("fedex_12", "996578788855"),
    ("luhn", "79927398710"),
    ("mod_11", "0306406153"),
    ("mod_11", "03064061X2"),
    ("mod_37_36", "A12425GABC1234002N"),
]


@pytest.mark.parametrize(("name", "number"), PUBLISHED)
def test_published_number_holds(name, number):
    assert CHECKSUMS[name].holds(number)


@pytest.mark.parametrize(("name", "number"), REJECTED)
def test_wrong_number_is_rejected(name, number):
    assert not CHECKSUMS[name].holds(number)


@pytest.mark.parametrize(
    ("name", "number"), [each for each in PUBLISHED if each[0] in {"gs1", "luhn", "mod_37_36"}]
)
def test_every_other_last_character_is_rejected(name, number):
    alphabet = ALPHANUMERIC if name == "mod_37_36" else ALPHANUMERIC[:10]

    assert [each for each in alphabet if CHECKSUMS[name].holds(number[:-1] + each)] == [number[-1]]


@given(st.sampled_from(sorted(CHECKSUMS)), st.text(max_size=40))
def test_any_text_is_judged(name, text):
    assert CHECKSUMS[name].holds(text) in {True, False}


@given(st.sampled_from([each for each in PUBLISHED if each[0] == "gs1"]), st.data())
def test_gs1_sees_each_single_wrong_digit(published, data):
    """Weights 3 and 1 share no factor with 10, so one wrong digit is always seen."""
    number = published[1]
    place = data.draw(st.integers(0, len(number) - 1))
    other = data.draw(st.sampled_from("0123456789"))

    assert CHECKSUMS["gs1"].holds(number[:place] + other + number[place + 1 :]) is (other == number[place])


def test_countries_are_those_of_iso_3166():
    assert len(COUNTRIES) == 249
    assert all(len(each) == 2 and each.isupper() for each in COUNTRIES)
