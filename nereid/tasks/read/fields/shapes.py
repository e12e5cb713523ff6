"""The texts that a pattern accepts, position by position, and a bound on the work it can cause."""

from collections.abc import Iterator
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

# Longest text compared with a pattern; unbounded patterns are cut off here.
MAX_CHARACTERS = 64
# Maximum number of ways in which a pattern may match from one position.
MAX_WAYS = 1000
# Named groups: the value (the whole match if absent), and the part of it with a check digit.
VALUE, CHECKED = "value", "checked"
DIGITS = frozenset("0123456789")
LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ")

# Accepted characters, whether the position is in the value, and whether the check digit covers it.
PatternPosition = tuple[frozenset[str], bool, bool]
Shape = tuple[PatternPosition, ...]
# Accepted characters at each position, and the groups that contain it.
_Sequence = tuple[tuple[frozenset[str], frozenset[Any]], ...]


def count_ways(pattern: str) -> int:
    """Return an upper bound on the ways in which a pattern may match from one position in a text.

    A search never tries more. Nested repetitions multiply, as in `(a+)+`, which is why such patterns are
    rejected.

    Raises:
        re.error: the pattern is not a regular expression.
    """
    return _ways(parser.parse(pattern))


def shapes(pattern: str) -> tuple[Shape, ...]:
    """Return each sequence of positions that a pattern accepts, in upper case.

    Raises:
        ValueError: parts of the pattern do not stand for one character each, such as `(?=…)` or `.`.
    """
    tree = parser.parse(pattern)
    value, checked = (tree.state.groupdict.get(name) for name in (VALUE, CHECKED))
    sequences = _sequences(tree, frozenset(), (value, checked))
    return tuple(
        tuple(
            (
                accepted,
                is_value := value in inside or value is None,
                checked in inside if checked else is_value,
            )
            for accepted, inside in sequence
        )
        for sequence in sequences
    )


def width_range(pattern: str) -> tuple[int, int]:
    """Return the minimum and maximum number of characters that a pattern accepts."""
    least, most = parser.parse(pattern).getwidth()
    return int(least), int(most)


def _ways(tree: Any) -> int:
    """Multiply the ways of the parts; the result stays below twice the square of the limit."""
    ways = 1
    for operation, argument in tree:
        ways = min(ways * _ways_of(operation, argument), MAX_WAYS + 1)
    return ways


def _ways_of(operation: Any, argument: Any) -> int:
    if operation is code.BRANCH:
        return sum(map(_ways, argument[1]))
    if operation is code.SUBPATTERN:
        return _ways(argument[-1])
    if operation in {code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT}:
        least, most, body = argument
        inner, most = _ways(body), min(int(most), MAX_CHARACTERS)
        if inner == 1:
            return max(most - min(int(least), most), 0) + 1
        return MAX_WAYS + 1 if most > MAX_WAYS.bit_length() else sum(inner**n for n in range(least, most + 1))
    if operation in {code.ASSERT, code.ASSERT_NOT}:
        return _ways(argument[1])
    if operation is code.ATOMIC_GROUP:
        return _ways(argument)
    if operation in {code.GROUPREF, code.GROUPREF_EXISTS}:
        return MAX_WAYS + 1
    return 1


def _sequences(tree: Any, inside: frozenset[Any], groups: tuple[int | None, ...]) -> list[_Sequence]:
    sequences: list[_Sequence] = [()]
    for operation, argument in tree:
        further = list(_expand(operation, argument, inside, groups))
        sequences = [before + after for before in sequences for after in further]
        if len(sequences) > MAX_WAYS:
            raise ValueError(f"expected at most {MAX_WAYS} forms, got more")
    return sequences


def _expand(
    operation: Any, argument: Any, inside: frozenset[Any], groups: tuple[int | None, ...]
) -> Iterator[_Sequence]:
    if operation is code.SUBPATTERN:
        yield from _sequences(argument[-1], inside | {argument[0]} & {*groups}, groups)
    elif operation is code.BRANCH:
        for branch in argument[1]:
            yield from _sequences(branch, inside, groups)
    elif operation in {code.MAX_REPEAT, code.MIN_REPEAT}:
        least, most, body = argument
        for count in range(least, min(int(most), MAX_CHARACTERS) + 1):
            yield from _sequences([*body] * count, inside, groups)
    elif operation is code.AT:
        yield ()
    else:
        yield ((_accepted(operation, argument), inside),)


def _accepted(operation: Any, argument: Any) -> frozenset[str]:
    if operation is code.LITERAL:
        return frozenset({chr(argument).upper()})
    if operation is code.CATEGORY and argument is code.CATEGORY_DIGIT:
        return DIGITS
    if operation is code.RANGE:
        return frozenset(map(chr, range(argument[0], argument[1] + 1))) & (DIGITS | LETTERS)
    if operation is code.IN:
        return frozenset().union(*(_accepted(*member) for member in argument))
    raise ValueError(f"expected letters, digits, classes and repetitions, got {str(operation).lower()}")
