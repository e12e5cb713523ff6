"""Networks that take whole images, behind a preprocess model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereid.assets import SAMPLES
from nereid.publish.intake.description import Description
from nereid.publish.intake.form import CHANNELS, Form, Preprocessing, preprocessing
from nereid.publish.intake.metadata import Metadata
from nereid.publish.intake.tasks.task import Choices

# Python, NumPy and ONNX Runtime in a process without a network. Source: docs/experiments.md.
PROCESS_BYTES = 45 * 2**20


class Images:
    """Whole images, as a preprocess model converts them."""

    unit = "image"
    samples = SAMPLES
    companions: tuple[str, ...] = ()

    def labels(self, meta: Metadata) -> tuple[tuple[str, ...], str]:
        """Return the class names."""
        return meta.labels, meta.labels_from

    def preprocessing(self, form: Form, known: Mapping[str, str], given: Mapping[str, str]) -> Preprocessing:
        """Return the given parameters, those of the file, and those that the form determines."""
        return preprocessing(form, known, given)

    def repeated(self, path: Path, current: Path, past: Description, image: Mapping[str, Any]) -> Choices:
        """Return the choices of the current version."""
        sides = {int(each) for each in image["dims"] if int(each) != CHANNELS}
        size_px = sides.pop() if len(sides) == 1 else 0  # a network of any size was added for a square
        return Choices(size_px, past.output, past.activation, past.head)

    def process_bytes(self, network_bytes: int) -> int:
        """Return the memory of the network and of Python."""
        return network_bytes + PROCESS_BYTES
