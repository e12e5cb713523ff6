"""The values that a row of text has: what patterns find in it, and its numbers, which may be in groups."""

import re
from collections.abc import Iterator, Sequence

from nereid.tasks.read.fields.corrections import Match, Reading, read_number
from nereid.tasks.read.fields.rows import Row
from nereid.tasks.read.fields.shapes import VALUE
from nereid.tasks.read.fields.specification import FieldRule, Form, expression, forms_of, joined_by_length

# Groups of characters that one number may have, such as `1Z 999 AA1 01 2345 6784`; or one character each.
MAX_GROUPS, MAX_SINGLE_CHARACTERS = 16, 40
_GROUP = re.compile(r"[0-9A-Za-z]+")
# A full stop may be dirt, or that of a decimal: it separates only what needs no label.
_STOPS = re.compile(r"[.·]")
_SEPARATORS = re.compile(r"[\s\-\u2010-\u2015\u2212().·]*")
# Telephone numbers and dates, which digits without letters may be.
_OTHER_KINDS = re.compile(
    r"\+.*|\D?\d{3}\)?[ -]\d{3}[ -]\d{4}|\D?20\d\d[-.]\d\d?[-.]\d\d?\b.*|\D?\d\d?[-.]\d\d?[-.]20\d\d\b.*"
)


def readings_in(row: Row, rule: FieldRule, named: frozenset[str]) -> Iterator[tuple[int, int, Match]]:
    """Yield start, end and reading of every value in a row."""
    for form, carrier in forms_of(rule):
        if not form.joined:
            for match in expression(form).finditer(row.text):
                start, end = match.span(VALUE if VALUE in match.re.groupindex else 0)
                if end > start:
                    yield start, end, Match(Reading(row.text[start:end], None), form, carrier, 0.0)
    by_length = joined_by_length(rule)
    longest = max(by_length, default=0)
    groups = list(_GROUP.finditer(row.text))
    for first, group in enumerate(groups):
        text, has_stop = "", False
        for last in range(first, min(first + MAX_SINGLE_CHARACTERS, len(groups))):
            gap = row.text[groups[last - 1].end() : groups[last].start()] if last > first else ""
            text += groups[last][0]
            count = last - first + 1
            if len(text) > longest or not _SEPARATORS.fullmatch(gap) or MAX_GROUPS < count < len(text):
                break
            has_stop = has_stop or bool(_STOPS.search(gap))
            forms = by_length.get(len(text), ())
            if has_stop and forms:
                forms = tuple(each for each in forms if not each[0].needs_label)
            start, end = group.start(), groups[last].end()
            is_part = bool(forms) and _goes_on(row, groups, first, last)
            if is_part:
                # Letters and a checksum that holds tell a number from what stands beside it.
                forms = () if text.isdigit() else tuple(filter(_is_clear, forms))
            elif text.isdigit() and _OTHER_KINDS.fullmatch(row.text[max(start - 1, 0) : end].strip()):
                continue
            read = read_number(text, forms, named) if forms else None
            if read and (read.reading.valid or not is_part):
                yield start, end, read


def _is_clear(form: Form) -> bool:
    return form[0].checksum != "none" and not form[0].needs_label


def _goes_on(row: Row, groups: Sequence[re.Match[str]], first: int, last: int) -> bool:
    """Return whether groups with digits follow or precede in the same box: then it is a part of a number."""
    for inner, outer in ((first, first - 1), (last, last + 1)):
        if 0 <= outer < len(groups) and re.search("[0-9]", groups[outer][0]):
            begin, end = (
                min(groups[inner].end(), groups[outer].end()),
                max(groups[inner].start(), groups[outer].start()),
            )
            if _SEPARATORS.fullmatch(row.text[begin:end]) and row.is_one_box(begin, end):
                return True
    return False
