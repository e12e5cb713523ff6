"""Embeddings: one output with a vector per image, normalised to length 1."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nereid.base.contract import EMBEDDING
from nereid.base.errors import WrongUsage
from nereid.models.publish.configs import Addition, ModelNames
from nereid.models.publish.examination import FirstRun
from nereid.models.publish.importing import adaptation
from nereid.models.publish.importing.adaptation import Adapted, Names, NetworkChoices
from nereid.models.publish.importing.graph_edits import Activation
from nereid.models.publish.importing.model_importer import ModelImporter, ScreenRows
from nereid.models.publish.importing.network_facts import NetworkFacts, Size
from nereid.models.publish.importing.serving_settings import ServingSettings, read_rows
from nereid.vision.inference.signature import Signature


class EmbedderImporter(ModelImporter):
    """Networks that return FP32 [N, D]."""

    name, rank, results, labels_are = "embed", 5, "cosines", ""

    def labels(self, facts: NetworkFacts) -> tuple[tuple[str, ...], str]:
        """Return none; names in the file belong to a layer that was removed."""
        return (), ""

    def check_labels(self, labels: Sequence[str], origin: str) -> None:
        """Reject labels."""
        if labels:
            raise WrongUsage("an embedding has no classes; fix: leave out --labels")

    def recognises(self, facts: NetworkFacts, size: Size) -> bool:
        """Return whether the metadata names the task; after a first run, `claims` may also decide."""
        return facts.task == self.name

    def adapt(
        self, path: Path, choices: NetworkChoices, activation: Activation = "none", names: Names = None
    ) -> Adapted:
        """Change a file to take [N,3,H,W] and return FP32 [N,D]."""
        return adaptation.adapt_file(path, choices.output, activation, names)

    def settings(
        self, facts: NetworkFacts, signature: Signature, outputs: Sequence[str], choices: NetworkChoices
    ) -> ServingSettings:
        """Read the input and the vectors."""
        return read_rows(facts, signature, outputs[0], choices.size, ("embeddings", "dimensions"), 2)

    def models(self, names: ModelNames, settings: ServingSettings, choices: NetworkChoices) -> Addition:
        """Return an ensemble that returns the network's vectors."""
        return Addition(names, settings, EMBEDDING)

    def activation(self, choices: NetworkChoices, first_run: FirstRun) -> Activation:
        """Return the activation that normalises the vectors to length 1, unless they already are."""
        if choices.activation not in ("auto", "none"):
            raise WrongUsage(
                f"cannot append a {choices.activation}: an embedding has no classes; "
                "fix: leave out --activation"
            )
        return "none" if "none" in (choices.activation, first_run.activation) else "normalize"

    def rows(self, settings: ServingSettings, first_run: FirstRun, activation: Activation) -> ScreenRows:
        """Return the number of dimensions and the vector length."""
        length = ", length 1" if activation == "normalize" else ""
        return [("embedding", first_run.meaning + length)]

    def shown(self, results: Sequence[Any]) -> str:
        """Return the cosines of an image's vector with the others."""
        cosines = (f"cosine {result['cosine']:.2f} with {result['image']}" for result in results)
        return ", ".join(cosines) or "no other image to compare with"
