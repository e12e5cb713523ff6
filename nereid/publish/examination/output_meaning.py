"""The meaning of a network's outputs: the reading of a first run, and the comparison of two versions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from nereid.config.model_config import ModelConfig
from nereid.publish.examination.examine import Survey
from nereid.publish.examination.samples import Arrays, Sample
from nereid.repository.onnx_file import OnnxFile

# Largest difference of a row alone and in a batch, relative to the largest score: kernels may differ.
BATCH_TOLERANCE = 0.02


class Change(NamedTuple):
    """A difference from the current version, 0 for none, and its description."""

    difference: float
    text: str


class Answers(Protocol):
    """The meaning of a network's outputs."""

    def samples(self, config: ModelConfig) -> list[Sample]:
        """Return inputs for the network: the golden images, or random ones.

        Raises:
            Rejected: the network does not take them, or an image cannot be used.
            InvalidConfig: a model around the network cannot be used.
        """

    def pair(self, samples: Sequence[Sample]) -> tuple[Sample, Sample]:
        """Return two different rows of one shape, for a batch."""

    def is_same(self, alone: Sequence[Arrays], together: Sequence[Arrays]) -> bool:
        """Return whether rows of a batch have the outputs that they have alone.

        Args:
            alone: outputs of each row in a batch of its own.
            together: those in one batch, with a first dim of 1, too.

        Raises:
            Rejected: the outputs cannot be read.
        """

    def first_run(
        self, file: OnnxFile, samples: Sequence[Sample], outputs: Sequence[Arrays], can_batch: bool
    ) -> Survey:
        """Return the results of a first run.

        Args:
            file: the network.
            samples: the inputs.
            outputs: those of each sample.
            can_batch: whether a batch gets the same outputs as single rows.

        Raises:
            Rejected: the outputs cannot be read.
        """

    def notes(
        self, config: ModelConfig, samples: Sequence[Sample], outputs: Sequence[Arrays]
    ) -> Iterator[str]:
        """Yield notes about the outputs of each sample."""

    def changes(
        self, samples: Sequence[Sample], before: Sequence[Arrays], after: Sequence[Arrays]
    ) -> Iterator[Change]:
        """Yield the differences of the samples' outputs from those of the current version."""


def image_pair(samples: Sequence[Sample]) -> tuple[Sample, Sample]:
    """Return the first and the last sample if they have one shape, or the first one and its mirror image."""
    first, last = samples[0], samples[-1]
    (name,) = first.inputs
    if first is not last and first.inputs[name].shape == last.inputs[name].shape:
        return first, last
    mirrored = np.ascontiguousarray(first.inputs[name][..., ::-1])
    return first, replace(first, inputs={name: mirrored})


def is_close(alone: Sequence[Arrays], together: Sequence[Arrays]) -> bool:
    """Return whether all numbers are equal, apart from the rounding of other kernels."""
    return all(
        _is_close([each[name] for each in alone], [each[name] for each in together]) for name in alone[0]
    )


def _is_close(alone: Sequence[np.ndarray], together: Sequence[np.ndarray]) -> bool:
    if len({each.shape for each in (*alone, *together)}) != 1:
        return False
    expected, found = np.concatenate(alone), np.concatenate(together)
    if not expected.size:
        return True
    limit = BATCH_TOLERANCE * (np.abs(expected).max() or 1.0)
    return bool(np.abs(found - expected).max() <= limit)
