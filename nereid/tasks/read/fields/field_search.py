"""The fields of a document: candidates for each, ranked by evidence."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np

from nereid.tasks.read.characters import RecognisedLine
from nereid.tasks.read.fields.corrections import CharacterCorrection, Match, NumberReading, read_number
from nereid.tasks.read.fields.labels import FieldLabels, Nearness
from nereid.tasks.read.fields.rows import Row, continued, row_of_barcode, rows_of
from nereid.tasks.read.fields.shapes import VALUE
from nereid.tasks.read.fields.specification import (
    CarrierFormat,
    FieldRule,
    Specification,
    carrier_formats,
    expression,
    is_repeated,
    joined_by_length,
)
from nereid.tasks.read.outputs import edit_distance

# Maximum groups of characters in one number, such as `1Z 999 AA1 01 2345 6784`, or single characters.
MAX_GROUPS, MAX_SINGLE_CHARACTERS = 16, 40
_GROUP = re.compile(r"[0-9A-Za-z]+")
# A full stop or a colon may be dirt: across one, a format that needs a label also needs a checksum.
_STOPS = re.compile(r"[.·:]")
_SEPARATORS = re.compile(r"[\s\-\u2010-\u2015\u2212().·]*:?")
# Of several parcels, at the end of a line: `1 of 2`, `(1/2)`.
_COUNT = re.compile(r"(?<=[\s(])[1-9]\d?(?:\s?/\s?|\s(?:of|von|de|di|van)\s)[1-9]\d?\)?\s*$", re.I)
# Telephone numbers and dates, which digits without letters may be.
_OTHER_KINDS = re.compile(
    r"\+.*|\D?\d{3}\)?[ -]\d{3}[ -]\d{4}|\D?20\d\d[-.]\d\d?[-.]\d\d?\b.*|\D?\d\d?[-.]\d\d?[-.]20\d\d\b.*"
)


def readings_in(row: Row, rule: FieldRule, named: frozenset[str]) -> Iterator[tuple[int, int, Match, bool]]:
    """Yield the start, end and reading of each value in a row, and whether it must be part of a number."""
    for form, carrier in carrier_formats(rule):
        if not form.joined:
            for match in expression(form).finditer(row.text):
                start, end = match.span(VALUE if VALUE in match.re.groupindex else 0)
                if end > start:
                    reading = NumberReading(row.text[start:end], None)
                    yield start, end, Match(reading, form, carrier, 0.0), False
    by_length = joined_by_length(rule)
    longest = max(by_length, default=0)
    counted = _COUNT.search(row.text)
    groups = list(_GROUP.finditer(row.text, 0, counted.start() if counted else len(row.text)))
    others = row.others
    for first, group in enumerate(groups):
        text, others_of_text, has_stop = "", "", False
        for last in range(first, min(first + MAX_SINGLE_CHARACTERS, len(groups))):
            gap = row.text[groups[last - 1].end() : groups[last].start()] if last > first else ""
            text += groups[last][0]
            others_of_text += others[groups[last].start() : groups[last].end()]
            count = last - first + 1
            if len(text) > longest or not _SEPARATORS.fullmatch(gap) or MAX_GROUPS < count < len(text):
                break
            has_stop = has_stop or bool(_STOPS.search(gap))
            forms = by_length.get(len(text), ())
            if has_stop and forms:
                forms = tuple(pair for pair in forms if not pair[0].needs_label or _has_checksum(pair))
            start, end = group.start(), groups[last].end()
            is_part = bool(forms) and _has_adjacent_digits(row, groups, first, last)
            if is_part:
                # Letters and a valid checksum distinguish a number from the text next to it.
                forms = tuple(pair for pair in forms if _is_self_evident(pair) or text.isdigit())
            elif text.isdigit() and _OTHER_KINDS.fullmatch(row.text[max(start - 1, 0) : end].strip()):
                continue
            read = read_number(text, forms, named, others_of_text) if forms else None
            is_doubtful = is_part or (has_stop and read is not None and read.form.needs_label)
            if read and (read.reading.valid or not is_doubtful):
                yield start, end, read, is_part and text.isdigit()


def _has_checksum(form: CarrierFormat) -> bool:
    return form[0].checksum != "none"


def _is_self_evident(form: CarrierFormat) -> bool:
    return _has_checksum(form) and not form[0].needs_label


def _has_adjacent_digits(row: Row, groups: Sequence[re.Match[str]], first: int, last: int) -> bool:
    """Return whether an adjacent group in the same box has digits, so this is part of a longer number."""
    for inner, outer in ((first, first - 1), (last, last + 1)):
        if 0 <= outer < len(groups) and re.search("[0-9]", groups[outer][0]):
            begin = min(groups[inner].end(), groups[outer].end())
            end = max(groups[inner].start(), groups[outer].start())
            if _SEPARATORS.fullmatch(row.text[begin:end]) and row.is_one_box(begin, end):
                return True
    return False


# Maximum pairs of rows that are searched for a number on both, and the evidence it needs from its format and
# checksum: two other numbers together may be correct by chance.
MAX_PAIRS, MIN_PAIR_EVIDENCE = 200, 2.0
# Maximum candidates per field; any more are left out in reading order.
MAX_CANDIDATES = 2000
# Evidence as a logarithm: without a label, a corrected number needs this much.
MIN_CORRECTED_EVIDENCE = 1.5
# A number whose checksum does not match was not read correctly.
INVALID_EVIDENCE = -4.0
# Evidence for a printed number of this minimum length that agrees with bars.
BARCODE_EVIDENCE = 5.0
MIN_CODE_LENGTH = 8
# Such a number is certain with this much evidence besides.
MIN_OTHER_EVIDENCE = 3.0
# A number was misread if at most this fraction of its characters differs from the bars. Only the numbers
# nearest to labels are compared.
MAX_MISREAD_FRACTION = 0.34
MAX_COMPARED = 4
# A value is certain with this much evidence, this much more than any other, and this line confidence.
CERTAIN_EVIDENCE = 3.5
MIN_LEAD = 1.5
CERTAIN_CONFIDENCE = 0.98
# Evidence of about one check digit is enough to name a carrier.
CHECK_DIGIT_EVIDENCE = 0.9
# Row, start and end of a candidate.
Span = tuple[int, int, int]
# The content of bars, and their corners float[4, 2] in pixels of the upright image.
Barcode: TypeAlias = tuple[str, np.ndarray]
_TEXT: tuple[str, ...] = ("text",)
_BARS: tuple[str, ...] = ("barcode",)
_ALPHANUMERIC = re.compile(r"[^0-9A-Za-z]")


@dataclass(frozen=True, slots=True)
class FieldCandidate:
    """A possible value of a field.

    Attributes:
        match: the value, its format, and the evidence from the format and the checksum.
        confidence: the line's confidence; the lowest one if the value spans several boxes.
        box: corners float32[4, 2] of the value in pixels of the upright image.
        nearness: evidence from labels.
        sources: where it was read: `text`, `barcode` or both.
        is_continued: whether it may be, or is, on two rows; its box is then in the first.
        part: evidence for a part of it with a valid checksum, which may be the actual number.
    """

    match: Match
    confidence: float
    box: np.ndarray
    nearness: Nearness
    sources: tuple[str, ...]
    is_continued: bool
    part: float = -np.inf

    @property
    def reading(self) -> NumberReading:
        """The value, and what is known about it."""
        return self.match.reading

    @property
    def claim(self) -> tuple[bool, float]:
        """Sort key of fields competing for the same text."""
        return self.reading.valid is not True, self.nearness.distance

    @property
    def evidence(self) -> float:
        """Logarithm of how rare this is for a random text; 3 stands for 1 in 1,000."""
        invalid = INVALID_EVIDENCE if self.reading.valid is False else 0.0
        barcode = BARCODE_EVIDENCE if len(self.sources) > 1 else 0.0
        return self.match.evidence + self.nearness.evidence + invalid + barcode

    @property
    def rank(self) -> tuple[float, float, float]:
        """Sort key, best first."""
        return -self.evidence, self.nearness.distance, -self.confidence

    @property
    def proof(self) -> str:
        """The evidence that agrees, such as `label+checksum`; `format only` if there is none."""
        bars = list(self.sources) if "barcode" in self.sources else []
        label = ["label"] if self.nearness.is_labelled and not bars else []
        return "+".join([*bars, *label, *(["checksum"] if self.reading.valid else [])]) or "format only"

    @property
    def is_proven(self) -> bool:
        """Whether this value would be certain on a page without any other."""
        if is_repeated(self.reading.value) or self.reading.valid is False or self.nearness.may_be_cut:
            return False
        is_valid = self.reading.valid is True
        if len(self.sources) > 1:
            is_confirmed = is_valid or self.nearness.is_labelled
            return is_confirmed and self.evidence >= BARCODE_EVIDENCE + MIN_OTHER_EVIDENCE
        if self.part > self.evidence - MIN_LEAD or self.is_continued:
            return False
        is_read = self.sources == _BARS or (self.reading.covered and self.confidence >= CERTAIN_CONFIDENCE)
        is_checked = is_valid and self.match.evidence >= CHECK_DIGIT_EVIDENCE
        return is_checked and is_read and self.evidence >= CERTAIN_EVIDENCE

    def agrees(self, other: "FieldCandidate") -> bool:
        """Return whether one contains the other's value, as FedEx's 34 digits contain the parcel's 12."""
        ours, theirs = self.reading.value, other.reading.value
        return ours in theirs or theirs in ours


