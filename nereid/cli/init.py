"""`nereid init`: a model repository of one's own."""

from pathlib import Path
from typing import Annotated

import typer

from nereid.base.assets import copy_models
from nereid.base.errors import WrongUsage
from nereid.cli.options import OWN_MODELS, Task
from nereid.tasks import DEFAULT


def init(
    folder: Annotated[
        Path,
        typer.Argument(
            help="New or empty folder for the repository; with --task also a repository that gets the models "
            "of the task.",
            metavar="DIR",
        ),
    ],
    task: Task = None,
) -> None:
    """Create a model repository of your own: a copy of the default models, which you may change.

    With --task read, the repository gets the models that read text. Upgrades of Nereid never touch this
    folder.
    """
    if folder.exists() and not folder.is_dir():
        raise WrongUsage(f"'{folder}' already exists and is not an empty folder; fix: name a new folder")
    source = (OWN_MODELS[task] if task else DEFAULT).default_repository
    is_new = not any(folder.glob("*"))
    if not is_new:
        check_room(folder, source, task)
    copy_models(source, folder)
    models = f"the models of task `{task}`" if task else "the default models"
    print(f"created '{folder}' with {models}" if is_new else f"added {models} to '{folder}'")
    print(f"serve it:                       nereid serve --repository {folder}")
    print(f"make it the default of a shell: export NEREID_REPOSITORY={folder.resolve()}")


def check_room(folder: Path, source: Path, task: str | None) -> None:
    """Check that models can be added to a folder.

    Raises:
        WrongUsage: it is not a model repository, or has one of the models already.
    """
    if not task or not any(folder.glob("*/config.pbtxt")):
        raise WrongUsage(f"'{folder}' already exists and is not an empty folder; fix: name a new folder")
    names = (path.name for path in source.iterdir() if not path.name.startswith("."))
    if taken := sorted(name for name in names if (folder / name).exists()):
        raise WrongUsage(f"'{folder}' already has {', '.join(taken)}; fix: name another folder")
