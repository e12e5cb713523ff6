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
from nereid.tasks.detect.head import Head
from nereid.tasks.detect.layouts import LAYOUTS, Candidates, Rows

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
        if problem := _problem(head, rows, candidates):
            others = (name for name in LAYOUTS if name != head.name and LAYOUTS[name].find(head.outputs))
            fitting = ", ".join(others)
            fix = (
                f"--head with one of {fitting}"
                if fitting
                else "export it with scores and boxes for that head"
            )
            raise Rejected(
                f"{sample.name}: {problem}: the outputs are not those of head {head.name}; fix: {fix}"
            )
        self._check_classes(sample, rows)

    def _check_classes(self, sample: NetworkInput, rows: Rows) -> None:
        """Reject class numbers below the head's first one, or beyond the labels."""
        head, labels = self._detector.head, self._detector.labels
        threshold, first = self._detector.score_threshold, head.layout.first_class
        found = head.layout.decode(rows, head.input_size, threshold)
        numbers = found.classes[found.scores >= threshold] + first
        if len(numbers) and 0 <= numbers.min() < first:
            raise Rejected(
                f"{sample.name}: expected class numbers from {first}, as head {head.name} has, got "
                f"{numbers.min()}; fix: export the network with classes from {first}"
            )
        if labels and (highest := numbers.max(initial=0)) >= first + len(labels):
            raise Rejected(
                f"{sample.name}: expected a label for each class number, got number {highest} and labels for "
                f"{first} to {first + len(labels) - 1}; fix: --labels with a name for each number from "
                f"{first}, the background included"
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


def _problem(head: Head, rows: Rows, candidates: Candidates) -> str:
    """Return why numbers cannot be a detector's scores, or boxes in pixels; empty if they can."""
    scores = np.append(candidates.scores, head.probabilities(rows))
    lowest, highest = scores.min(initial=0), scores.max(initial=0)
    if lowest < -SCORE_SLACK or highest > 1 + SCORE_SLACK:
        return f"expected scores from 0 to 1, got {highest if highest > 1 + SCORE_SLACK else lowest:.4g}"
    sides = candidates.boxes[:, 2:] - candidates.boxes[:, :2]
    if not len(sides):
        return ""
    if sides.max() < 1:
        return f"expected boxes in pixels, got {len(sides)} smaller than one"
    height, width = head.input_size
    if (np.median(sides, axis=0) > MAX_SIDE * np.array((width, height))).any():
        return f"expected boxes within {width} x {height} pixels, got a side of {sides.max():.0f}"
    return ""
