"""Recogniser outputs, compared as the text that callers receive."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nereid.base.assets import PARCEL_LABEL
from nereid.base.config.model_config import ModelConfig, read_pbtxt
from nereid.base.errors import OperationFailed, ServingError
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
from nereid.models.publish.importing.graph_edits import Activation
from nereid.repository.onnx_file import OnnxFile, network_path
from nereid.tasks.read.characters import Characters
from nereid.tasks.read.outputs import error_rate
from nereid.tasks.read.reading_settings import BACKEND, ReadingSettings
from nereid.vision.inference.session import Session

# Longer pages are examined only in part, so that an examination takes seconds.
MAX_LINES = 50
ROUNDING = 0.01
# Maximum character error rate between lines run alone and in a batch. A network that mixes its rows changes
# most characters. A dynamically quantised network computes its scale over the batch and changes few. Source:
# 0 to 0.025 for 35 pairs of lines, the default recogniser as INT8, measured 2026-11-26.
MAX_BATCH_ERRORS = 0.1


class LineExamination(Examination):
    """Outputs that a reader converts to text."""

    @staticmethod
    def fits(request: ExaminationRequest) -> bool:
        """Return whether the pinned model reads text with this network."""
        pinned = request.pinned
        return pinned is not None and read_pbtxt(pinned / "config.pbtxt").get("backend") == BACKEND

    def __init__(self, request: ExaminationRequest) -> None:
        """Open the reader; raises InvalidConfig if a file has no characters."""
        assert request.pinned is not None
        super().__init__(request)
        self._reader = ModelConfig.from_file(request.pinned, 1)
        self._settings = self._reader.settings(ReadingSettings)
        self._new = Characters.from_file(network_path(request.version_folder, request.document))
        self._old = self._new
        if request.current:
            self._old = Characters.from_file(network_path(request.current, request.document))

    def samples(self, config: ModelConfig) -> list[NetworkInput]:
        """Return the lines of the golden images in reading order, each cut out as the reader does it."""
        cut, name, inputs = self._cutter(), config.inputs[0].name, list[NetworkInput]()
        for path in self._images:
            try:
                lines = cut(path.read_bytes())
            except ServingError as error:
                raise Rejected(f"golden image '{path}': {error}") from None
            for number, line in enumerate(lines[:MAX_LINES], 1):
                inputs.append(NetworkInput(f"line {number} of {path.name}", {name: line}, image=str(path)))
        if not inputs:
            names = ", ".join(f"'{path}'" for path in self._images)
            raise Rejected(f"golden images {names}: expected lines of text, found none; fix: --images")
        return inputs

    def pair(self, samples: Samples) -> tuple[NetworkInput, NetworkInput]:
        """Return the two widest lines at the same width; if there is only one, the second is half of it."""
        (name,) = samples[0].inputs
        first, *others = sorted(samples, key=lambda sample: -sample.inputs[name].shape[-1])
        wide = first.inputs[name]
        second = others[0].inputs[name] if others else wide[..., : wide.shape[-1] // 2]
        padded = np.zeros_like(wide)
        padded[..., : second.shape[-1]] = second
        return first, replace(first, inputs={name: padded})

    def is_same(self, alone: Outputs, together: Outputs) -> bool:
        """Return whether the lines have the same text, except for a few characters."""
        expected, got = (
            "\n".join(self._decoded(self._new, "a batch of lines", row)[0] for row in rows)
            for rows in (alone, together)
        )
        return error_rate(expected, got) <= MAX_BATCH_ERRORS

    def first_run(self, file: OnnxFile, samples: Samples, outputs: Outputs, can_batch: bool) -> FirstRun:
        """Return the lines of text, and whether their probabilities need a softmax."""
        texts = self._texts(self._new, samples, outputs)
        return FirstRun(can_batch, self._activation(outputs), results=tuple(map(tuple, texts.values())))

    def notes(self, config: ModelConfig, samples: Samples, outputs: Outputs) -> Iterator[str]:
        """Yield a note for an image without text, because such an image tests nothing."""
        for image, lines in self._texts(self._new, samples, outputs).items():
            if not lines:
                yield f"no text is read in {Path(image).name}; fix: --images with text as you read it"

    def changes(self, samples: Samples, before: Outputs, after: Outputs) -> Iterator[OutputChange]:
        """Yield the character error rate of each image."""
        old, new = self._texts(self._old, samples, before), self._texts(self._new, samples, after)
        for image, lines in old.items():
            distance = error_rate("\n".join(lines), "\n".join(new[image]))
            yield OutputChange(distance, self._describe(image, distance, lines, new[image]))

    def _describe(self, image: str, distance: float, before: Sequence[str], after: Sequence[str]) -> str:
        lost = next((line for line in before if line not in after), "")
        new = next((line for line in after if line not in before), "")
        return (
            f"text of {Path(image).name}: expected at most {self._request.limits.tolerance:.3g} of the "
            f"characters to differ, got {distance:.3g}: '{lost}' before, '{new}' now"
        )

    @property
    def _images(self) -> list[Path]:
        return [*dict.fromkeys(self._request.limits.images or (PARCEL_LABEL,))]

    def _cutter(self) -> Callable[[bytes], list[np.ndarray]]:
        """Return a function that cuts the lines out of an image, within the reader's limits."""
        try:  # here, because OpenCV is installed only where text is read
            from nereid.tasks.read.line_search import cut_lines
            from nereid.vision.imaging.decode import ImageLimits
        except ImportError as error:
            raise OperationFailed(f"{error}; fix: pip install 'nereid-serving[text]'") from None
        settings = self._settings
        limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels, settings.max_image_side_px)
        parts = (settings.parts[part] for part in ("detect", "direction"))
        detect, direction = (_opened(self._reader.sibling(*part)) for part in parts)
        return lambda encoded: cut_lines(encoded, detect, direction, limits)

    def _texts(self, characters: Characters, samples: Samples, outputs: Outputs) -> dict[str, list[str]]:
        """Return the lines that the reader would return for each image; empty for an image without lines."""
        lines: dict[str, list[str]] = {str(path): [] for path in self._images}
        for sample, arrays in zip(samples, outputs, strict=True):
            text, confidence = self._decoded(characters, sample.name, arrays)
            if text.strip() and confidence >= self._settings.min_confidence:
                lines[sample.image].append(text)
        return lines

    def _decoded(self, characters: Characters, name: str, outputs: Arrays) -> tuple[str, float]:
        index, probability = self._best(outputs)
        if len(index) != 1:
            raise Rejected(
                f"{name}: expected [1,steps] for one line, got [{','.join(map(str, index.shape))}], "
                "probably steps first; fix: export the network with [N,steps,characters], or with one name "
                "for the batch of its input and output"
            )
        if index.size and not 0 <= index.min() <= index.max() < len(characters):
            raise Rejected(
                f"{name}: expected classes below {len(characters):,}, the number of characters with "
                f"blank and space, got {index.min():,} to {index.max():,}; fix: correct the characters"
            )
        ((text, confidence, _),) = characters.decode(index, probability)
        return text, confidence

    def _best(self, outputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
        index, probability, *_ = (outputs[output["name"]] for output in self._request.document["output"])
        return index, probability

    def _activation(self, outputs: Outputs) -> Activation:
        """Return softmax if the best values of the steps are not probabilities."""
        values = np.concatenate([self._best(output)[1].ravel() for output in outputs])
        return "none" if values.min() > 0 and values.max() <= 1 + ROUNDING else "softmax"


def _opened(config: ModelConfig) -> Callable[[np.ndarray], Any]:
    """Return one of the reader's networks as a function; errors as for `Session.from_config`."""
    session, name = Session.from_config(config, instances=1), config.inputs[0].name
    outputs = [output.name for output in config.outputs]
    return lambda tensor: session.run({name: tensor}, outputs)[0]
