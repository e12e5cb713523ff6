"""Options that several commands share, their completion, and the environment of the process."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from nereid.base import assets
from nereid.base.errors import WrongUsage
from nereid.base.task_registry import DEFAULT_TASK, TASKS

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


def collect(paths: Sequence[Path], extra_suffixes: Sequence[str] = ()) -> list[Path]:
    """Return the files among `paths` and the images in its folders, sorted within each folder.

    Args:
        extra_suffixes: further suffixes of files in folders.

    Raises:
        ValueError: a path does not exist, or a folder contains no image.
    """
    images: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"'{path}' does not exist")
        of_path = images_in(path, extra_suffixes) if path.is_dir() else [path]
        if not of_path:
            raise ValueError(
                f"'{path}' has no image, expected {', '.join(sorted(SUFFIXES.union(extra_suffixes)))}"
            )
        images += of_path
    return images


def images_in(folder: Path, extra_suffixes: Sequence[str] = ()) -> list[Path]:
    """Return the images in a folder and its subfolders, sorted."""
    suffixes = SUFFIXES.union(extra_suffixes)
    # Only regular files: reading a named pipe would block.
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in suffixes and file.is_file())


# The tasks for which the package has models, by their names.
PACKAGED_TASKS = {task.name: task for task in TASKS if task.repository and not task.extends}
DEFAULT_REPOSITORY = "the repository of this checkout or package"


def _completing(find: Callable[[Path], Iterable[str]]) -> Callable[[typer.Context, str], list[str]]:
    """Return a completion function over the names that `find` reads from the repository; it never raises."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        repository = Path(context.params.get("repository") or assets.REPOSITORY)
        try:
            return sorted(name for name in find(repository) if name.startswith(incomplete))
        except (OSError, ValueError):
            return []

    return complete


@_completing
def complete_variant(repository: Path) -> Iterable[str]:
    """Complete the names of the variants of all routes."""
    import msgspec

    documents = [msgspec.json.decode(path.read_bytes()) for path in repository.glob("*.route.json")]
    return {variant["name"] for document in documents for variant in document["variants"]}


@_completing
def complete_preset(repository: Path) -> Iterable[str]:
    """Complete the names of preprocessing presets."""
    from nereid.vision.imaging.preprocess_settings import PRESETS

    return PRESETS


complete_model = _completing(lambda folder: (path.parent.name for path in folder.glob("*/config.pbtxt")))
complete_profile = _completing(
    lambda folder: {"auto", "ensemble", *(path.stem for path in folder.glob("*/configs/*.pbtxt"))}
)
Repository: TypeAlias = Annotated[
    Path,
    typer.Option(help="Model repository.", envvar="NEREID_REPOSITORY", show_default=DEFAULT_REPOSITORY),
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
        help="Set of configs to serve: `ensemble` for config.pbtxt, NAME for configs/NAME.pbtxt, or "
        "`auto`, which selects `gpu` if a GPU, its packages and its configs are present, and "
        "otherwise `cpu`.",
        autocompletion=complete_profile,
        envvar="NEREID_PROFILE",
    ),
]
_OfTask: Any = Literal[tuple(PACKAGED_TASKS)]  # Typer refuses other names
Task: TypeAlias = Annotated[
    _OfTask | None,
    typer.Option(help="Use the package's own models for this task.", show_default=DEFAULT_TASK.name),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
AccessLog: TypeAlias = Annotated[
    bool, typer.Option("--access-log", help="Log each request to stderr as one line of JSON.")
]


def port(name: str, **more: Any) -> Any:
    """Return a port option, for `Annotated`."""
    return typer.Option(help=f"{name}; 0 selects a free port.", min=0, max=65535, **more)


def network_file(metavar: str) -> Any:
    """Return a network file argument, for `Annotated`."""
    return typer.Argument(help="ONNX file, or a folder with the file and its external data.", metavar=metavar)


def environment(context: typer.Context) -> Mapping[str, str]:
    """Return the environment of the process, which only the root command reads."""
    variables: Mapping[str, str] = context.obj
    return variables


def repository_of(context: typer.Context, repository: Path, task: str | None) -> Path:
    """Return the repository that `--repository` or `--task` selects.

    Raises:
        WrongUsage: both options were given.
    """
    if task is None:
        return repository
    source = context.get_parameter_source("repository")
    if source and source.name == "COMMANDLINE":
        raise WrongUsage("--task and --repository exclude each other; fix: nereid init DIR --task TASK")
    return PACKAGED_TASKS[task].default_repository


def show_progress(line: str) -> None:
    """Print a progress line to stderr."""
    print(line, file=sys.stderr, flush=True)


def reflow(text: str | None) -> str:
    """Return a help text with one line per paragraph, so that a terminal of any width wraps it."""
    return "\n\n".join(" ".join(lines.split()) for lines in (text or "").split("\n\n"))


def show_help(context: typer.Context) -> None:
    """Show the help of a group that was called without a command."""
    if context.invoked_subcommand is None:
        print(context.get_help())
