"""Checks of models of the backend `text_reader`."""

from collections.abc import Iterator

from nereid.repository.check import Profile, Verdict
from nereid.tasks.read.characters import Characters
from nereid.tasks.read.fields.specification import read_specification
from nereid.tasks.read.reading_settings import ReadingSettings, fields_path, own_problems, tensor_problems
from nereid.vision.inference import network_file


def check(profile: Profile, name: str) -> Iterator[tuple[Verdict, str]]:
    """Yield the problems of a reader of text that prevent a load, and its differences from the plain config.

    Raises:
        InvalidConfig: a parameter is invalid, or a network is missing.
    """
    problems = [*_problems(profile, name)]
    yield from (("fail", problem) for problem in problems)
    if not problems:
        yield "ok", "its networks exist, and their tensors fit"


def _problems(profile: Profile, name: str) -> Iterator[str]:
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
