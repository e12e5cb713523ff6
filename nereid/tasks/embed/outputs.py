"""Embeddings: one vector per image, compared by the angle between two of them."""

from collections.abc import Sequence

import numpy as np

from nereid.base.contract import EMBEDDING
from nereid.base.task_outputs import Arrays, Comparison, Incomparable, QualitySignals

# For a nearest-neighbour search, vectors with a cosine of at least 0.99 point in the same direction.
EQUAL_DISTANCE = 0.005
# Avoids log(0); smaller than any fraction that matters.
TINY = 1e-30


class EmbeddingOutputs:
    """Models that compute embeddings."""

    outputs = (EMBEDDING,)

    def compare(self, variant: Arrays, shadow: Arrays) -> Comparison:
        """Compare by the cosine of the angle between two vectors; return the largest distance of all images.

        The distance is (1 - cosine) / 2: 0 for the same direction, 0.5 for a right angle and 1 for opposite
        directions. Vector length has no influence. Responses are equal up to a distance of `EQUAL_DISTANCE`.
        """
        old, new = variant[EMBEDDING], shadow[EMBEDDING]
        if old.shape != new.shape:
            raise Incomparable(f"expected embeddings {list(old.shape)}, got {list(new.shape)}")
        distances = cosine_distances(old, new)
        if not np.isfinite(distances).all():
            raise Incomparable("expected finite embeddings other than zero, got NaN, infinity or only zeros")
        distance = float(distances.max(initial=0.0))
        return Comparison(distance, distance <= EQUAL_DISTANCE)

    def signals(self, outputs: Arrays) -> QualitySignals | None:
        """Return the fraction of components that carries each vector; None if a vector has no direction.

        An embedding has neither a confidence nor a best class, and its length is usually 1. What a single
        vector does show is how its length is distributed: the squared components, divided by their sum, are
        fractions with an entropy H. exp(H) / D is 1 / D if one component has all, and 1 if all are equal;
        unlike H, it uses the full range of the metric.
        """
        vectors = outputs[EMBEDDING].astype(np.float64)
        if vectors.ndim != 2 or vectors.shape[1] < 2 or not len(vectors):
            return None
        shares = _units(vectors) ** 2
        if not np.isfinite(shares).all():
            return None
        entropies = -(shares * np.log(shares + TINY)).sum(1)
        parts = np.minimum(np.exp(entropies) / shares.shape[1], 1).tolist()
        return QualitySignals(entropy=parts, attributes={"dims": shares.shape[1]})


def cosine_distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return (1 - cosine) / 2 for the rows of two arrays, float64[N]; NaN for rows of zeros or with NaN.

    Args:
        first, second: vectors of any length, float[N, D].
    """
    old, new = first.astype(np.float64), second.astype(np.float64)
    cosines = (_units(old) * _units(new)).sum(-1)
    result: np.ndarray = (1 - np.clip(cosines, -1, 1)) / 2
    return result


def _units(rows: np.ndarray) -> np.ndarray:
    """Return float64 rows divided by their lengths; NaN for rows of zeros, or with NaN or infinity."""
    with np.errstate(invalid="ignore", divide="ignore"):
        # Divide by the largest component first, because the square of a large number overflows.
        scaled = rows / np.abs(rows).max(-1, keepdims=True)
        result: np.ndarray = scaled / np.linalg.norm(scaled, axis=-1, keepdims=True)
    return result


def make_outputs(outputs: Sequence[str], class_names: Sequence[str]) -> EmbeddingOutputs:
    """Return the meaning of the output `embedding`."""
    return EmbeddingOutputs()