@dataclass(frozen=True, slots=True)
class FoundField:
    """A field of a document; `value`, `box`, `proof` and `carrier` are None if it was not found.

    Attributes:
        certain: whether a checksum, or bars and text, prove the value, and no other is about as likely.
        candidates: all about equally likely values, this one first; empty if it has no rival.
    """

    name: str
    value: str | None = None
    confidence: float = 0.0
    box: np.ndarray | None = None
    valid: bool | None = None
    corrected: tuple[CharacterCorrection, ...] = ()
    proof: str | None = None
    carrier: str | None = None
    certain: bool = False
    candidates: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the field's JSON object, as specified in docs/contract.md."""
        return asdict(self) | {
            "confidence": round(self.confidence, 4),
            "box": None if self.box is None else np.round(self.box.astype(float), 1).tolist(),
            "corrected": [
                {"position": swap.position, "from": swap.before, "to": swap.after} for swap in self.corrected
            ],
            "candidates": [*self.candidates],
        }


def find_fields(
    lines: Sequence[RecognisedLine], specification: Specification, barcodes: Sequence[Barcode] = ()
) -> list[FoundField]:
    """Return each field of the specification, in order, with its best candidate.

    A text that matches several fields is assigned to the one with a valid checksum, else the nearest label.
    Time is bounded: at most `MAX_LINES` lines are searched, and patterns are bounded by `count_ways`.
    """
    rows = rows_of(lines)
    bars, goes_on = [row_of_barcode(*barcode) for barcode in barcodes], continued(rows)
    by_field = {rule.name: _candidates(rows, bars, goes_on, rule) for rule in specification.fields}
    best: dict[Span, tuple[bool, float]] = {}
    for candidates in by_field.values():
        for key, candidate in candidates.items():
            best[key] = min(candidate.claim, best.get(key, candidate.claim))
    return [
        _field(name, [option for key, option in candidates.items() if option.claim == best[key]])
        for name, candidates in by_field.items()
    ]


