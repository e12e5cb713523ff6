"""What classifiers do one after the other, as generators of calls and pauses: written once, run by either.

Whoever runs them makes each call and sends its result back in, or throws in why it failed.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call:
    """A method of tritonclient's clients, its arguments, and how long it may take in seconds."""

    name: str
    timeout_s: float
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing for so many seconds."""

    seconds: float


Steps: TypeAlias = Generator[Call | Pause, Any, Result]
