"""Reading: a recogniser of text lines behind a model of the `text_reader` backend."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nereid.backends.routing.assignment import parse_route
from nereid.base.assets import PARCEL_LABEL, TEXT_REPOSITORY, copy_models
from nereid.base.config.model_config import ModelConfig, ServedTensor, read_pbtxt
from nereid.base.errors import InvalidConfig, WrongUsage
from nereid.models.publish.configs import Addition, ModelNames
from nereid.models.publish.examination import FirstRun
from nereid.models.publish.importing.adaptation import Adapted, Names, NetworkChoices
from nereid.models.publish.importing.graph_edits import Activation
from nereid.models.publish.importing.model_importer import ModelImporter
from nereid.models.publish.importing.network_facts import ExporterSettings, NetworkFacts, Size
from nereid.models.publish.importing.serving_settings import ServingSettings
from nereid.models.publish.staged_version import Description
from nereid.repository import onnx_file, pbtxt
from nereid.repository.check import Profile, verdicts
from nereid.repository.repository_index import config_files, served_versions
from nereid.tasks.read import READER_BYTES, dictionary, recogniser
from nereid.tasks.read.characters import Characters
from nereid.tasks.read.fields.specification import read_specification
from nereid.tasks.read.reading_settings import (
    TENSORS,
    ReadingSettings,
    fields_path,
    own_problems,
    tensor_problems,
)
from nereid.vision.inference import network_file
from nereid.vision.inference.signature import Signature


def _reader_problems(profile: Profile, name: str) -> Iterator[str]:
    """Yield a text reader's problems that prevent a load, and its differences from the plain config.

    Raises:
        InvalidConfig: a parameter is invalid, or a network is missing.
    """
    config = profile.config(name, 1)
    settings = config.settings(ReadingSettings)
    for part, (model, version) in settings.parts.items():
        config.sibling(model, version)
        if model not in profile.documents:  # reported by the check of the model itself
            return
        network = profile.config(model, version)
        if not settings.is_in_process and version not in profile.versions(model):
            yield f"version {version} of '{model}' is not served, and the reader sends requests to it"
        yield from tensor_problems(part, network)
        profile.network(model, version)
    Characters.from_file(network_file.path_of(profile.config(*settings.parts["network"])))
    yield from own_problems(config, settings)
    if path := fields_path(config, settings):
        read_specification(path)
    yield from profile.differences_from_plain(name, {*settings.parts.values()})


check = partial(verdicts, _reader_problems, "its networks exist, and their tensors fit")
DETECT, DIRECTION = "text_detect", "text_direction"
PART_BY_MODEL = {DETECT: "detect", DIRECTION: "direction"}
NETWORK, PINNED, ROUTE = "text_recognise", "read_text_v1", "read_text"
COMMENT = "# Lines of text in; the best characters of each step, and their probabilities, out.\n"
# Datatypes and ranks of the outputs of a recogniser that returns only the best, or the two best characters.
BEST = [[("TYPE_FP32", 2)] * count + [("TYPE_INT64", 2)] * count for count in (1, 2)]


class ReaderModels(Addition):
    """A recogniser with a public name, and the networks that find lines for it."""

    @property
    def labelled(self) -> set[str]:
        """None, because the characters are in the network's file."""
        return set()

    @property
    def deadline_ms(self) -> int:
        """The default reader's deadline, because a page takes longer than a photo."""
        route = parse_route((TEXT_REPOSITORY / f"{ROUTE}.route.json").read_bytes())
        return route.variants[0].deadline_ms

    def configs(self) -> dict[str, dict[str, str]]:
        """Return the network, reader and route configs by profile, derived from the default ones."""
        names = self.names
        return {
            names.network: dict(_like(NETWORK, names.network, self._change_network)),
            names.pinned: dict(_like(PINNED, names.pinned, self._change_pinned)),
            names.route: dict(_like(ROUTE, names.route, self._change_route)),
        }

    def _change_network(self, config: Any) -> None:
        config.input[0].name = self.settings.image.name
        del config.output[len(self.settings.outputs) :]
        for tensor, served in zip(config.output, self.settings.outputs, strict=True):
            tensor.name = served.name

    def _change_pinned(self, config: Any) -> None:
        versions = self.settings.companions
        texts = {
            "network": self.names.network,
            "network_version": "1",
            "detect_version": str(versions[DETECT]),
            "direction_version": str(versions[DIRECTION]),
        }
        for key, value in texts.items():
            config.parameters[key].string_value = value
        if self.settings.instances:
            config.instance_group[0].count = self.settings.instances

    def _change_route(self, config: Any) -> None:
        config.parameters["route"].string_value = f"{self.names.route}.route.json"


def _like(model: str, name: str, change: Callable[[Any], None]) -> Iterator[tuple[str, str]]:
    """Yield the profile and text of each config of a default model, changed and renamed."""
    folder: Path = TEXT_REPOSITORY / model
    for path in config_files(folder):
        text = path.read_text(encoding="utf-8")
        config = pbtxt.parse(text)
        config.name = name
        change(config)
        if model == NETWORK:  # the first line describes the default recogniser
            text = COMMENT + text.partition("\n")[2]
        yield "" if path.parent == folder else path.stem, pbtxt.rewrite(text, config)


