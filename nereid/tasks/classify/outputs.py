"""Classification: one score per class."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereid.base.contract import SCORES
from nereid.base.task_outputs import Arrays, Comparison, Incomparable, QualitySignals, softmax

# Probabilities in FP16 or INT8 do not sum to exactly 1.
SUM_TOLERANCE = 0.02
# Avoids log(0); smaller than any probability that matters.
TINY = np.float32(1e-30)


@dataclass(frozen=True, slots=True)
class ClassificationOutputs:
    """Models with one score per class; also any model whose first output is numeric.

    Args:
        scores: name of the output.
        class_names: class names by index; () if there are none.
    """

    scores: str = SCORES
    class_names: Sequence[str] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """The output with the scores."""
        return (self.scores,)

    def compare(self, variant: Arrays, shadow: Arrays) -> Comparison:
        """Return the largest difference of a single score, and whether the best classes are equal."""
        old, new = variant[self.scores], shadow[self.scores]
        if old.shape != new.shape:
            raise Incomparable(f"expected scores {list(old.shape)}, got {list(new.shape)}")
        if not (np.isfinite(old).all() and np.isfinite(new).all()):
            raise Incomparable("expected finite scores, got NaN or infinity")
        distance = float(np.abs(old.astype(np.float64) - new).max(initial=0.0))
        return Comparison(distance, np.array_equal(old.argmax(-1), new.argmax(-1)))

    def signals(self, outputs: Arrays) -> QualitySignals | None:
        """Return confidence, entropy and best class; None without scores, or if some are not finite.

        Scores are float32[N, classes] or float32[classes]. Rows that are not probabilities (negative values,
        or a sum other than 1) are treated as logits.
        """
        scores = outputs[self.scores]
        if scores.ndim == 1:
            scores = scores[None]
        if scores.ndim != 2 or scores.shape[1] < 2 or scores.dtype != np.float32 or not len(scores):
            return None
        best = scores.argmax(1)
        sums = scores.sum(1)
        if not np.isfinite(sums).all():
            return None
        if float(scores.min()) < 0 or float(np.abs(sums - 1).max()) > SUM_TOLERANCE:
            scores = softmax(scores)
        entropy = np.einsum("nc,nc->n", scores, np.log(scores + TINY)) / -math.log(scores.shape[1])
        confidence = np.minimum(scores[np.arange(len(best)), best], 1).tolist()
        first = int(best[0])
        label = self.class_names[first] if first < len(self.class_names) else str(first)
        attributes = {"label": label, "confidence": round(confidence[0], 4)}
        return QualitySignals(confidence, np.clip(entropy, 0, 1).tolist(), best.tolist(), (), attributes)


def make_outputs(outputs: Sequence[str], class_names: Sequence[str]) -> ClassificationOutputs:
    """Return the meaning of the first output."""
    return ClassificationOutputs(outputs[0] if outputs else SCORES, class_names)
