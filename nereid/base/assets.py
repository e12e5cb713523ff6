"""Files that the package serves and uses: model repositories and their tasks, adapters, sample photos.

A wheel carries them in `nereid/data`; a checkout has them next to the package.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from nereid.base.contract import BOX, CONFIDENCE, LABEL, SCORE, SCORES, TEXT

PACKAGE = Path(__file__).resolve().parent.parent
CHECKOUT = PACKAGE.parent
_DATA = PACKAGE / "data"
IS_CHECKOUT = not _DATA.is_dir()

REPOSITORY = (CHECKOUT if IS_CHECKOUT else _DATA) / "model_repository"
TEXT_REPOSITORY = (CHECKOUT if IS_CHECKOUT else _DATA) / "text_repository"
ADAPTERS = (CHECKOUT if IS_CHECKOUT else _DATA) / "python_backend"
_PHOTOS = CHECKOUT / "clients" / "samples" if IS_CHECKOUT else _DATA / "samples"

# Both photos are CC0; `CREDITS.md` in their folder names their sources.
COFFEE = _PHOTOS / "coffee.jpg"
CHELSEA = _PHOTOS / "chelsea.jpg"
SAMPLES = (COFFEE, CHELSEA)
# A rendered parcel label, made for this package.
PARCEL_LABEL = _PHOTOS / "parcel_label.jpg"
# The model repositories of the package by their tasks.
REPOSITORIES = {"classify": REPOSITORY, "read": TEXT_REPOSITORY}
# Files that commands write beside models; a copy starts without them.
STATE = ("*.history.jsonl", ".*.nereid", "tuned.pbtxt", "__pycache__")


@dataclass(frozen=True, slots=True)
class TaskModels:
    """The models of one task.

    Attributes:
        command: sends images to them.
        default: name of the model that is used first.
        outputs: names of the outputs that a model must have.
        repository: the default of the command's option --repository.
        fix: how to get one.
    """

    command: str
    default: str
    outputs: tuple[str, ...]
    repository: Path
    fix: str


CLASSIFIERS = TaskModels(
    "classify", "classify", (SCORES,), REPOSITORY, f"--repository '{REPOSITORY}', or nereid add"
)
READERS = TaskModels(
    "read",
    "read_text",
    (TEXT, CONFIDENCE, BOX),
    TEXT_REPOSITORY,
    f"nereid serve --task read, then here --repository '{TEXT_REPOSITORY}'",
)
DETECTORS = TaskModels("detect", "detect", (BOX, SCORE, LABEL), REPOSITORY, "nereid add a detector")
TASKS = CLASSIFIERS, READERS, DETECTORS


def copy_models(source: Path, target: Path) -> None:
    """Copy a model, or a repository, without the state of a server; existing files are replaced.

    Raises:
        OSError: a file cannot be read or written.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*STATE), dirs_exist_ok=True)