class ReaderImporter(ModelImporter):
    """Networks that return the characters of lines, [N, T, C], or only the best ones."""

    name, rank, results = "read", 0, "lines"
    # Lines are dropped by the probabilities of their characters.
    has_one_form = leaves_out_by_score = True
    unit, labels_are, process_bytes = "line", "characters", READER_BYTES
    samples = (PARCEL_LABEL,)

    def labels(self, facts: NetworkFacts) -> tuple[tuple[str, ...], str]:
        """Return the characters."""
        return facts.characters, dictionary.FILE

    def check_labels(self, labels: Sequence[str], origin: str) -> None:
        """Accept anything, because a network may read control characters."""

    def with_notes(self, choices: NetworkChoices, facts: NetworkFacts) -> NetworkChoices:
        """Return the choices; the reader cuts all lines at one height."""
        return choices

    def preprocessing(
        self, settings: ServingSettings, exporter_settings: ExporterSettings, parameters: Mapping[str, str]
    ) -> tuple[dict[str, str], str]:
        """Return nothing, because the reader prepares the lines."""
        if parameters:
            raise WrongUsage(
                f"a recogniser has no parameters of a preprocessing, got {', '.join(parameters)}; "
                "fix: leave out --preset and --preprocess"
            )
        return {}, ""

    def copy_companions(self, public: str, repository: Path, target: Path) -> dict[str, int]:
        """Copy the models that find text; for an examination, only if the repository has them."""
        if public in PART_BY_MODEL:
            raise WrongUsage(
                f"invalid name: '{public}' is a model that finds text for readers; fix: another --name"
            )
        versions = {}
        for name in PART_BY_MODEL:
            is_shared = (repository / name).exists()
            source = (repository if is_shared else TEXT_REPOSITORY) / name
            if is_shared and (problem := next(_problems(source), "")):
                raise WrongUsage(
                    f"'{repository}' has a model '{name}' that does not find text: {problem}; "
                    "fix: nereid add that model under another name, or use another repository"
                )
            copy_models(source, target / name)
            versions[name] = _newest(source)
        return versions

    def repeat_choices(
        self, path: Path, current: Path, past: Description, image: Mapping[str, Any]
    ) -> NetworkChoices:
        """Return the current version's choices, and its characters for a file without its own."""
        characters = dictionary.characters_of(onnx_file.read(path).model)
        labels = () if characters else dictionary.characters_of(onnx_file.read(current).model)
        return NetworkChoices(
            output=past.output, activation=past.activation, labels=labels, labels_from=dictionary.CURRENT
        )

    def recognises(self, facts: NetworkFacts, size: Size) -> bool:
        """Return whether the metadata names the task, or has characters and the outputs suit a recogniser."""
        kinds = sorted((output.datatype, len(output.shape)) for output in facts.signature.outputs.values())
        has_steps = kinds in BEST or any(rank == 3 for _, rank in kinds)
        return facts.task == self.name or (bool(facts.characters) and has_steps)

    def adapt(
        self, path: Path, choices: NetworkChoices, activation: Activation = "none", names: Names = None
    ) -> Adapted:
        """Change a file to take lines [N, 3, 48, W] and return the two best characters of each step."""
        if any(choices.size) or choices.head or choices.post_processing:
            raise WrongUsage(
                "a recogniser has no size, head or thresholds; fix: leave out --size, --head, "
                "--score-threshold and --iou-threshold"
            )
        return recogniser.adapt_file(path, choices, activation, names)

    def settings(
        self, facts: NetworkFacts, signature: Signature, outputs: Sequence[str], choices: NetworkChoices
    ) -> ServingSettings:
        """Read the tensor names; datatypes and ranks are those the reader needs."""
        (image,) = signature.inputs
        line, best = TENSORS["network"]
        tensors = (
            ServedTensor(name, kind.datatype, kind.dims) for name, kind in zip(outputs, best, strict=False)
        )
        return ServingSettings(ServedTensor(image, line.datatype, line.dims), tuple(tensors))

    def models(self, names: ModelNames, settings: ServingSettings, choices: NetworkChoices) -> ReaderModels:
        """Return the models of a reader."""
        return ReaderModels(names, settings)

    def activation(self, choices: NetworkChoices, first_run: FirstRun) -> Activation:
        """Return the activation that turns character values into probabilities, if lines can be batched."""
        if not first_run.can_batch:
            raise WrongUsage(
                "expected a network that reads several lines at a time, got an error or other text for two "
                "lines in a batch; fix: export it with a variable batch, in which no line changes another one"
            )
        return first_run.activation if choices.activation == "auto" else choices.activation

    def shown(self, results: Sequence[Any]) -> str:
        """Return the lines of text."""
        return " | ".join(results) or "no text"


def _newest(folder: Path) -> int:
    return max(served_versions(folder, read_pbtxt(folder / "config.pbtxt")), default=1)


def _problems(folder: Path) -> Iterator[str]:
    try:
        yield from tensor_problems(PART_BY_MODEL[folder.name], ModelConfig.from_file(folder, _newest(folder)))
    except InvalidConfig as error:
        yield str(error)