def _field(name: str, candidates: Sequence[FieldCandidate]) -> FoundField:
    if not candidates:
        return FoundField(name)
    found = sorted(candidates, key=lambda candidate: candidate.rank)
    best = found[0]
    carrier = best.match.carrier if best.match.evidence >= CHECK_DIGIT_EVIDENCE else None
    near = [rival for rival in found if rival.evidence > best.evidence - MIN_LEAD and not rival.agrees(best)]
    rivals = dict.fromkeys(rival.reading.value for rival in near)
    return FoundField(
        name,
        best.reading.value,
        best.confidence,
        best.box,
        best.reading.valid,
        best.reading.corrections,
        best.proof,
        carrier.name if carrier else None,
        best.is_proven and not rivals,
        (best.reading.value, *rivals) if rivals else (),
    )


def missing_fields(fields: Sequence[FoundField], specification: Specification) -> list[str]:
    """Return the names of required fields that were not found or have an invalid checksum."""
    complete = {entry.name for entry in fields if entry.value is not None and entry.valid is not False}
    return [rule.name for rule in specification.fields if rule.required and rule.name not in complete]


def _candidates(
    rows: Sequence[Row], codes: Sequence[Row], goes_on: np.ndarray, rule: FieldRule
) -> Mapping[Span, FieldCandidate]:
    labels, is_followed, has_begun = FieldLabels(rows, rule), goes_on.any(axis=1), goes_on.any(axis=0)
    barcode_texts = frozenset(part for row in codes for part in _barcode_texts(row.text))
    candidates: dict[Span, FieldCandidate] = {}
    parts: dict[int, dict[tuple[int, int], FieldCandidate]] = {}
    pairs = ((first, rows[first].followed_by(rows[other])) for first, other in np.argwhere(goes_on).tolist())
    readings = (
        (number, row, reading)
        for number, row in chain(enumerate((*rows, *codes)), islice(pairs, MAX_PAIRS))
        for reading in readings_in(row, rule, labels.named)
        if number >= len(rows) or row is rows[number] or _is_on_both(reading, len(rows[number].text))
    )
    for number, row, (start, end, match, is_part) in islice(readings, MAX_CANDIDATES):
        is_code = number >= len(rows)
        last = end if is_code else min(end, len(rows[number].text))
        if match.reading.corrections and (is_code or match.evidence < 0):  # bars are not misread
            continue
        if is_code:
            nearness, sources = Nearness(), _BARS
        else:
            nearness = labels.nearness(row, number, start, last)
            is_long = match.form.joined and len(match.reading.value) >= MIN_CODE_LENGTH
            agrees = is_long and _agrees(match.reading, barcode_texts)
            # If bars confirm a number whose checksum does not match, it is a different kind of number.
            counts = nearness.is_labelled or (nearness.evidence == 0 and match.reading.valid is not False)
            sources = (*_BARS, *_TEXT) if agrees and counts else _TEXT
        is_continued = not is_code and bool(
            (is_followed[number] and not _GROUP.search(row.text, end))
            or (has_begun[number] and not _GROUP.search(row.text[:start]))
        )
        candidate = FieldCandidate(
            match, row.confidence(start, end), row.box(start, last), nearness, sources, is_continued
        )
        carrier = match.carrier.name if match.carrier else ""
        is_named = carrier in labels.named and match.reading.valid is True and nearness.evidence == 0
        is_kept = nearness.is_labelled or is_named or len(sources) > 1 or not _needs_label(candidate)
        if is_part:
            parts.setdefault(number, {})[start, end] = candidate
        elif is_kept or sources == _BARS:
            candidates[number, start, end] = candidate
    is_open = labels.has_own and not any(option.nearness.is_labelled for option in candidates.values())
    return _joined(_without_parts(candidates, parts), is_open)


