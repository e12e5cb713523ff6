"""Masks of images, read from tritonclient's results."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nereid.client.result_kind import ResultKind, Timings


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """The classes of the pixels, uint8[H, W], and the model that found them."""

    classes: np.ndarray
    model: str
    version: str
    variant: str
    reason: str
    request_id: str
    timings: Timings
    image: str = ""


def _count(result: Any) -> int:
    masks = result.as_numpy("mask")
    return len(masks) if masks.ndim == 3 else -1


def _values(result: Any) -> list[tuple[np.ndarray]]:
    return [(mask,) for mask in result.as_numpy("mask")]


MASKS = ResultKind("segment", "segment", ("mask",), (), _count, _values, Mask)
