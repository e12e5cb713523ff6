"""Checksums of parcel and product numbers. Letters are upper case, and spaces have been removed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

DIGITS = "0123456789"
# Values 0 to 35 of ISO 7064's alphanumeric systems.
ALPHANUMERIC = DIGITS + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
GS1_LENGTHS = frozenset({8, 12, 13, 14, 18})
# Source: UPU S10-12, weights of the serial number's digits.
S10_WEIGHTS = (8, 6, 4, 2, 3, 5, 9, 7)
# Source: ISO 3166-1, officially assigned alpha-2 codes (249, January 2024).
_COUNTRIES = """
    AD AE AF AG AI AL AM AO AQ AR AS AT AU AW AX AZ BA BB BD BE BF BG BH BI BJ BL BM BN BO BQ BR BS
    BT BV BW BY BZ CA CC CD CF CG CH CI CK CL CM CN CO CR CU CV CW CX CY CZ DE DJ DK DM DO DZ EC EE
    EG EH ER ES ET FI FJ FK FM FO FR GA GB GD GE GF GG GH GI GL GM GN GP GQ GR GS GT GU GW GY HK HM
    HN HR HT HU ID IE IL IM IN IO IQ IR IS IT JE JM JO JP KE KG KH KI KM KN KP KR KW KY KZ LA LB LC
    LI LK LR LS LT LU LV LY MA MC MD ME MF MG MH MK ML MM MN MO MP MQ MR MS MT MU MV MW MX MY MZ NA
    NC NE NF NG NI NL NO NP NR NU NZ OM PA PE PF PG PH PK PL PM PN PR PS PT PW PY QA RE RO RS RU RW
    SA SB SC SD SE SG SH SI SJ SK SL SM SN SO SR SS ST SV SX SY SZ TC TD TF TG TH TJ TK TL TM TN TO
    TR TT TV TW TZ UA UG UM US UY UZ VA VC VE VG VI VN VU WF WS YE YT ZA ZM ZW
