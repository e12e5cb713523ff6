"""Masks of a network that is added or published, compared by their pixels."""

from collections.abc import Iterator

import numpy as np

from nereid.base.config.model_config import ModelConfig
from nereid.models.publish.examination import (
    Examination,
    ExaminationRequest,
    FirstRun,
    OutputChange,
    Outputs,
    Samples,
)
from nereid.repository.onnx_file import OnnxFile


class MaskExamination(Examination):
    """Masks that go to the callers as they are."""

    @staticmethod
    def fits(request: ExaminationRequest) -> bool:
        """Return whether the network gets images."""
        return request.preprocess is not None

    def first_run(self, file: OnnxFile, samples: Samples, outputs: Outputs, can_batch: bool) -> FirstRun:
        """Return the classes in each image."""
        masks = (next(iter(arrays.values())) for arrays in outputs)
        return FirstRun(can_batch, results=tuple(tuple(map(int, np.unique(mask))) for mask in masks))

    def notes(self, config: ModelConfig, samples: Samples, outputs: Outputs) -> Iterator[str]:
        """Yield nothing."""
        return iter(())

    def changes(self, samples: Samples, before: Outputs, after: Outputs) -> Iterator[OutputChange]:
        """Yield the part of the pixels whose classes differ."""
        for sample, old, new in zip(samples, before, after, strict=True):
            for name, mask in old.items():
                part = float((mask != new[name]).mean())
                yield OutputChange(
                    part, f"mask of {sample.name}: {part:.0%} of the pixels have another class"
                )
