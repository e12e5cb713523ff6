"""`nereid init`: a model repository of one's own."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from nereid.assets import REPOSITORY
from nereid.errors import WrongUsage

# Files that commands write beside models; a new repository starts without them.
STATE = ("*.history.jsonl", ".*.nereid", "tuned.pbtxt", "__pycache__")


def init(
    folder: Annotated[Path, typer.Argument(help="New or empty folder for the repository.", metavar="DIR")],
) -> None:
    """Create a model repository of your own: a copy of the default models, which you may change.

    Upgrades of Nereid never touch this folder.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise WrongUsage(f"'{folder}' already exists and is not an empty folder; fix: name a new folder")
    shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns(*STATE), dirs_exist_ok=True)
    print(f"created '{folder}' with the default models")
    print(f"serve it:                       nereid serve --repository {folder}")
    print(f"make it the default of a shell: export NEREID_REPOSITORY={folder.resolve()}")
