"""Models that read text with a user's recogniser, like the default reader of the package."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nereid.assets import TEXT_REPOSITORY
from nereid.publish.configs import Names, Properties, Tensor
from nereid.repository import pbtxt
from nereid.repository.layout import config_files
from nereid.routing.assignment import parse_route

DETECT, DIRECTION = "text_detect", "text_direction"
NETWORK, PINNED, ROUTE = "text_recognise", "read_text_v1", "read_text"
COMMENT = "# Lines of text in; the best character of each step, and its probability, out.\n"


class ReaderModels(NamedTuple):
    """A recogniser with a public name: its tensors, and the networks that find the lines for it."""

    names: Names
    input: Tensor
    outputs: tuple[Tensor, ...]
    properties: Properties

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
            config.input[0].name = self.input.name
            for tensor, given in zip(config.output, self.outputs, strict=True):
                tensor.name = given.name
            _, _, rest = text.partition("\n")  # the first line describes the default recogniser
            yield profile, pbtxt.rewrite(COMMENT + rest, config)

    def _pinned(self) -> Iterator[tuple[str, str]]:
        versions = self.properties.companions
        texts = {
            "network": self.names.network,
            "network_version": "1",
            "detect_version": str(versions[DETECT]),
            "direction_version": str(versions[DIRECTION]),
        }
        for profile, text, config in _templates(PINNED, self.names.pinned):
            for key, value in texts.items():
                config.parameters[key].string_value = value
            if self.properties.instances:
                config.instance_group[0].count = self.properties.instances
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