def _is_on_both(reading: tuple[int, int, Match, bool], middle: int) -> bool:
    """Return whether a number goes on in another row, and its format and checksum prove that it does."""
    start, end, match, is_part = reading
    is_proven = match.reading.valid is True and match.reading.evidence >= MIN_PAIR_EVIDENCE
    return start < middle < end and is_proven and not (match.form.needs_label or is_part)


def _barcode_texts(text: str) -> tuple[str, ...]:
    """Return the letters and digits of bars, and of each of their parts, such as GS1 elements."""
    return tuple(_ALPHANUMERIC.sub("", part).upper() for part in (text, *_ALPHANUMERIC.split(text)))


def _agrees(reading: NumberReading, barcode_texts: Collection[str]) -> bool:
    """Return whether bars contain exactly a number or end with it: FedEx and USPS prefix it with long ones.

    Without a checksum the end proves nothing, because only part of a number may have been read.
    """
    value = reading.value
    return value in barcode_texts or (
        reading.valid is True
        and any(code.endswith(value) and len(code) >= len(value) + MIN_CODE_LENGTH for code in barcode_texts)
    )


def _joined(found: Mapping[Span, FieldCandidate], is_open: bool) -> Mapping[Span, FieldCandidate]:
    """Combine bars and text that represent the same number.

    A labelled number without a valid checksum was misread if it differs from the bars in few characters or is
    part of them, because bars have their own checksum. Other bars count as if they had no label, or as if
    labelled if a label on the page is open, that is no number was read beside it.
    """
    texts = {key: text for key, text in found.items() if text.sources != _BARS}
    kept, agreed = dict(texts), {text.reading.value for text in texts.values() if len(text.sources) > 1}
    doubtful = [
        key
        for key, text in texts.items()
        if text.nearness.is_labelled and not text.reading.valid and len(text.sources) == 1
    ]
    doubtful = sorted(doubtful, key=lambda key: texts[key].nearness.distance)[:MAX_COMPARED]
    for key, code in found.items():
        value = code.reading.value
        if key in texts or any(number in value for number in agreed):
            continue
        misread = [span for span in doubtful if _is_misread(texts[span].reading.value, value)]
        for span in misread:
            kept.pop(span, None)
        if misread:
            kept[key] = replace(code, nearness=texts[misread[0]].nearness)
        elif not any(candidate.reading.value in value for candidate in kept.values()) and (
            not _needs_label(code) or (is_open and code.reading.valid and not is_repeated(value))
        ):
            kept[key] = code
    return kept


