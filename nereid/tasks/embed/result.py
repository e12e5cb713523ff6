"""Embeddings of images, read from tritonclient's results."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nereid.base.contract import EMBEDDING
from nereid.client.result_kind import ResultKind, Timings


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The embedding of one image, and the model that computed it.

    Attributes:
        vector: float32[D]; its length is 1 if the model was added by `nereid add`.
        model, version, variant, reason, request_id, timings, image: as for `Prediction`.

    Example:
        The cosine of the angle between two embeddings of length 1 is their dot product:

        >>> float(one.vector @ other.vector)
        0.83
    """

    vector: np.ndarray
    model: str
    version: str
    variant: str
    reason: str
    request_id: str
    timings: Timings
    image: str = ""


def _count(result: Any) -> int:
    vectors = result.as_numpy(EMBEDDING)
    return len(vectors) if vectors.ndim == 2 and vectors.dtype == np.float32 else -1


def _values(result: Any) -> list[tuple[np.ndarray]]:
    return [(vector,) for vector in result.as_numpy(EMBEDDING)]


EMBEDDINGS = ResultKind("embed", "embed", (EMBEDDING,), (), _count, _values, Embedding)
