"""Masks of a network that is added or published, compared by their pixels."""

from collections.abc import Iterator, Sequence

import numpy as np

from nereid.base.config.model_config import ModelConfig
from nereid.models.publish.examination import (
    Arrays,
    ExaminationRequest,
    FirstRun,
    NetworkInput,
    OutputChange,
    golden_samples,
    image_pair,
    is_close,
)
from nereid.repository.onnx_file import OnnxFile


class MaskExamination:
    """Masks that go to the callers as they are."""

    pair, is_same = staticmethod(image_pair), staticmethod(is_close)

    def __init__(self, request: ExaminationRequest) -> None:
        self._request = request

    @staticmethod
    def fits(request: ExaminationRequest) -> bool:
        """Return whether the network gets images."""
        return request.preprocess is not None

    def samples(self, config: ModelConfig) -> list[NetworkInput]:
        """Return the golden images."""
        return golden_samples(self._request, config)

    def first_run(
        self, file: OnnxFile, samples: Sequence[NetworkInput], outputs: Sequence[Arrays], can_batch: bool
    ) -> FirstRun:
        """Return the classes in each image."""
        masks = (next(iter(arrays.values())) for arrays in outputs)
        return FirstRun(can_batch, results=tuple(tuple(map(int, np.unique(mask))) for mask in masks))

    def notes(
        self, config: ModelConfig, samples: Sequence[NetworkInput], outputs: Sequence[Arrays]
    ) -> Iterator[str]:
        """Yield nothing."""
        return iter(())

    def changes(
        self, samples: Sequence[NetworkInput], before: Sequence[Arrays], after: Sequence[Arrays]
    ) -> Iterator[OutputChange]:
        """Yield the part of the pixels whose classes differ."""
        for sample, old, new in zip(samples, before, after, strict=True):
            for name, mask in old.items():
                part = float((mask != new[name]).mean())
                yield OutputChange(
                    part, f"mask of {sample.name}: {part:.0%} of the pixels have another class"
                )
