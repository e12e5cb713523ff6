"""The file that says which fields a document has, and how each is recognised."""

import re
import unicodedata
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from nereid.base.errors import InvalidConfig
from nereid.base.files import read_regular
from nereid.tasks.read.fields.check_digits import CHECKSUMS
from nereid.tasks.read.fields.shapes import (
    CHECKED,
    MAX_CHARACTERS,
    MAX_WAYS,
    VALUE,
    Shape,
    count_ways,
    shapes,
    width_range,
)

MAX_BYTES = 1_000_000
# Shorter values may have the same digit throughout.
MIN_REPEATED = 6
MAX_PATTERN = 256
MAX_FORMATS = 32
MAX_LABELS = 256
MAX_FIELDS = 32
MAX_CARRIERS = 256
ChecksumName = Literal[
    "none",
    "upu_s10",
    "ups_1z",
    "gs1",
    "fedex_12",
    "luhn",
    "mod_7",
    "mod_10_1_2",
    "mod_10_3_1",
    "mod_11",
    "mod_37_36",
]
Label = Annotated[str, Meta(min_length=1, max_length=64)]
Examples = Annotated[tuple[Annotated[str, Meta(max_length=128)], ...], Meta(max_length=64)]


class Format(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One form of a field's value."""

    pattern: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=MAX_PATTERN,
            description="Regular expression of the whole value, without regard to case. "
            "If it has a group `value`, only the group is returned. The checksum is that of a group "
            "`checked`, else that of the value.",
        ),
    ]
    checksum: Annotated[
        ChecksumName,
        Meta(description="Rule of the check digit. It also proves corrections, such as `O` to `0`."),
    ] = "none"
    checksum_prefix: Annotated[
        str, Meta(max_length=16, description="Characters that the checksum counts before the number.")
    ] = ""
    joined: Annotated[
        bool,
        Meta(
            description="Compares letters and digits without the spaces and punctuation between them, "
            "also over neighbouring boxes of a row. If false, the pattern is searched in the text."
        ),
    ] = True
    needs_label: Annotated[
        bool,
        Meta(
            description="Accepts values only near a label, for formats that other numbers have, too; or with "
            "a checksum that holds, on a page that names the carrier."
        ),
    ] = False
    examples: Annotated[Examples, Meta(description="Values that match, and whose checksum holds.")] = ()
    counterexamples: Annotated[
        Examples, Meta(description="Values that do not match, or whose checksum does not hold.")
    ] = ()

    def __post_init__(self) -> None:
        try:
            ways = count_ways(self.pattern)
            re.compile(self.pattern)
            if self.checksum != "none":
                shapes(self.pattern)
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern '{self.pattern}': {error}") from None
        if ways > MAX_WAYS:
            raise ValueError(
                f"pattern '{self.pattern}': expected at most {MAX_WAYS:,} ways to match, got more; "
                "fix: give repetitions an upper bound, and avoid them inside others"
            )
        if self.checksum != "none" and not self.joined:
            raise ValueError(f"pattern '{self.pattern}': expected joined with a checksum, got false")
        for text, is_expected in (
            *((example, True) for example in self.examples),
            *((example, False) for example in self.counterexamples),
        ):
            judgement = parse_value(self, re.sub(r"[^0-9A-Za-z]", "", text) if self.joined else text)
            if (judgement is not None and judgement[1] is not False) is not is_expected:
                kind = "example to fit" if is_expected else "counterexample not to fit"
                raise ValueError(f"pattern '{self.pattern}': expected the {kind}: '{text}'")


class Carrier(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Formats of one carrier; the response names it if the number or the page tells it from others."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    formats: Annotated[tuple[Format, ...], Meta(min_length=1, max_length=MAX_FORMATS)]
    labels: Annotated[
        tuple[Label, ...],
        Meta(
            max_length=MAX_LABELS,
            description="Words that name the carrier. Anywhere on a page, they speak for its formats.",
        ),
    ] = ()
    source: Annotated[str, Meta(max_length=256, description="Where the formats are documented.")] = ""


# A format, and the carrier that has it.
CarrierFormat: TypeAlias = tuple[Format, Carrier | None]


class FieldRule(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One field of the document."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}(?!\n)$")]
    formats: Annotated[
        tuple[Format, ...], Meta(max_length=MAX_FORMATS, description="Forms of the value.")
    ] = ()
    carriers: Annotated[
        tuple[Carrier, ...],
        Meta(max_length=MAX_CARRIERS, description="Further forms. Of two that fit, the first one counts."),
    ] = ()
    labels: Annotated[
        tuple[Label, ...],
        Meta(
            max_length=MAX_LABELS,
            description="Words near the value: it is at their right, or below them. Case and spaces "
            "do not matter; punctuation may be missing.",
        ),
    ] = ()
    other_labels: Annotated[
        tuple[Label, ...],
        Meta(max_length=MAX_LABELS, description="Words near other numbers, such as that of an order."),
    ] = ()
    required: Annotated[bool, Meta(description="Whether a document without the field is incomplete.")] = False

    def __post_init__(self) -> None:
        if not self.formats and not self.carriers:
            raise ValueError(f"field '{self.name}': expected formats or carriers, got none")
        if not self.labels and any(form.needs_label for form, _ in carrier_formats(self)):
            raise ValueError(f"field '{self.name}': expected labels for a format with needs_label, got none")


