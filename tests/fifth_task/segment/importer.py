"""Networks that return one class per pixel, UINT8 [N, H, W]."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nereid.base.config.model_config import ServedTensor
from nereid.base.errors import WrongUsage
from nereid.models.publish.configs import Addition, ModelNames
from nereid.models.publish.examination import FirstRun
from nereid.models.publish.importing import adaptation
from nereid.models.publish.importing.adaptation import Adapted, Names, NetworkChoices
from nereid.models.publish.importing.graph_edits import Activation
from nereid.models.publish.importing.model_importer import ModelImporter, ScreenRows
from nereid.models.publish.importing.network_facts import NetworkFacts, Size
from nereid.models.publish.importing.serving_settings import ServingSettings, read_input
from nereid.repository import onnx_file
from nereid.vision.inference.signature import Signature


class Segmentation(ModelImporter):
    """Networks whose output is a mask."""

    name, rank, results = "segment", 50, "masks"

    def recognises(self, facts: NetworkFacts, size: Size) -> bool:
        """Return whether the output is UINT8 [N, H, W]."""
        (output, *others) = facts.signature.outputs.values()
        return not others and output.datatype == "TYPE_UINT8" and len(output.shape) == 3

    def adapt(
        self, path: Path, choices: NetworkChoices, activation: Activation = "none", names: Names = None
    ) -> Adapted:
        """Leave the file as it is."""
        signature = onnx_file.read(path).signature
        present = [*signature.inputs, *signature.outputs]
        changes = adaptation.rename_file(path, present, names) if names else []
        return Adapted(tuple((names or present)[1:]), changes)

    def settings(
        self, facts: NetworkFacts, signature: Signature, outputs: Sequence[str], choices: NetworkChoices
    ) -> ServingSettings:
        """Read input and mask."""
        mask = signature.outputs[outputs[0]]
        if mask.datatype != "TYPE_UINT8" or len(mask.shape) != 3:
            raise WrongUsage(f"output '{outputs[0]}': expected a mask")
        image, is_channels_last = read_input(signature.inputs, choices.size)
        return ServingSettings(
            image, (ServedTensor(outputs[0], mask.datatype, mask.shape[1:]),), is_channels_last
        )

    def models(self, names: ModelNames, settings: ServingSettings, choices: NetworkChoices) -> Addition:
        """Return an ensemble: the mask is that of the network."""
        return Addition(names, settings, "mask")

    def rows(self, settings: ServingSettings, first_run: FirstRun, activation: Activation) -> ScreenRows:
        """Return the size of the mask."""
        return [("mask", " x ".join(map(str, settings.outputs[0].dims)))]

    def shown(self, results: Sequence[Any]) -> str:
        """Return the classes of an image."""
        return ", ".join(f"class {index}" for index in results)
