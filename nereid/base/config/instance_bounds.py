"""Limits on a model's instance count: the parameters `nereid.instances` and `nereid.instances_idle_s`.

The server writes the count it chose into the same parameter of the config it passes to Triton: `3 of 1-4`.
Triton 24.10 then restarts all instances. If only the count changed, it would wait for an empty queue.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid.base.errors import InvalidConfig

BOUNDS, IDLE = "nereid.instances", "nereid.instances_idle_s"
# Parameters for `nereid serve`; every backend ignores them.
PARAMETERS = frozenset({BOUNDS, IDLE})
# Each instance of a Python-based backend is a process.
MAX_INSTANCES = 64
DEFAULT_IDLE_S = 30.0
EXPECTED = f'expected LOW-HIGH with 1 <= LOW <= HIGH <= {MAX_INSTANCES}, such as "1-4"'


@dataclass(frozen=True, slots=True)
class InstanceBounds:
    """Minimum and maximum instance count, and the idle seconds after which one instance is removed."""

    low: int
    high: int
    idle_s: float = DEFAULT_IDLE_S

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"

    def nearest(self, count: int) -> int:
        """Return `count`, clamped to the bounds."""
        return max(self.low, min(self.high, count))


def read_bounds(document: Mapping[str, Any]) -> InstanceBounds | None:
    """Return the bounds set in a config with protobuf field names, or None if the parameter is absent.

    Raises:
        InvalidConfig: the bounds or idle time are invalid, or the model is an ensemble or has several groups.
    """
    texts = {key: value.get("string_value", "") for key, value in document.get("parameters", {}).items()}
    if BOUNDS not in texts:
        return None
    match = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", texts[BOUNDS].strip())
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= low <= high <= MAX_INSTANCES:
        raise InvalidConfig(f"parameter '{BOUNDS}': {EXPECTED}, got '{texts[BOUNDS]}'")
    if "ensemble_scheduling" in document:
        raise InvalidConfig(f"parameter '{BOUNDS}': expected a model with instances, got an ensemble")
    if (groups := len(document.get("instance_group", ()))) > 1:
        raise InvalidConfig(f"parameter '{BOUNDS}': expected at most 1 instance_group, got {groups}")
    return InstanceBounds(low, high, _idle_s(texts.get(IDLE, "")))


def with_instance_count(document: Mapping[str, Any], bounds: InstanceBounds, count: int) -> dict[str, Any]:
    """Return a config whose instance count is `count`, clamped to the bounds."""
    count = bounds.nearest(count)
    group: Mapping[str, Any] = next(iter(document.get("instance_group", ())), {})
    parameters = {**document.get("parameters", {}), BOUNDS: {"string_value": f"{count} of {bounds}"}}
    return {**document, "instance_group": [{**group, "count": count}], "parameters": parameters}


def parse_instance_count(text: str) -> int | None:
    """Return the instance count recorded in a served config's parameter, or None if no server chose one."""
    count, separator, _ = text.partition(" of ")
    return int(count) if separator and count.isdecimal() else None


def _idle_s(text: str) -> float:
    if not text:
        return DEFAULT_IDLE_S
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", text) or float(text) <= 0:
        raise InvalidConfig(f"parameter '{IDLE}': expected a number of seconds above 0, got '{text}'")
    return float(text)
