"""Reading: lines of text, and the fields of a document."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from nereid.base.contract import CONFIDENCE, FIELD, TEXT
from nereid.base.task_outputs import Arrays, Comparison, QualitySignals, signals_of_findings
from nereid.tasks.read import READ, WAYBILL

# Maximum characters compared; a page of text has fewer.
MAX_COMPARED = 4096


class ReadingOutputs:
    """Models that read text."""

    outputs = READ.outputs

    def compare(self, variant: Arrays, shadow: Arrays) -> Comparison:
        """Return the character error rate, at most 1, and whether all lines are equal."""
        old, new = _text(variant), _text(shadow)
        return Comparison(error_rate(old, new), old == new)

    def signals(self, outputs: Arrays) -> QualitySignals | None:
        """Return the mean confidence of each image with lines, and the number of lines."""
        return signals_of_findings(outputs[CONFIDENCE], np.mean, "lines")


class FieldOutputs(ReadingOutputs):
    """Models that also read the fields of a document."""

    outputs = WAYBILL.outputs

    def compare(self, variant: Arrays, shadow: Arrays) -> Comparison:
        """Return the character error rate over all lines, and whether all fields have the same values."""
        distance = error_rate(_text(variant), _text(shadow))
        return Comparison(distance, _values(variant) == _values(shadow))


def error_rate(expected: str, got: str) -> float:
    """Return the edit distance (Levenshtein) of two texts divided by the length of the longer one."""
    expected, got = expected[:MAX_COMPARED], got[:MAX_COMPARED]
    longest = max(len(expected), len(got))
    return edit_distance(expected, got) / longest if longest else 0.0


def edit_distance(expected: str, got: str) -> int:
    """Return the smallest number of characters to insert, delete or replace."""
    if expected == got:
        return 0
    columns = np.array([*map(ord, got)], np.int32)
    lengths = np.arange(len(got) + 1)
    row = lengths.copy()
    for length, character in enumerate(expected, 1):
        costs = np.minimum(row[:-1] + (columns != ord(character)), row[1:] + 1)
        # Each inserted column costs 1: subtract that slope, take a running minimum, and add it back.
        row = np.minimum.accumulate(np.concatenate(([length], costs)) - lengths) + lengths
    return int(row[-1])


def _text(outputs: Arrays) -> str:
    return "\n".join(line.decode(errors="replace") for line in outputs[TEXT].ravel())


def _values(outputs: Arrays) -> dict[tuple[str, int], Any]:
    fields = [json.loads(entry) for entry in outputs[FIELD].ravel()]
    return {(field["name"], field.get("page", 1)): field["value"] for field in fields}


def make_outputs(outputs: Sequence[str], class_names: Sequence[str]) -> ReadingOutputs:
    """Return the meaning of a reader's outputs, including fields if it has them."""
    return FieldOutputs() if FIELD in outputs else ReadingOutputs()