class Specification(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields of a document."""

    fields: Annotated[tuple[FieldRule, ...], Meta(min_length=1, max_length=MAX_FIELDS)]
    schema: Annotated[str, Meta(description="For editors.")] = msgspec.field(name="$schema", default="")

    def __post_init__(self) -> None:
        names = [rule.name for rule in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"names of fields must differ, got {', '.join(names)}")


def read_specification(path: Path) -> Specification:
    """Read the fields of a document from a file.

    Raises:
        InvalidConfig: the file cannot be read, or is not a specification.
    """
    try:
        text, _ = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise InvalidConfig(f"cannot read '{path}': {error.strerror}") from None
    try:
        return parse_specification(text)
    except InvalidConfig as error:
        raise InvalidConfig(f"'{path}': {error.args[0]}") from None


def parse_specification(text: bytes) -> Specification:
    """Read the JSON of a specification.

    Raises:
        InvalidConfig: not a specification; the message has the place and the expected value.
    """
    try:
        return msgspec.json.decode(text, type=Specification)
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"JSON must be UTF-8: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidConfig(str(error)) from None


@cache
def expression(form: Format) -> re.Pattern[str]:
    """Return the compiled pattern; one that is searched does not begin or end inside a word."""
    flags = re.ASCII | re.IGNORECASE
    if form.joined:
        return re.compile(form.pattern, flags)
    return re.compile(rf"(?<![0-9A-Za-z])(?:{form.pattern})(?![0-9A-Za-z])", flags)


def parse_value(form: Format, text: str) -> tuple[str, bool | None] | None:
    """Return the value of a text, and whether its checksum holds; None if it does not match.

    Without a checksum, the second is None.
    """
    match = expression(form).fullmatch(text.upper() if form.joined else text)
    if not match or (value := match[VALUE if VALUE in match.re.groupindex else 0]) is None:
        return None
    if form.checksum == "none":
        return value, None
    checked = match[CHECKED] if CHECKED in match.re.groupindex else value
    holds = CHECKSUMS[form.checksum].holds(form.checksum_prefix + (checked or value))
    return value, None if holds and is_repeated(value) else holds


def is_repeated(value: str) -> bool:
    """Return whether all digits of a number are the same: zeros fulfil any rule, and prove nothing."""
    return len({character for character in value if character.isdigit()}) == 1 and len(value) > MIN_REPEATED


@cache
def carrier_formats(rule: FieldRule) -> tuple[CarrierFormat, ...]:
    """Return the formats of a field with their carriers."""
    carried = [(form, carrier) for carrier in rule.carriers for form in carrier.formats]
    return (*carried, *((form, None) for form in rule.formats))


@cache
def joined_by_length(rule: FieldRule) -> dict[int, tuple[CarrierFormat, ...]]:
    """Return the joined formats that accept a number of characters, by the number."""
    by_length: dict[int, tuple[CarrierFormat, ...]] = {}
    for form, carrier in carrier_formats(rule):
        least, most = width_range(form.pattern)
        for length in range(least, min(most, MAX_CHARACTERS) + 1) if form.joined else ():
            by_length[length] = (*by_length.get(length, ()), (form, carrier))
    return by_length


@cache
def shapes_by_length(form: Format) -> dict[int, tuple[Shape, ...]]:
    """Return the forms of a pattern by their number of characters; none if it cannot be taken apart."""
    by_length: dict[int, dict[Shape, None]] = {}
    try:
        for shape in shapes(form.pattern):
            by_length.setdefault(len(shape), {})[shape] = None
    except ValueError:
        return {}
    return {length: tuple(forms) for length, forms in by_length.items()}


@cache
def label_expression(labels: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of label words, longest first, with or without the spaces inside them.

    Punctuation may be missing, or read as another character: `TRK#` is often read as `TRKB`.
    """
    spellings = (re.sub(r"\s", "", unicodedata.normalize("NFKC", label)) for label in labels)
    spellings_by_length = sorted(spellings, key=len, reverse=True)
    texts = [
        r"\s?".join(glyph if glyph.isalnum() else r"\S?" for glyph in word) for word in spellings_by_length
    ]
    return re.compile(
        rf"(?<![0-9A-Za-z@])(?:{'|'.join(texts)})(?!(?<=[A-Za-z])[A-Za-z]|(?<=\d)\d)", re.IGNORECASE
    )
