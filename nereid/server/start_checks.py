"""The models of a server before its start: those that it loads, and those that it must not serve."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nereid.base.config.instance_bounds import read_bounds
from nereid.base.serving_errors import InvalidConfig
from nereid.repository import checksums
from nereid.repository.layout import (
    hidden_models,
    model_folders,
    readable_configs,
    served_steps,
    served_versions,
    steps_of,
)
from nereid.repository.triton_rules import fatal_problem
from nereid.server.command_line import ServerOptions

Documents = Mapping[str, Mapping[str, Any]]
RESTORE = "restore the file, or publish it as a new version"


def models_to_load(options: ServerOptions) -> list[str]:
    """Return the models to load at start: all, except those that the profile does not use."""
    hidden = hidden_models(options.repository, options.profile)
    return [folder.name for folder in model_folders(options.repository) if folder.name not in hidden]


def unservable_models(options: ServerOptions) -> dict[str, str]:
    """Return the models that must not be loaded, with the reasons.

    Their load would keep Triton from serving, their bounds of instances are invalid, or a file of a published
    version has changed on the disk.
    """
    repository, profile = options.repository, options.profile
    documents, hidden = readable_configs(repository, profile), hidden_models(repository, profile)
    damage = cache(checksums.damage)
    found = {}
    for name, document in documents.items():
        if name in hidden:
            continue
        if problem := fatal_problem(repository / name, document) or _bounds_problem(document):
            found[name] = f"model '{name}': {problem}"
            continue
        for model, version in _versions(repository / name, document):
            if problem := damage(repository / model / str(version)):
                text = f"version {version} of '{model}' is damaged: {problem}; fix: {RESTORE}"
                found[name] = f"model '{name}': {text}"
    # Triton would load a left-out model again with an ensemble that runs it, or with one that runs that one.
    while above := dict(_above(found, documents)):
        found |= above
    return {name: reason for name, reason in found.items() if name not in hidden}


def _bounds_problem(document: Mapping[str, Any]) -> str:
    try:
        read_bounds(document)
    except InvalidConfig as error:
        return str(error)
    return ""


def _above(found: Mapping[str, str], documents: Documents) -> Iterator[tuple[str, str]]:
    """Yield the further models that need models which are not served, with the reasons."""
    for name, document in documents.items():
        steps = () if name in found else served_steps(document)
        if inner := next((model for model, _ in steps if model in found), None):
            yield name, f"model '{name}': its step '{inner}' is not served"


def _versions(folder: Path, document: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the versions that a model needs: its own, and those that it runs itself."""
    for version in served_versions(folder, document):
        yield folder.name, version
    yield from steps_of(document)
