"""How long an image was under way."""

import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(slots=True)
class Spent:
    """The seconds that one image waited for its turn, and that the server had it; 0 for not at all."""

    admission_s: float = 0.0
    inference_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both together."""
        return self.admission_s + self.inference_s

    async def waiting(self, call: Awaitable[Result]) -> Result:
        """Await a turn, however that ends."""
        began_s = time.perf_counter()
        try:
            return await call
        finally:
            self.admission_s = time.perf_counter() - began_s

    async def asking(self, call: Awaitable[Result]) -> Result:
        """Await the server, however that ends."""
        began_s = time.perf_counter()
        try:
            return await call
        finally:
            self.inference_s = time.perf_counter() - began_s