"""
COUNTRIES = frozenset(_COUNTRIES.split())


@dataclass(frozen=True, slots=True)
class Checksum:
    """A rule for check digits.

    Attributes:
        holds: whether a number satisfies the rule; false for other lengths and characters.
        covers: whether the rule depends on the character at a position in a number of the given length.
        chance: fraction of random numbers of its length that satisfy it, 0..1.
    """

    holds: Callable[[str], bool]
    covers: Callable[[int, int], bool] = lambda position, length: True
    chance: float = 0.1


def upu_s10(number: str) -> bool:
    """Check a postal item number: two letters, eight digits with their check digit, and a country.

    The check digit is 11 - (weighted sum mod 11), where 10 becomes 0 and 11 becomes 5. It does not cover the
    letters, but the country must exist.

    Source: UPU standard S10-12. Vectors: RB123456785GB, RB123456785US
    (github.com/jkeen/tracking_number_data).
    """
    service, serial, country = number[:2], number[2:-2], number[-2:]
    if len(number) != 13 or not _is_digits(serial) or not (service.isascii() and service.isalpha()):
        return False
    check = 11 - _weighted(serial[:8], S10_WEIGHTS) % 11
    return country in COUNTRIES and int(serial[8]) == {10: 0, 11: 5}.get(check, check)


def ups_1z(number: str) -> bool:
    """Check a UPS number: `1Z`, 15 letters or digits, and the check digit.

    Letters count as (ASCII code - 63) mod 10; weights alternate between 1 and 2, modulo 10.

    Source: UPS, Guide to Labeling. Vectors: 1Z5R89390357567127, 1Z879E930346834440
    (github.com/jkeen/tracking_number_data), 1Z999AA10123456784 (UPS developer guide).
    """
    return len(number) == 18 and number.startswith("1Z") and mod_10_1_2(number[2:])


def mod_10_1_2(number: str) -> bool:
    """Check letters and digits as `ups_1z` does, for any length; the last character is the check digit.

    Source and vectors: C11031500001879, D10011354453707 (OnTrac), 1506235620 (UPS, without its K)
    (github.com/jkeen/tracking_number_data).
    """
    body, check = number[:-1], number[-1:]
    if not body or not set(body) <= set(ALPHANUMERIC):
        return False
    values = [int(character) if character in DIGITS else (ord(character) - 63) % 10 for character in body]
    total = sum(value * weight for value, weight in zip(values, cycle((1, 2)), strict=False))
    return check == str(-total % 10)


def gs1(number: str) -> bool:
    """Check an SSCC-18 or a GTIN-8, -12, -13 or -14: alternating weights 3 and 1 from the right, modulo 10.

    Source: GS1 General Specifications, 7.9. Vectors: GTIN-13 6291041500213 (GS1's calculator), GTIN-12
    036000241457, SSCC-18 000123450000000027 (github.com/jkeen/tracking_number_data).
    """
    return len(number) in GS1_LENGTHS and mod_10_3_1(number)


def mod_10_3_1(number: str) -> bool:
    """Check digits as `gs1` does, for any length.

    Source and vectors: 9400111206206406260787 (USPS), 568283610012000 (FedEx Ground), 0073938000549297
    (Canada Post) (github.com/jkeen/tracking_number_data).
    """
    return len(number) > 1 and _is_digits(number) and _weighted(number[::-1], (1, 3)) % 10 == 0


def mod_7(number: str) -> bool:
    """Check a DHL Express number: the last digit is the remainder of the others modulo 7.

    Source and vectors: 3318810025, 73891051146 (github.com/jkeen/tracking_number_data).
    """
    return len(number) > 1 and _is_digits(number) and int(number[:-1]) % 7 == int(number[-1])


def fedex_12(number: str) -> bool:
    """Check a FedEx number: repeating weights 1, 3, 7 from the right, modulo 11, then modulo 10.

    It has 12 digits, or is the last 14 of a longer number.

    Source and vectors: 986578788855, 477179081230, 799531274483, 00779017972697
    (github.com/jkeen/tracking_number_data).
    """
    if len(number) not in {12, 14} or not _is_digits(number):
        return False
    return _weighted(number[-2::-1], (1, 3, 7)) % 11 % 10 == int(number[-1])


def luhn(number: str) -> bool:
    """Check digits by the Luhn algorithm (mod 10): from the right, every second digit is doubled.

    Source: ISO/IEC 7812-1, annex B. Vectors: 79927398713, 17893729974 (Wikipedia, Luhn algorithm).
    """
    if len(number) < 2 or not _is_digits(number):
        return False
    values = [int(digit) * weight for digit, weight in zip(number[::-1], cycle((1, 2)), strict=False)]
    return sum(value // 10 + value % 10 for value in values) % 10 == 0


def mod_11(number: str) -> bool:
    """Check digits with weights 1, 2, 3, … from the right, modulo 11; the last may be X for 10.

    Source: ISO 2108:1992 (ISBN-10). Vectors: 0306406152, 080442957X (Wikipedia, ISBN).
    """
    body, check = number[:-1], number[-1:]
    if not body or not _is_digits(body) or check not in {*DIGITS, "X"}:
        return False
    total = sum(int(digit) * weight for weight, digit in enumerate(body[::-1], 2))
    return (total + (10 if check == "X" else int(check))) % 11 == 0


def mod_37_36(number: str) -> bool:
    """Check letters and digits by ISO 7064's hybrid system mod 37,36.

    DPD prints it on its parcels; its check character is a letter or a digit. The pure system mod 37,2 needs a
    `*`, and no carrier in this list uses it.

    Source: ISO/IEC 7064:2003, 9. Vector: A12425GABC1234002M (IFPI, GRid standard, appendix).
    """
    if len(number) < 2 or not set(number) <= set(ALPHANUMERIC):
        return False
    carry = 36
    for character in number[:-1]:
        carry = (carry + ALPHANUMERIC.index(character)) % 36 or 36
        carry = carry * 2 % 37
    return (carry + ALPHANUMERIC.index(number[-1])) % 36 == 1


def _is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _weighted(digits: str, weights: Sequence[int]) -> int:
    return sum(int(digit) * weight for digit, weight in zip(digits, cycle(weights), strict=False))


CHECKSUMS: Mapping[str, Checksum] = {
    # 249 of the 676 letter pairs are countries.
    "upu_s10": Checksum(upu_s10, lambda position, length: 2 <= position < length - 2, chance=0.1 * 249 / 676),
    "ups_1z": Checksum(ups_1z, lambda position, length: position >= 2),
    "gs1": Checksum(gs1),
    "fedex_12": Checksum(fedex_12),
    "luhn": Checksum(luhn),
    "mod_7": Checksum(mod_7),
    "mod_10_1_2": Checksum(mod_10_1_2),
    "mod_10_3_1": Checksum(mod_10_3_1),
    "mod_11": Checksum(mod_11),
    "mod_37_36": Checksum(mod_37_36, chance=1 / 36),
}
