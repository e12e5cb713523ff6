"""The profile `tuned`: tunable models, settings in configs, and the profile's files."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid.base.config.model_config import CONFIGS
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish import network
from nereid.models.publish.transaction import opened_journal
from nereid.models.routes.location import readable_routes
from nereid.repository import pbtxt
from nereid.repository.repository_index import backend_of, configs, served_steps, steps_of, unused_models
from nereid.server.command_line import ENSEMBLE_PROFILE, TUNED_PROFILE

PLAIN_CONFIG = "config.pbtxt"
# Start of the first line of a written config; a file without it belongs to the user.
MARK = "# Written by `nereid tune"
COPY = f"{MARK}` for another model: a copy of "

# Names of settings; other names are parameters of the config.
INSTANCES, MAX_BATCH_SIZE = "instances", "max_batch_size"
PREFERRED, DELAY = "preferred_batch_size", "max_queue_delay_microseconds"

Settings = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Tunable:
    """A model that can be tuned in a profile: the path and text of its config, and notes for the user.

    `steps` are the models to which it sends requests.
    """

    model: str
    profile: str
    path: Path
    text: str
    backend: str
    notes: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()


def tunable(repository: Path, model: str, profile: str) -> Tunable:
    """Return the config of a model for tuning.

    Raises:
        WrongUsage: the model does not exist, or only calls other models; the message lists the alternatives.
        OperationFailed: a profile `tuned` exists that `nereid tune` did not write.
    """
    documents = configs(repository, profile)
    if model not in documents:
        raise WrongUsage(f"'{repository}' has no model '{model}', it has: {', '.join(sorted(documents))}")
    folder, document = repository / model, documents[model]
    backend = backend_of(folder, document)
    if "ensemble_scheduling" in document:
        steps = ", ".join(dict.fromkeys(step for step, _ in steps_of(document)))
        raise WrongUsage(
            f"cannot tune '{model}': it is an ensemble in profile '{profile}'; fix: tune its steps: {steps}"
        )
    if backend == "ab_router":
        variants = "see its route file"
        if route := readable_routes(repository).get(model):
            variants = ", ".join(dict.fromkeys(variant.model for variant in route.variants))
        raise WrongUsage(f"cannot tune '{model}': it is a route; fix: tune its variants: {variants}")
    named = folder / CONFIGS / f"{profile}.pbtxt"
    path = named if named.exists() else folder / PLAIN_CONFIG
    if not path.exists():
        raise WrongUsage(f"cannot tune '{model}': it has no {PLAIN_CONFIG}; fix: write one")
    _check_ours(repository)
    notes = tuple(_notes(repository, model, profile, documents))
    called = tuple(dict.fromkeys(name for name, _ in served_steps(document)))
    return Tunable(model, profile, path, path.read_text(), backend, notes, called)


def _notes(
    repository: Path, model: str, profile: str, documents: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    if model not in unused_models(repository, profile):
        return []
    users = [name for name, document in documents.items() if model in dict(steps_of(document))]
    return [
        f"profile '{profile}' does not load '{model}': {', '.join(users)} run it with its {PLAIN_CONFIG}; "
        f"the tuned settings apply only where '{model}' is loaded, as with --profile {ENSEMBLE_PROFILE}"
    ]


def _check_ours(repository: Path) -> None:
    for path in sorted(repository.glob(f"*/{CONFIGS}/{TUNED_PROFILE}.pbtxt")):
        if not _is_ours(path.read_text()):
            raise OperationFailed(f"'{path}' was not written by nereid tune; fix: rename that file")


def _is_ours(text: str) -> bool:
    """Return whether `nereid tune` has written a config, or a publication copied one that it wrote."""
    first = text.partition("\n")[0]
    return first.startswith(MARK) or (first.startswith(network.LIKE) and first.endswith(network.WRITTEN))


def value_of(config: Any, name: str) -> int:
    """Return a setting of a ModelConfig message, 0 if it is not set."""
    if name == INSTANCES:
        return sum(group.count for group in config.instance_group)
    if name == MAX_BATCH_SIZE:
        return int(config.max_batch_size)
    if name == PREFERRED:
        return max(config.dynamic_batching.preferred_batch_size, default=0)
    if name == DELAY:
        return int(config.dynamic_batching.max_queue_delay_microseconds)
    text = config.parameters[name].string_value if name in config.parameters else ""
    return int(text) if text.isdecimal() else 0


def with_settings(text: str, settings: Settings) -> str:
    """Return the text of a config with new settings."""
    config = pbtxt.parse(text)
    for name, value in settings.items():
        _set_value(config, name, value)
    return pbtxt.rewrite(text, config)


def _set_value(config: Any, name: str, value: int) -> None:
    if name == INSTANCES:
        group = config.instance_group[0] if config.instance_group else config.instance_group.add()
        group.count = value
    elif name == MAX_BATCH_SIZE:
        config.max_batch_size = value
    elif name == PREFERRED:
        config.dynamic_batching.preferred_batch_size[:] = [value] * bool(value)
    elif name == DELAY:
        config.dynamic_batching.max_queue_delay_microseconds = value
    elif value:
        config.parameters[name].string_value = str(value)
    else:
        config.parameters.pop(name, None)


def check_writable(repository: Path, tuned: Tunable) -> None:
    """Check before the search that `write` will be able to write.

    Raises:
        OperationFailed: a folder for a config is not writable.
    """
    for path in _texts(repository, tuned, {}, "", ()):
        folder = path.parent if path.parent.exists() else path.parent.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OperationFailed(
                f"cannot write to '{folder}'; fix: --dry-run, or tune a copy of the repository"
            )


def write(
    repository: Path, tuned: Tunable, settings: Settings, command: str, about: Sequence[str]
) -> list[str]:
    """Write the whole profile `tuned`; return the models that have a config in it.

    All files are complete before the first one is renamed. Triton 24.10 ignores them when it checks whether a
    model has changed, so each `config.pbtxt` is touched.

    Args:
        tuned: the tuned model; every other model of its profile gets a copy of its config.
        command: the command line of the search, for the header.
        about: further lines for the header: time, machine and gain.

    Raises:
        OperationFailed: the tuned config has changed in the meantime, or another command holds the lock.
    """
    with opened_journal(repository.resolve()):
        if not tuned.path.exists() or tuned.path.read_text() != tuned.text:
            raise OperationFailed(f"'{tuned.path}' has changed during the search; fix: run nereid tune again")
        _check_ours(repository)
        texts = _texts(repository, tuned, settings, command, about)
        stale = _stale(repository, tuned, texts)
        try:
            for path, text in texts.items():
                path.parent.mkdir(exist_ok=True)
                _new(path).write_text(text)
            for path in texts:
                _new(path).replace(path)
            for path in stale:
                path.unlink()
            for path in (*texts, *stale):
                if (plain := path.parent.parent / PLAIN_CONFIG).exists():
                    os.utime(plain)
        except OSError as error:
            raise OperationFailed(f"cannot write profile '{TUNED_PROFILE}': {error}") from None
        finally:
            for path in texts:
                with contextlib.suppress(OSError):
                    _new(path).unlink(missing_ok=True)
    return [path.parent.parent.name for path in texts]


def _new(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def _stale(repository: Path, tuned: Tunable, texts: Mapping[Path, str]) -> list[Path]:
    """Return copies from an earlier profile `tuned` that was based on another profile."""
    if tuned.profile == TUNED_PROFILE:
        return []
    there = [path for path in repository.glob(f"*/{CONFIGS}/{TUNED_PROFILE}.pbtxt") if path not in texts]
    return [path for path in there if path.read_text().startswith(COPY)]


def _texts(
    repository: Path, tuned: Tunable, settings: Settings, command: str, about: Sequence[str]
) -> dict[Path, str]:
    target = repository / tuned.model / CONFIGS / f"{TUNED_PROFILE}.pbtxt"
    head = [f"{MARK}{command.removeprefix('nereid tune')}`.", *(f"# {line}" for line in about)]
    texts = {target: _with_header(head, with_settings(_without_head(tuned.text), settings))}
    if tuned.profile == TUNED_PROFILE:
        return texts
    for profile_config in sorted(repository.glob(f"*/{CONFIGS}/{tuned.profile}.pbtxt")):
        copy = profile_config.with_name(f"{TUNED_PROFILE}.pbtxt")
        if copy != target:
            why = f"{COPY}{CONFIGS}/{profile_config.name}."
            texts[copy] = _with_header([why], profile_config.read_text())
    return texts


def overwritten_models(repository: Path, tuned: Tunable) -> list[str]:
    """Return the tuned models whose configs would be replaced by copies."""
    if tuned.profile == TUNED_PROFILE:
        return []
    paths = repository.glob(f"*/{CONFIGS}/{TUNED_PROFILE}.pbtxt")
    others = [path for path in paths if path.parent.parent.name != tuned.model]
    bases = [path for path in others if path.with_name(f"{tuned.profile}.pbtxt").exists()]
    return sorted(path.parent.parent.name for path in bases if not path.read_text().startswith(COPY))


def _with_header(head: Sequence[str], text: str) -> str:
    return "".join(f"{line}\n" for line in head) + "\n" + text


def _without_head(text: str) -> str:
    return re.sub(r"(?:#.*\n)+\n?", "", text, count=1) if text.startswith(MARK) else text
