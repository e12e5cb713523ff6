"""Buffers that are reused from image to image, so that steady work allocates no memory."""

import numpy as np


class Buffers:
    """Arrays by name, for one thread at a time."""

    KEPT_BYTES = 16 * 2**20

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
        """Return an uninitialized array, valid until the next `take` of the same name.

        An array of more than `KEPT_BYTES` is not kept, so that one huge image does not occupy memory
        permanently.
        """
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = self._kept.get(name)
        if memory is None or memory.size < size:
            memory = np.empty(size, np.uint8)
            if size <= self.KEPT_BYTES:
                self._kept[name] = memory
        return memory[:size].view(dtype).reshape(shape)
