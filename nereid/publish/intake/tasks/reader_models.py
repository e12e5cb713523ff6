"""Models that read text with a user's recogniser, and the default models that find the lines for it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nereid.assets import TEXT_REPOSITORY, copy_models
from nereid.config.model_config import ModelConfig, read_pbtxt
from nereid.errors import WrongUsage
from nereid.publish.configs import Names
from nereid.publish.intake.serving_settings import ServingSettings
from nereid.repository import pbtxt
from nereid.repository.layout import config_files, served_versions
from nereid.routing.assignment import parse_route
from nereid.serving_errors import InvalidConfig
from nereid.text.reading_settings import tensor_problems

DETECT, DIRECTION = "text_detect", "text_direction"
PARTS = {DETECT: "detect", DIRECTION: "direction"}
NETWORK, PINNED, ROUTE = "text_recognise", "read_text_v1", "read_text"
COMMENT = "# Lines of text in; the best character of each step, and its probability, out.\n"


class ReaderModels(NamedTuple):
    """A recogniser with a public name, and the networks that find the lines for it."""

    names: Names
    settings: ServingSettings

    @property
    def labelled(self) -> set[str]:
        """None: the characters are in the network's file."""
        return set()

    @property
    def deadline_ms(self) -> int:
        """That of the default reader: a page takes longer than a photo."""
        route = parse_route((TEXT_REPOSITORY / f"{ROUTE}.route.json").read_bytes())
        return route.variants[0].deadline_ms

    def configs(self) -> dict[str, dict[str, str]]:
        """Return the configs of network, reader and route by profile."""
        return {
            self.names.network: dict(self._network()),
            self.names.pinned: dict(self._pinned()),
            self.names.route: dict(self._route()),
        }

    def _network(self) -> Iterator[tuple[str, str]]:
        for profile, text, config in _templates(NETWORK, self.names.network):
            config.input[0].name = self.settings.image.name
            for tensor, given in zip(config.output, self.settings.outputs, strict=True):
                tensor.name = given.name
            _, _, rest = text.partition("\n")  # the first line describes the default recogniser
            yield profile, pbtxt.rewrite(COMMENT + rest, config)

    def _pinned(self) -> Iterator[tuple[str, str]]:
        versions = self.settings.companions
        texts = {
            "network": self.names.network,
            "network_version": "1",
            "detect_version": str(versions[DETECT]),
            "direction_version": str(versions[DIRECTION]),
        }
        for profile, text, config in _templates(PINNED, self.names.pinned):
            for key, value in texts.items():
                config.parameters[key].string_value = value
            if self.settings.instances:
                config.instance_group[0].count = self.settings.instances
            yield profile, pbtxt.rewrite(text, config)

    def _route(self) -> Iterator[tuple[str, str]]:
        for profile, text, config in _templates(ROUTE, self.names.route):
            config.parameters["route"].string_value = f"{self.names.route}.route.json"
            yield profile, pbtxt.rewrite(text, config)


def _templates(model: str, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield profile, text and message of each config of a default model, with another name."""
    folder: Path = TEXT_REPOSITORY / model
    for path in config_files(folder):
        text = path.read_text()
        config = pbtxt.parse(text)
        config.name = name
        yield "" if path.parent == folder else path.stem, text, config


def copy_companions(names: Sequence[str], public: str, repository: Path, target: Path) -> dict[str, int]:
    """Copy models that the pinned model uses, too, and return their newest versions.

    Those of the repository are copied only for the examination.

    Args:
        names: of the models.
        public: the name that is added.
        repository: the model repository.
        target: the folder of all staged models.

    Raises:
        WrongUsage: the public name is one of theirs, or the repository has another model of that name.
    """
    if public in names:
        raise WrongUsage(
            f"invalid name: '{public}' is a model that finds text for readers; fix: another --name"
        )
    found = {}
    for name in names:
        is_shared = (repository / name).exists()
        source = (repository if is_shared else TEXT_REPOSITORY) / name
        if is_shared and (problem := next(_problems(source), "")):
            raise WrongUsage(
                f"'{repository}' has a model '{name}' that does not find text: {problem}; "
                "fix: nereid add that model under another name, or use another repository"
            )
        copy_models(source, target / name)
        found[name] = _newest(source)
    return found


def _newest(folder: Path) -> int:
    return max(served_versions(folder, read_pbtxt(folder / "config.pbtxt")), default=1)


def _problems(folder: Path) -> Iterator[str]:
    try:
        yield from tensor_problems(PARTS[folder.name], ModelConfig.from_file(folder, _newest(folder)))
    except InvalidConfig as error:
        yield str(error)
