"""Masks, compared by the part of the pixels with another class."""

from collections.abc import Sequence

import numpy as np

from nereid.base.task_outputs import Arrays, Comparison, Incomparable, QualitySignals


class MaskOutputs:
    """Models that return uint8[N, H, W]."""

    outputs = ("mask",)

    def compare(self, variant: Arrays, shadow: Arrays) -> Comparison:
        """Return the part of the pixels whose classes differ."""
        old, new = variant["mask"], shadow["mask"]
        if old.shape != new.shape:
            raise Incomparable(f"expected masks {list(old.shape)}, got {list(new.shape)}")
        distance = float((old != new).mean())
        return Comparison(distance, distance < 0.01)

    def signals(self, outputs: Arrays) -> QualitySignals:
        """Return the number of classes in each mask."""
        return QualitySignals(found=[len(np.unique(mask)) for mask in outputs["mask"]])


def make_outputs(outputs: Sequence[str], class_names: Sequence[str]) -> MaskOutputs:
    """Return the meaning of the output `mask`."""
    return MaskOutputs()
