"""Networks that take whole images, behind a preprocess model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereid.base.assets import SAMPLES
from nereid.models.publish.intake.adaptation import Choices
from nereid.models.publish.intake.description import Description
from nereid.models.publish.intake.network_facts import NetworkFacts, Noted
from nereid.models.publish.intake.serving_settings import CHANNELS, ServingSettings, preprocessing
from nereid.tasks.detect.layouts import LAYOUTS, NetworkOutput
from nereid.vision.inference.signature import Signature

# Python, NumPy and ONNX Runtime in a process without a network. Source: docs/experiments.md.
PROCESS_BYTES = 45 * 2**20
# Photos of COCO have a longer side of 640 pixels.
USUAL_SIZE = (640, 640)


def returns_one_image(signature: Signature) -> bool:
    """Return whether results have no batch, as those of torchvision's detectors."""
    outputs = [NetworkOutput(each, about.datatype, about.shape) for each, about in signature.outputs.items()]
    ranks = [len(each.shape) for each in signature.inputs.values()]
    return ranks in ([3], [4]) and bool(LAYOUTS["torchvision"].find(outputs))


def _resizes_itself(signature: Signature) -> bool:
    outputs = [NetworkOutput(each, "", ()) for each in signature.outputs]
    return returns_one_image(signature) or bool(LAYOUTS["tensorflow"].find(outputs))


class Images:
    """Whole images, as a preprocess model converts them."""

    unit = "image"
    samples = SAMPLES
    companions: tuple[str, ...] = ()

    def labels(self, facts: NetworkFacts) -> tuple[tuple[str, ...], str]:
        """Return the class names in the file, and their origin."""
        return facts.labels, facts.labels_from

    def with_notes(self, choices: Choices, facts: NetworkFacts) -> Choices:
        """Return the choices with the noted head, and with a size for a network that accepts any."""
        signature, noted = facts.signature, facts.noted
        dims = [dim for each in signature.inputs.values() for dim in each.shape[1:]]
        size = noted.size if -1 in dims and not any(choices.size) else choices.size
        if -1 in dims and not any(size) and _resizes_itself(signature):
            size = USUAL_SIZE
        return replace(choices, size=size, head=choices.head or noted.head)

    def preprocessing(
        self, settings: ServingSettings, noted: Noted, given: Mapping[str, str]
    ) -> tuple[dict[str, str], str]:
        """Return the parameters of the preprocessing, and the origin of those that were not given."""
        return preprocessing(settings, noted, given)

    def repeated(self, path: Path, current: Path, past: Description, image: Mapping[str, Any]) -> Choices:
        """Return the choices for the next version.

        Args:
            path: the file of the next version.
            current: the file of the current one.
            past: its description.
            image: the input in the network's config.
        """
        dims = [int(each) for each in image["dims"]]
        size = (dims[0], dims[1]) if dims[-1] == CHANNELS and dims[0] != CHANNELS else (dims[-2], dims[-1])
        return Choices(size, past.output, past.activation, past.head)

    def process_bytes(self, network_bytes: int) -> int:
        """Return the memory of one process of the pinned model on a CPU."""
        return network_bytes + PROCESS_BYTES
