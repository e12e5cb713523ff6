"""Durations of one image in the gateway."""

import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(slots=True)
class RequestTimings:
    """Seconds that one image spent in the queue and in the server; 0 if it never got there."""

    admission_s: float = 0.0
    inference_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of both durations."""
        return self.admission_s + self.inference_s

    async def measure_admission(self, awaited: Awaitable[Result]) -> Result:
        """Await a slot, and record the duration of every outcome."""
        began_s = time.perf_counter()
        try:
            return await awaited
        finally:
            self.admission_s = time.perf_counter() - began_s

    async def measure_inference(self, awaited: Awaitable[Result]) -> Result:
        """Await the server, and record the duration of every outcome."""
        began_s = time.perf_counter()
        try:
            return await awaited
        finally:
            self.inference_s = time.perf_counter() - began_s
