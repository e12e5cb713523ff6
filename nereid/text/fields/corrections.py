"""Readings of a number: as it was read, or with look-alike characters replaced where a checksum proves it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from nereid.text.fields.check_digits import CHECKSUMS, Checksum
from nereid.text.fields.shapes import VALUE, Shape
from nereid.text.fields.specification import Format, expression, shapes_by_length

# Most characters that are replaced in one number: more replacements let a checksum hold by chance.
MAX_CORRECTED = 3
# Letters that fonts draw like a digit. A digit is never replaced by another digit: a check digit shows that
# one is wrong, but not which one.
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


@dataclass(frozen=True, slots=True)
class Correction:
    """A character that was replaced: its position in the value, what was read, and what it became."""

    position: int
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Reading:
    """A value of a format.

    Attributes:
        value: without separators, in upper case; of a format that is not joined, as it was read.
        valid: whether the checksum holds; None without one.
        corrections: replaced characters; there are some only if the checksum proves them.
    """

    value: str
    valid: bool | None
    corrections: tuple[Correction, ...] = ()


def read_number(text: str, formats: tuple[Format, ...]) -> tuple[Reading, Format] | None:
    """Return the best reading of letters and digits in any of the formats; None if none fits.

    A reading whose checksum holds as it is comes first, then the one with the fewest corrections. If two
    corrections of equal size prove different values, none is valid.
    """
    found = [(reading, form) for form in formats if (reading := _read(text, form))]
    if not found:
        return None
    best = min(found, key=lambda each: _rank(each[0]))
    rivals = {each.value for each, _ in found if _rank(each) == _rank(best[0])}
    if best[0].corrections and len(rivals) > 1:
        return Reading(text.upper(), False), best[1]
    return best


def _rank(reading: Reading) -> tuple[int, int]:
    return {True: 0, None: 1, False: 2}[reading.valid], len(reading.corrections)


def _read(text: str, form: Format) -> Reading | None:
    match = expression(form).fullmatch(text.upper())
    if match:
        value = match[VALUE] if VALUE in match.re.groupindex else match[0]
        if value is None:
            return None
        return Reading(value, CHECKSUMS[form.checksum].holds(value) if form.checksum in CHECKSUMS else None)
    by_value: dict[str, tuple[Correction, ...]] = {}
    is_near = False
    for shape in shapes_by_length(form).get(len(text), ()):
        for value, corrections in _corrected(text, shape, CHECKSUMS[form.checksum]):
            is_near = True
            if CHECKSUMS[form.checksum].holds(value):
                by_value[value] = min(corrections, by_value.get(value, corrections), key=len)
    if not is_near:
        return None
    fewest = min(map(len, by_value.values()), default=0)
    proven = [(value, each) for value, each in by_value.items() if len(each) == fewest]
    if len(proven) != 1:
        return Reading(text.upper(), False)
    return Reading(proven[0][0], True, proven[0][1])


def _corrected(text: str, shape: Shape, checksum: Checksum) -> Iterator[tuple[str, tuple[Correction, ...]]]:
    """Yield the values of a shape that differ from a text only where the text does not fit.

    A character that fits stays, even if another one would make the checksum hold: it proves too little. A
    place that the checksum does not cover is replaced only if the pattern has a single character there.
    """
    length = sum(is_value for _, is_value in shape)
    options: list[str] = []
    wrong = position = 0
    for character, (accepted, is_value) in zip(text, shape, strict=True):
        if character.upper() in accepted:
            options.append(character.upper())
        else:
            wrong += 1
            fitting = "".join(each for each in LOOK_ALIKES.get(character, "") if each in accepted)
            is_covered = is_value and checksum.covers(position, length)
            if wrong > MAX_CORRECTED or not fitting or not (is_covered or len(accepted) == 1):
                return
            options.append(fitting)
        position += is_value
    for chosen in product(*options):
        places = [place for place, (_, is_value) in enumerate(shape) if is_value]
        value = "".join(chosen[place] for place in places)
        yield (
            value,
            tuple(
                Correction(position, text[place], chosen[place])
                for position, place in enumerate(places)
                if text[place].upper() != chosen[place]
            ),
        )
