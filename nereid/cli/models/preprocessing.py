"""The preprocessing options of `nereid add`: parameters as words, or in a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from nereid.base.errors import WrongUsage

Preprocess: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE|FILE.json",
        help="Parameter of the preprocessing, such as `mean=127.5,127.5,127.5`, or a JSON file with several. "
        "May be repeated.",
        show_default="those of the preset",
    ),
]


def parameters_of(words: Sequence[str], preset: str) -> dict[str, str]:
    """Return the parameters of the preprocessing as a config spells them; later words win.

    Raises:
        WrongUsage: a word is neither NAME=VALUE nor a JSON file with an object.
    """
    found = {"preset": preset} if preset else {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            found[name] = value
        else:
            found |= _from_file(Path(word))
    return found


def size_of(word: str) -> tuple[int, int]:
    """Return height and width in pixels: `640` for both, or `480x640`; zeros for no word.

    Raises:
        WrongUsage: it is something else.
    """
    if not word:
        return 0, 0
    height, times, width = word.lower().partition("x")
    try:
        found = int(height), int(width if times else height)
    except ValueError:
        found = 0, 0
    if min(found) < 1:
        raise WrongUsage(f"--size: expected pixels such as 640, or height and width as 480x640, got '{word}'")
    return found


def _from_file(path: Path) -> dict[str, str]:
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise WrongUsage(
            f"--preprocess '{path}': expected NAME=VALUE or a JSON file ({error.strerror})"
        ) from None
    except ValueError as error:
        raise WrongUsage(f"--preprocess '{path}': expected a JSON file, got: {error}") from None
    if not isinstance(document, dict):
        raise WrongUsage(
            f"--preprocess '{path}': expected an object of parameters, got {type(document).__name__}"
        )
    return {str(name): _text(value) for name, value in document.items()}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
