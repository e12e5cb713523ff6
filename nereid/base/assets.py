"""Files that the package serves and uses: model repositories, adapters, sample photos.

A wheel carries them in `nereid/data`; a checkout has them next to the package.
"""

from pathlib import Path

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
# Files that commands write next to models; copies exclude them.
STATE = ("*.history.jsonl", ".*.nereid", "tuned.pbtxt", "__pycache__")


def copy_models(source: Path, target: Path) -> None:
    """Copy a model or repository without a server's state files; existing files are overwritten.

    Raises:
        OSError: a file cannot be read or written.
    """
    import shutil  # loads the compression modules, which would cost every stub

    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*STATE), dirs_exist_ok=True)
