"""Readings of a number: as recognised, or with look-alike characters replaced as its format requires.

The evidence for a reading is the logarithm of its rarity: 3 means that 1 in 1,000 random texts has it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import combinations, pairwise, product
from math import log10
from typing import TypeAlias

from nereid.tasks.read.fields.check_digits import CHECKSUMS, Checksum
from nereid.tasks.read.fields.shapes import DIGITS, LETTERS, Shape
from nereid.tasks.read.fields.specification import (
    Carrier,
    CarrierFormat,
    Format,
    is_repeated,
    parse_value,
    shapes_by_length,
)

# Maximum characters replaced in one number; with more, a checksum would too often match by chance.
MAX_CORRECTED = 3
# Evidence: of 100 texts in which letters and digits alternate, 10 do so at the same position.
CHANGE_EVIDENCE = 1.0
# One number in 20 is misread; its checksum is then wrong as often as a random number's (9 in 10).
WRONG_CHECKSUM_EVIDENCE = -1.3
# Maximum characters replaced by the recogniser's second most probable ones, and out of how many.
MAX_SWAPPED, MAX_DOUBTFUL = 2, 6
# A character read as another one, and a letter read as a digit: all-digit numbers are too common.
LETTER_CORRECTED_EVIDENCE = -1.0
DIGIT_CORRECTED_EVIDENCE = -2.0
# For a page that names the carrier, and for one that names only other carriers.
NAMED_EVIDENCE = 1.5
OTHERS_NAMED_EVIDENCE = -0.5
# If formats differ by less than this, the first one wins.
MIN_EVIDENCE_GAP = 0.5
# Letters that fonts draw like a digit. A digit is never replaced by another digit: a check digit shows
# that one is wrong, but not which one.
_LIKE_DIGIT = {
    "0": "ODQo",
    "1": "Iil",
    "2": "Zz",
    "4": "A",
    "5": "Ss",
    "6": "Gb",
    "7": "T",
    "8": "B",
    "9": "gq",
}
LOOK_ALIKES = {
    **{letter: digit for digit, letters in _LIKE_DIGIT.items() for letter in letters},
    **{"0": "OQD", "1": "IL", "2": "Z", "4": "A", "5": "S", "6": "G", "7": "T", "8": "B", "9": "G"},
    "l": "1I",
}
# Small letters whose capitals look otherwise: among capitals, they are misread digits.
_UNLIKE_CAPITALS = frozenset("bgilq")
# By their number: choices of characters to replace, each by position.
Swaps: TypeAlias = Sequence[Sequence[Mapping[int, str]]]


@dataclass(frozen=True, slots=True)
class CharacterCorrection:
    """A replaced character: its position in the value, what was read, and its replacement."""

    position: int
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class NumberReading:
    """A value in a format.

    Attributes:
        value: without separators, in upper case; as read if the format is not joined.
        valid: whether the checksum matches; None without one.
        corrections: replaced characters, which the checksum proves or the format prescribes.
        covered: whether the checksum covers all characters that may vary.
    """

    value: str
    valid: bool | None
    corrections: tuple[CharacterCorrection, ...] = ()
    evidence: float = field(default=0.0, compare=False)
    covered: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Match:
    """The best reading of a text, its format, and the carrier if evidence names one."""

    reading: NumberReading
    form: Format
    carrier: Carrier | None
    evidence: float


def read_number(
    text: str, forms: tuple[CarrierFormat, ...], named: frozenset[str] = frozenset(), others: str = ""
) -> Match | None:
    """Return the best reading of letters and digits in any of the formats; None if none matches.

    If two corrections of equal size prove different values, neither is valid.

    Args:
        text: letters and digits.
        forms: formats with their carriers.
        named: names of the carriers mentioned on the page.
        others: the second most probable character, or a space, for each one of the text.
    """
    swaps = _swaps(text, others)
    matches = [
        Match(reading, form, carrier, reading.evidence + _naming(carrier, named))
        for form, carrier in forms
        if (reading := _read(text, form, swaps))
    ]
    if not matches:
        return None
    most = max(match.evidence for match in matches)
    best = next(match for match in matches if match.evidence > most - MIN_EVIDENCE_GAP)
    size = len(best.reading.corrections)
    ties = [match.reading for match in matches if len(match.reading.corrections) == size]
    rivals = {tie.value for tie in ties if tie.valid}
    if size and len(rivals) > 1:
        return Match(NumberReading(text.upper(), False), best.form, None, WRONG_CHECKSUM_EVIDENCE)
    return best


def _naming(carrier: Carrier | None, named: frozenset[str]) -> float:
    if carrier is None or not named:
        return 0.0
    return NAMED_EVIDENCE if carrier.name in named else OTHERS_NAMED_EVIDENCE


def _read(text: str, form: Format, swaps: Swaps) -> NumberReading | None:
    shapes, kinds = shapes_by_length(form).get(len(text), ()), tuple(map(str.isdigit, text))
    if judgement := parse_value(form, text):
        rarity = min((value for shape in shapes if (value := _rarity(shape, kinds)) is not None), default=0.0)
        evidence = rarity + _proof(form, judgement[1])
        reading = NumberReading(*judgement, evidence=evidence, covered=_covers(form, len(text)))
        proven = _proven(text, form, swaps) if reading.valid is False else None
        return proven if proven and proven.valid else reading
    return _with_letters(text, shapes, kinds) if form.checksum == "none" else _proven(text, form, swaps)


def _proven(text: str, form: Format, swaps: Swaps) -> NumberReading | None:
    """Return the value with the fewest replaced characters that the checksum proves.

    It is invalid if there are several, or none but look-alikes match the pattern; None if none match.
    """
    checksum, shapes = CHECKSUMS[form.checksum], shapes_by_length(form).get(len(text), ())
    kinds, is_near = tuple(map(str.isdigit, text)), False
    for count, choices in enumerate(swaps):
        by_value: dict[str, NumberReading] = {}
        for swapped, shape in product(choices, shapes):
            for value, checked, corrections in _corrected(text, shape, checksum, swapped):
                is_near |= not count
                if checksum.holds(form.checksum_prefix + checked) and not is_repeated(value):
                    evidence = (_rarity(shape, kinds) or 0.0) + _proof(form, True) + _cost(corrections)
                    covered = not count and _covers(form, len(text))
                    reading = NumberReading(value, True, corrections, evidence, covered)
                    by_value[value] = min(reading, by_value.get(value, reading), key=_corrections)
        if by_value:
            fewest = min(map(_corrections, by_value.values()))
            proven = [candidate for candidate in by_value.values() if _corrections(candidate) == fewest]
            if len(proven) == 1:
                return proven[0]
            is_near = True
            break
    return NumberReading(text.upper(), False, evidence=WRONG_CHECKSUM_EVIDENCE) if is_near else None


def _swaps(text: str, others: str) -> Swaps:
    """Return each choice of no, one and two characters to replace by the second most probable ones."""
    doubtful = [
        index
        for index, (character, other) in enumerate(zip(text, others, strict=False))
        if other.isascii() and other.isalnum() and other.upper() != character.upper()
    ]
    counts = range(1 + MAX_SWAPPED if len(doubtful) <= MAX_DOUBTFUL else 1)
    return [
        [{index: others[index].upper() for index in indices} for indices in combinations(doubtful, count)]
        for count in counts
    ]


def _with_letters(text: str, shapes: tuple[Shape, ...], kinds: tuple[bool, ...]) -> NumberReading | None:
    """Return a text with the prescribed characters, such as `SF`, if at least one letter of them was read."""
    for shape in shapes:
        letters = sum(len(accepted) == 1 and accepted <= LETTERS for accepted, *_ in shape)
        for value, _, corrections in _corrected(text, shape, None, {}):
            if len(corrections) < letters:
                evidence = (_rarity(shape, kinds) or 0.0) + _cost(corrections)
                return NumberReading(value, None, corrections, evidence)
    return None


@cache
def _covers(form: Format, length: int) -> bool:
    """Return whether a checksum covers every character of a value that the pattern leaves open."""
    if form.checksum == "none":
        return False
    for shape in shapes_by_length(form).get(length, ()):
        count, position = sum(is_checked for *_, is_checked in shape), 0
        for accepted, is_value, is_checked in shape:
            is_covered = is_checked and CHECKSUMS[form.checksum].covers(position, count)
            if is_value and len(accepted) > 1 and not is_covered:
                return False
            position += is_checked
    return True


def _corrections(reading: NumberReading) -> int:
    return len(reading.corrections)


def _cost(corrections: tuple[CharacterCorrection, ...]) -> float:
    """Return the evidence against corrections; the same correction at several positions counts once."""
    kinds = {(correction.before, correction.after) for correction in corrections}
    return sum(
        DIGIT_CORRECTED_EVIDENCE if before.isdigit() > after.isdigit() else LETTER_CORRECTED_EVIDENCE
        for before, after in kinds
    )


def _proof(form: Format, valid: bool | None) -> float:
    if valid is None:
        return 0.0
    return -log10(CHECKSUMS[form.checksum].chance) if valid else WRONG_CHECKSUM_EVIDENCE


@lru_cache(maxsize=10_000)
def _rarity(shape: Shape, kinds: tuple[bool, ...]) -> float | None:
    """Return how rare a shape is among texts with digits at the same positions; None if it does not match."""
    rarity = 0.0
    for is_digit, (accepted, *_) in zip(kinds, shape, strict=True):
        share = _share(accepted, is_digit)
        if not share:
            return None
        rarity -= log10(share)
    digits_only = [accepted <= DIGITS for accepted, *_ in shape]
    return rarity + CHANGE_EVIDENCE * min(
        sum(one != other for one, other in pairwise(mask)) for mask in (kinds, digits_only)
    )


@cache
def _share(accepted: frozenset[str], is_digit: bool) -> float:
    """Return the fraction of digits or letters that a position accepts, as is or corrected, 0..1."""
    kind = DIGITS if is_digit else LETTERS
    fitting = kind & accepted or {glyph for glyph in kind if {*LOOK_ALIKES.get(glyph, "")} & accepted}
    return len(fitting) / len(kind)


def _corrected(
    text: str, shape: Shape, checksum: Checksum | None, swapped: Mapping[int, str]
) -> Iterator[tuple[str, str, tuple[CharacterCorrection, ...]]]:
    """Yield the value and checked part of a shape, changing a text only where it does not match.

    A matching character is kept even if another would satisfy the checksum: that proves too little. A
    position that no checksum covers is replaced only if the pattern allows a single character there.
    """
    options: list[str] = []
    wrong = position = 0
    count = sum(is_checked for *_, is_checked in shape)
    misread = _UNLIKE_CAPITALS if any(map(str.isupper, text)) else ()
    for index, (character, (accepted, _, is_checked)) in enumerate(zip(text, shape, strict=True)):
        fitting = "".join(glyph for glyph in LOOK_ALIKES.get(character, "") if glyph in accepted)
        is_covered = checksum is not None and is_checked and checksum.covers(position, count)
        is_misread = character in misread and is_covered and fitting
        if index in swapped:
            wrong += 1
            if wrong > MAX_CORRECTED or swapped[index] not in accepted:
                return
            options.append(swapped[index])
        elif character.upper() in accepted and not is_misread:
            options.append(character.upper())
        else:
            wrong += 1
            if wrong > MAX_CORRECTED or not fitting or not (is_covered or len(accepted) == 1):
                return
            options.append(fitting)
        position += is_checked
    indices = [index for index, (_, is_value, _) in enumerate(shape) if is_value]
    for chosen in product(*options):
        value = "".join(chosen[index] for index in indices)
        checked = "".join(glyph for glyph, (*_, is_checked) in zip(chosen, shape, strict=True) if is_checked)
        corrections = tuple(
            CharacterCorrection(position, text[index], chosen[index])
            for position, index in enumerate(indices)
            if text[index].upper() != chosen[index]
        )
        yield value, checked, corrections