def _is_misread(text: str, code: str) -> bool:
    if len(code) < MIN_CODE_LENGTH or len(text) > 2 * len(code):
        return False
    is_part = code in text or (len(text) >= MIN_CODE_LENGTH and text in code)
    return is_part or edit_distance(text, code) <= len(code) * MAX_MISREAD_FRACTION


def _needs_label(candidate: FieldCandidate) -> bool:
    """Return whether a number counts only near a label, because it is not rare enough on its own."""
    is_poor = bool(candidate.reading.corrections) and candidate.match.evidence < MIN_CORRECTED_EVIDENCE
    return candidate.match.form.needs_label or is_poor or is_repeated(candidate.reading.value)


def _without_parts(
    found: Mapping[Span, FieldCandidate], parts: Mapping[int, Mapping[tuple[int, int], FieldCandidate]]
) -> Mapping[Span, FieldCandidate]:
    """Leave out parts of a longer candidate, unless only the part has a valid checksum.

    A part whose format needs a label is always left out, because its checksum may match by chance. So may the
    longer candidate's, if it is a number joined with the text next to it.
    """
    kept: dict[Span, FieldCandidate] = {}
    ends: dict[tuple[int, bool], int] = {}
    for number, start, end in sorted(found, key=lambda span: (span[0], span[1], -span[2])):
        candidate = found[number, start, end]
        is_valid = candidate.reading.valid is True and not candidate.match.form.needs_label
        if end > ends.get((number, True), 0) and (is_valid or end > ends.get((number, False), 0)):
            kept[number, start, end] = candidate
            ends[number, is_valid] = end
    for (number, start, end), whole in kept.items():
        inside = [
            part.evidence
            for (first, last), part in parts.get(number, {}).items()
            if start <= first and last <= end and part.reading.value != whole.reading.value
        ]
        kept[number, start, end] = replace(whole, part=max(inside, default=-np.inf))
    return kept
