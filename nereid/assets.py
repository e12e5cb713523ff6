"""Files that the package serves and uses: the default model repository, Triton's adapters, sample photos.

A wheel carries them in `nereid/data`; a checkout has them next to the package.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent
_DATA = PACKAGE / "data"
IS_CHECKOUT = not _DATA.is_dir()

REPOSITORY = (CHECKOUT if IS_CHECKOUT else _DATA) / "model_repository"
ADAPTERS = (CHECKOUT if IS_CHECKOUT else _DATA) / "python_backend"
_PHOTOS = CHECKOUT / "clients" / "samples" if IS_CHECKOUT else _DATA / "samples"

# Both photos are CC0; `CREDITS.md` in their folder names their sources.
COFFEE = _PHOTOS / "coffee.jpg"
CHELSEA = _PHOTOS / "chelsea.jpg"
SAMPLES = (COFFEE, CHELSEA)
