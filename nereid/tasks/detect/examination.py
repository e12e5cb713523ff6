"""Detector outputs, compared as the objects that callers receive."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import ServingError
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
from nereid.tasks.detect.detector import ObjectFinder, Objects, match_objects

SCORE_SLACK = 0.01  # of half precision
# A typical box is at most this many times the size of the network's input.
MAX_SIDE = 4
# Number of objects that a first run shows per image.
SHOWN = 10
# An object that falls below the threshold is searched for down to this fraction of it: a score that changes
# from 0.26 to 0.24 is a small difference.
SEARCHED = 0.5


class ObjectExamination(Examination):
    """Outputs that a `boxes` model converts to objects."""

    @staticmethod
    def fits(request: ExaminationRequest) -> bool:
        """Return whether the network is followed by a `boxes` model."""
        return request.after is not None

    def __init__(self, request: ExaminationRequest) -> None:
        """Read the `boxes` model; raises InvalidConfig if it does not match the network."""
        assert request.after is not None
        super().__init__(request)
        self._detector = ObjectFinder.from_config(ModelConfig.from_file(request.after, request.after_version))
        threshold = self._detector.score_threshold
        self._lenient = replace(self._detector, score_threshold=threshold * SEARCHED)

    def first_run(self, file: OnnxFile, samples: Samples, outputs: Outputs, can_batch: bool) -> FirstRun:
        """Return the objects in each image."""
        for case in zip(samples, outputs, strict=True):
            self._check_meaning(*case)
        objects = (self._find(self._detector, *pair) for pair in zip(samples, outputs, strict=True))
        return FirstRun(can_batch, results=tuple(map(self._named, objects)))

    def notes(self, config: ModelConfig, samples: Samples, outputs: Outputs) -> Iterator[str]:
        """Yield a note if no object is found, because such an image tests nothing."""
        for sample, arrays in zip(samples, outputs, strict=True):
            if not len(self._find(self._detector, sample, arrays).scores):
                yield f"no object is found in {sample.name}; fix: --images with photos of your objects"

    def changes(self, samples: Samples, before: Outputs, after: Outputs) -> Iterator[OutputChange]:
        """Yield each object's difference: in score or, if larger, 1 - IoU of its box."""
        for case in zip(samples, before, after, strict=True):
            yield from self._changes(*case)

    def _changes(self, sample: NetworkInput, before: Arrays, after: Arrays) -> Iterator[OutputChange]:
        old, new = (self._find(self._lenient, sample, arrays) for arrays in (before, after))
        for pair in match_objects(old, new):
            scores = [
                side.scores[at] for side, at in zip((old, new), pair.indices, strict=True) if at is not None
            ]
            if max(scores) >= self._detector.score_threshold:
                was, now = (self._text(side, at) for side, at in zip((old, new), pair.indices, strict=True))
                yield OutputChange(pair.difference, f"object in {sample.name}: expected {was}, got {now}")

    def _check_meaning(self, sample: NetworkInput, outputs: Arrays) -> None:
        """Reject numbers that cannot be a detector's scores, or boxes in pixels."""
        rows, head = self._detector.by_role(outputs), self._detector.head
        try:
            candidates = head.candidates(rows, self._detector.score_threshold)
        except ServingError as error:
            raise Rejected(f"{sample.name}: {error}") from None
        fix = f"the outputs are not those of head {head.name}; fix: --head with another one"
        if (highest := candidates.scores.max(initial=0)) > 1 + SCORE_SLACK:
            raise Rejected(f"{sample.name}: expected scores up to 1, got {highest:.4g}: {fix}")
        sides = candidates.boxes[:, 2:] - candidates.boxes[:, :2]
        if len(sides) and sides.max() < 1:
            raise Rejected(
                f"{sample.name}: expected boxes in pixels, got {len(sides)} smaller than one: {fix}"
            )
        size_wh = head.input_size.width_px, head.input_size.height_px
        if len(sides) and (np.median(sides, axis=0) > MAX_SIDE * np.array(size_wh)).any():
            raise Rejected(
                f"{sample.name}: expected boxes within {size_wh[0]} x {size_wh[1]} pixels, got a side of "
                f"{sides.max():.0f}: {fix}"
            )

    def _find(self, detector: ObjectFinder, sample: NetworkInput, outputs: Arrays) -> Objects:
        try:
            size_wh = detector.upright_size(sample.encoded)
            return detector.find(size_wh, detector.by_role(outputs))
        except ServingError as error:
            raise Rejected(f"{sample.name}: {error}") from None

    def _named(self, found: Objects) -> tuple[dict[str, Any], ...]:
        rows = zip(found.classes[:SHOWN], found.scores[:SHOWN], found.boxes[:SHOWN], strict=True)
        return tuple(
            {"label": self._detector.label(int(index)), "score": float(score), "box": [*map(float, box)]}
            for index, score, box in rows
        )

    def _text(self, found: Objects, at: int | None) -> str:
        if at is None:
            return "none"
        sides = ", ".join(f"{side:.0f}" for side in found.boxes[at])
        return f"'{self._detector.label(int(found.classes[at]))}' {found.scores[at]:.2f} at {sides}"
