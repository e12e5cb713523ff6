"""Differences between two routes: fields, and the variants of sticky keys."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import fields

from nereid.backends.routing.assignment import Route, Shadow, Variant, assign

SAMPLE_KEYS = 10_000
ABSENT = "—"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of a route: its path, such as `variants[v1].weight`, and its old and new value."""

    path: str
    old: str
    new: str


def differences(old: Route, new: Route) -> list[Difference]:
    """Return the fields in which two routes differ, without the generation; defaults count as written."""
    before, after = dict(_flat(old)), dict(_flat(new))
    paths = [*before, *(path for path in after if path not in before)]
    pairs = [(path, before.get(path, ABSENT), after.get(path, ABSENT)) for path in paths]
    return [Difference(path, str(a), str(b)) for path, a, b in pairs if a != b]


def moves(old: Route, new: Route) -> dict[tuple[str, str], float]:
    """Return the shares of sticky keys that change their variant, by variant before and after.

    The shares are counted for `SAMPLE_KEYS` keys: `key-0`, `key-1` and so on.
    """
    keys = [f"key-{number}" for number in range(SAMPLE_KEYS)]
    pairs = Counter((assign(old, key).name, assign(new, key).name) for key in keys)
    return {pair: count / SAMPLE_KEYS for pair, count in pairs.most_common() if pair[0] != pair[1]}


def describe_moves(moved: dict[tuple[str, str], float]) -> str:
    """Return the moves of sticky keys as one line."""
    if not moved:
        return "no sticky key moves"
    total = f"{sum(moved.values()) * 100:.1f} % of sticky keys move: "
    if len(moved) == 1:
        return total + " → ".join(*moved)
    return total + ", ".join(f"{share * 100:.1f} % {old} → {new}" for (old, new), share in moved.items())


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every field; variants and shadows are identified by their names."""
    if isinstance(value, Struct):
        for field in fields(value):
            if field.name != "generation":
                name = f"{path}.{field.encode_name}" if path else field.encode_name
                yield from _flat(getattr(value, field.name), name)
    elif value and isinstance(value, tuple) and isinstance(value[0], (Variant, Shadow)):
        yield path, ", ".join(each.name for each in value)
        for each in value:
            yield from _flat(each, f"{path}[{each.name}]")
    elif isinstance(value, dict):
        for name, values in value.items():
            yield f"{path}[{name}]", ", ".join(values) if isinstance(values, tuple) else values
    elif value and isinstance(value, tuple):
        yield path, ", ".join(value)
    elif value != ():
        yield path, value
