"""Flows of a client without I/O: generators that the blocking and the asyncio transport run alike.

A transport runs each RPC and sends its result back into the flow, or throws the error into the flow.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method of tritonclient's clients with its arguments and its time limit in seconds."""

    name: str
    timeout_s: float
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pause:
    """A wait between two attempts."""

    seconds: float


Flow: TypeAlias = Generator[Rpc | Pause, Any, Result]
