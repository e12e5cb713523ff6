"""Classification: one output with a score per class."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereid.base.contract import SCORES
from nereid.base.errors import WrongUsage
from nereid.models.publish.configs import Addition, ModelNames
from nereid.models.publish.examination import FirstRun
from nereid.models.publish.importing import adaptation
from nereid.models.publish.importing.adaptation import Adapted, Names, NetworkChoices
from nereid.models.publish.importing.graph_edits import Activation
from nereid.models.publish.importing.model_importer import ModelImporter, ScreenRows
from nereid.models.publish.importing.network_facts import (
    ULTRALYTICS,
    ExporterSettings,
    NetworkFacts,
    Size,
    ultralytics_size,
)
from nereid.models.publish.importing.serving_settings import ServingSettings, read_rows
from nereid.tasks.classify.examination import NUMBER
from nereid.vision.inference.signature import Signature


class ClassifierImporter(ModelImporter):
    """Networks that return FP32 [N, classes]; the default task for files that no other task recognises."""

    name, rank, results = "classify", 10, "top_classes"

    @staticmethod
    def exporter_settings(metadata: Mapping[str, str]) -> ExporterSettings | None:
        """Return resizing of the shorter side and a centre crop.

        Source: ultralytics, data/augment.py, classify_transforms; mean 0 and std 1 of pixels / 255.
        """
        size = ultralytics_size(metadata)
        if metadata.get("task") != "classify" or not any(size):
            return None
        return ExporterSettings(
            {"resize_shorter_px": str(max(size)), "scale": str(1 / 255)}, ULTRALYTICS, size
        )

    def recognises(self, facts: NetworkFacts, size: Size) -> bool:
        """Return whether the metadata names the task, or the only output has two dims."""
        shapes = [output.shape for output in facts.signature.outputs.values()]
        return facts.task == self.name or (len(shapes) == 1 and len(shapes[0]) == 2)

    def adapt(
        self, path: Path, choices: NetworkChoices, activation: Activation = "none", names: Names = None
    ) -> Adapted:
        """Change a file to take [N,3,H,W] and return FP32 [N,classes]."""
        return adaptation.adapt_file(path, choices.output, activation, names)

    def settings(
        self, facts: NetworkFacts, signature: Signature, outputs: Sequence[str], choices: NetworkChoices
    ) -> ServingSettings:
        """Read the input and the scores, one number per class."""
        fix = ", or --task detect if it returns boxes"
        settings = read_rows(facts, signature, outputs[0], choices.size, ("scores", "classes"), 1, fix)
        return replace(settings, classes=settings.outputs[0].dims[0])

    def models(self, names: ModelNames, settings: ServingSettings, choices: NetworkChoices) -> Addition:
        """Return an ensemble that returns the network's scores."""
        return Addition(names, settings, SCORES)

    def activation(self, choices: NetworkChoices, first_run: FirstRun) -> Activation:
        """Return the activation that turns the scores into probabilities."""
        rule = choices.activation
        if rule == "auto" and first_run.meaning == NUMBER:
            raise WrongUsage(
                "the network returns one number, which may be a logit or a value such as an age; "
                "fix: --activation sigmoid for the probability of a class, or --activation none for a value"
            )
        if rule not in ("auto", "none") and first_run.activation == "none":
            raise WrongUsage(
                f"cannot append a {rule}: the scores are probabilities already; fix: leave out --activation"
            )
        return first_run.activation if rule == "auto" else rule

    def rows(self, settings: ServingSettings, first_run: FirstRun, activation: Activation) -> ScreenRows:
        """Return the number of classes and the kind of the scores; logits are not probabilities."""
        is_raw = activation == "none" and first_run.activation == "softmax"
        meaning = "values as the network returns them" if is_raw else first_run.meaning
        return [("scores", f"{settings.classes} classes, {meaning}")]

    def shown(self, results: Sequence[Any]) -> str:
        """Return the top classes of an image."""
        return ", ".join(top["label"] for top in results)
