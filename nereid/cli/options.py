"""Options that several commands share, their completion, and the environment of the process."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from nereid import assets
from nereid.contract import BOX, CONFIDENCE, IMAGE, LABEL, SCORE, SCORES, TEXT
from nereid.errors import WrongUsage

DEFAULT_MODEL = "classify"
DEFAULT_MODEL_HELP = "`classify`, or the only model that classifies"
DEFAULT_READER_HELP = "`read_text`, or the only model that reads text"
DEFAULT_DETECTOR_HELP = "`detect`, or the only model that finds objects"
DEFAULT_REPOSITORY = "the repository of this checkout or package"


@dataclass(frozen=True, slots=True)
class ModelKind:
    """The models of one task.

    Attributes:
        default: name of the model that is used first.
        outputs: names of the outputs that a model must have.
        fix: how to get one.
    """

    default: str
    outputs: tuple[str, ...]
    fix: str


CLASSIFIERS = ModelKind(DEFAULT_MODEL, (SCORES,), f"--repository '{assets.REPOSITORY}', or nereid add")
READERS = ModelKind(
    "read_text",
    (TEXT, CONFIDENCE, BOX),
    f"nereid serve --task read, then here --repository '{assets.TEXT_REPOSITORY}'",
)
DETECTORS = ModelKind("detect", (BOX, SCORE, LABEL), "nereid add a detector")
MODEL_KINDS = CLASSIFIERS, READERS, DETECTORS


def _repository_of(context: typer.Context) -> Path:
    return Path(context.params.get("repository") or assets.REPOSITORY)


def _completing(find: Callable[[Path], Iterable[str]]) -> Callable[[typer.Context, str], list[str]]:
    """Return a completion function over the names that `find` reads from the repository; it never raises."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        try:
            return sorted(name for name in find(_repository_of(context)) if name.startswith(incomplete))
        except (OSError, ValueError):
            return []

    return complete


@_completing
def complete_model(repository: Path) -> Iterable[str]:
    """Complete the names of models."""
    return (path.parent.name for path in repository.glob("*/config.pbtxt"))


@_completing
def complete_profile(repository: Path) -> Iterable[str]:
    """Complete the names of profiles."""
    return {"auto", "ensemble", *(path.stem for path in repository.glob("*/configs/*.pbtxt"))}


@_completing
def complete_variant(repository: Path) -> Iterable[str]:
    """Complete the names of the variants of all routes."""
    import msgspec

    documents = [msgspec.json.decode(path.read_bytes()) for path in repository.glob("*.route.json")]
    return {variant["name"] for document in documents for variant in document["variants"]}


@_completing
def complete_preset(repository: Path) -> Iterable[str]:
    """Complete the names of preprocessing presets."""
    from nereid.imaging.preprocess_settings import PRESETS

    return PRESETS


Repository: TypeAlias = Annotated[
    Path,
    typer.Option(help="Model repository.", envvar="NEREID_REPOSITORY", show_default=DEFAULT_REPOSITORY),
]
TextRepository: TypeAlias = Annotated[
    Path,
    typer.Option(
        help="Model repository.",
        envvar="NEREID_REPOSITORY",
        show_default="the text models of this checkout or package",
    ),
]
Model: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="Name of a network, or of a route or pinned model that uses the network.",
        metavar="MODEL",
        autocompletion=complete_model,
    ),
]
Profile: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Set of configs to serve: `ensemble` for config.pbtxt, NAME for configs/NAME.pbtxt, or `auto`: "
        "`gpu` if a GPU, its packages and configs for it are there, else `cpu`.",
        autocompletion=complete_profile,
        envvar="NEREID_PROFILE",
    ),
]
Task: TypeAlias = Annotated[
    Literal["classify", "read"] | None,
    typer.Option(help="Task whose models of this package are used.", show_default="classify"),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def environment(context: typer.Context) -> Mapping[str, str]:
    """Return the environment of the process, which only the root command reads."""
    found: Mapping[str, str] = context.obj
    return found


def repository_of(context: typer.Context, repository: Path, task: str | None) -> Path:
    """Return the repository of the options `--repository` and `--task`.

    Raises:
        WrongUsage: both options were given.
    """
    if task is None:
        return repository
    source = context.get_parameter_source("repository")
    if source and source.name == "COMMANDLINE":
        raise WrongUsage("--task and --repository exclude each other; fix: nereid init DIR --task TASK")
    return assets.REPOSITORIES[task]


def find_model(repository: Path, name: str, kind: ModelKind) -> str:
    """Return the model of a task: `name`, else the default one, else the only one of the repository.

    Raises:
        WrongUsage: the repository has no such model, or several; the message has their names.
    """
    wanted = name or kind.default
    if (repository / wanted).is_dir():
        return wanted
    from nereid.routes.target import check_repository, models_with

    check_repository(repository)
    found = models_with(repository, kind.outputs)
    known = ", ".join(found)
    if not found:
        outputs = ", ".join(f"'{each}'" for each in kind.outputs)
        word = "outputs" if len(kind.outputs) > 1 else "output"
        raise WrongUsage(
            f"'{repository}' has no model with input '{IMAGE}' and {word} {outputs}; fix: {kind.fix}"
        )
    if name:
        raise WrongUsage(f"'{repository}' has no model '{name}'; expected one of: {known}")
    if len(found) > 1:
        raise WrongUsage(f"'{repository}' has several models; fix: name one with --model: {known}")
    return found[0]


def find_any_model(repository: Path, name: str) -> str:
    """Return the model `name`, else the default one of a task, else the first one of the repository.

    Raises:
        WrongUsage: the repository has no such model, or none; the message has the models of all tasks.
    """
    from nereid.repository.layout import is_model, model_folders
    from nereid.routes.target import check_repository, models_with

    check_repository(repository)
    found: dict[str, None] = {}
    for kind in MODEL_KINDS:
        found |= dict.fromkeys(sorted(models_with(repository, kind.outputs), key=kind.default.__ne__))
    known = [*found] or [folder.name for folder in model_folders(repository) if is_model(folder)]
    if name and not (repository / name).is_dir():
        raise WrongUsage(f"'{repository}' has no model '{name}'; expected one of: {', '.join(known)}")
    if not known:
        raise WrongUsage(f"'{repository}' has no model; fix: nereid add FILE --repository {repository}")
    return name or known[0]


def own_repository(repository: Path) -> Path:
    """Return the repository, if its models may be changed.

    Raises:
        WrongUsage: it is part of the installed package, which the next upgrade replaces.
    """
    if not assets.IS_CHECKOUT and repository.resolve() == assets.REPOSITORY:
        raise WrongUsage(
            "the models of the installed package cannot be changed, since an upgrade replaces them; "
            "fix: nereid init DIR, then --repository DIR or NEREID_REPOSITORY=DIR"
        )
    return repository


@contextlib.contextmanager
def invalid_values() -> Iterator[None]:
    """Turn a `ValueError` about an option into wrong usage."""
    try:
        yield
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def show_progress(line: str) -> None:
    """Print a line about the progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def reflowed(text: str | None) -> str:
    """Return a help text with one line per paragraph, so that a terminal of any width wraps it."""
    return "\n\n".join(" ".join(lines.split()) for lines in (text or "").split("\n\n"))


def show_help(context: typer.Context, **_: Any) -> None:
    """Show the help of a group that was called without a command."""
    if context.invoked_subcommand is None:
        print(context.get_help())
