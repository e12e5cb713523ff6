"""Embeddings of an added or published network: their length, and their angle to the current version's."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from nereid.base.config.model_config import ModelConfig
from nereid.models.publish.examination import (
    Arrays,
    Examination,
    ExaminationRequest,
    FirstRun,
    NetworkInput,
    OutputChange,
    Outputs,
    Rejected,
    Samples,
)
from nereid.repository.onnx_file import OnnxFile
from nereid.tasks.embed.outputs import cosine_distances

# Half-precision rounding stays below this.
LENGTH_SLACK = 1e-3
# One certain class also gives length 1, but no component of an embedding holds nearly all of it.
LARGEST_COMPONENT = 0.9
# Vectors of different photos with a larger cosine are practically identical.
SAME = 0.999


class VectorExamination(Examination):
    """Vectors that are returned to callers unchanged."""

    @staticmethod
    def fits(request: ExaminationRequest) -> bool:
        """Return whether the network takes images, and its only output is one vector per image."""
        outputs, rows = request.document.get("output", ()), int(request.document.get("max_batch_size", 0))
        return request.preprocess is not None and len(outputs) == 1 and rows > 0

    def first_run(self, file: OnnxFile, samples: Samples, outputs: Outputs, can_batch: bool) -> FirstRun:
        """Return whether the vectors have length 1, and each image's cosines with the others."""
        rows = [_row(sample, arrays) for sample, arrays in zip(samples, outputs, strict=True)]
        cosines = tuple(
            tuple(
                {"image": other.name, "cosine": round(_cosine(row, rows[index]), 4)}
                for index, other in enumerate(samples)
                if other is not sample
            )
            for sample, row in zip(samples, rows, strict=True)
        )
        dims = f"{rows[0].shape[1]} dimensions"
        if _have_length_1(np.concatenate(rows)):
            return FirstRun(can_batch, "none", f"{dims}, length 1", cosines)
        return FirstRun(can_batch, "normalize", dims, cosines)

    def notes(self, config: ModelConfig, samples: Samples, outputs: Outputs) -> Iterator[str]:
        """Yield a note for each pair of images with practically the same vector."""
        rows = [_row(*pair) for pair in zip(samples, outputs, strict=True)]
        for (one, left), (other, right) in combinations(zip(samples, rows, strict=True), 2):
            if one.encoded != other.encoded and (cosine := _cosine(left, right)) > SAME:
                yield (
                    f"{one.name} and {other.name} have nearly the same embedding (cosine {cosine:.4f}); fix: "
                    "check the preprocessing with --preview"
                )

    def changes(self, samples: Samples, before: Outputs, after: Outputs) -> Iterator[OutputChange]:
        """Yield (1 - cosine) / 2 of each image's vectors, as reported by shadows."""
        lowest = 1 - 2 * self._request.limits.tolerance
        for sample, *versions in zip(samples, before, after, strict=True):
            old, new = (_row(sample, arrays) for arrays in versions)
            if old.shape != new.shape:
                text = f"embedding of {sample.name}: expected {old.shape[1]} dimensions, got {new.shape[1]}"
                yield OutputChange(1.0, text)
                continue
            cosine = _cosine(old, new)
            text = (
                f"embedding of {sample.name}: expected a cosine of at least {lowest:.3g} with the current "
                f"version's, got {cosine:.3g}"
            )
            yield OutputChange((1 - cosine) / 2, text)


def are_embeddings(outputs: Outputs) -> bool:
    """Return whether an image network of unknown task returns embeddings, that is vectors of length 1.

    A row of probabilities has length 1 only if one class is certain. Logits and independent probabilities
    have it only by chance, so two images are enough to rule them out.

    Args:
        outputs: the network's outputs by name, for each of at least two images.
    """
    if {len(arrays) for arrays in outputs} != {1}:
        return False
    rows = [array for arrays in outputs for array in arrays.values()]
    if any(row.ndim != 2 or len(row) != 1 or row.dtype.kind != "f" for row in rows):
        return False
    vectors = np.concatenate(rows)
    return _have_length_1(vectors) and float(np.abs(vectors).max()) < LARGEST_COMPONENT


def _have_length_1(rows: np.ndarray) -> bool:
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    return bool((np.abs(lengths - 1) <= LENGTH_SLACK).all())


def _row(sample: NetworkInput, outputs: Arrays) -> np.ndarray:
    """Return an image's vector, float[1, D]."""
    ((name, row),) = outputs.items()
    if row.ndim != 2 or len(row) != 1 or not np.linalg.norm(row):
        got = "zeros" if row.ndim == 2 and len(row) == 1 else f"shape {list(row.shape)}"
        raise Rejected(
            f"output '{name}' on {sample.name}: expected one vector for one image, got {got}; "
            "fix: name another output with --output"
        )
    result: np.ndarray = row
    return result


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return 1 - 2 * float(cosine_distances(one, other)[0])
