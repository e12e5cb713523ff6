"""Pairwise tables of test cases: every possible pair of options in few rows, the same ones in each run."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairs(row: Row) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(row.items(), 2))


def possible(options: Mapping[str, Sequence[Any]], is_possible: Callable[[Row], bool]) -> list[Row]:
    product = (dict(zip(options, values, strict=True)) for values in itertools.product(*options.values()))
    return [row for row in product if is_possible(row)]


def pairwise(
    options: Mapping[str, Sequence[Any]], is_possible: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Return rows that have every pair of options which a possible row has.

    Greedy: each row is the first of those with the most pairs that are still missing.
    """
    bits: dict[Any, int] = {}
    rows = [
        (row, sum(bits.setdefault(pair, 1 << len(bits)) for pair in pairs(row)))
        for row in possible(options, is_possible)
    ]
    missing, found = (1 << len(bits)) - 1, []
    while missing:
        best, have = max(rows, key=lambda each: (each[1] & missing).bit_count())
        found.append(best)
        missing &= ~have
    return found
