"""Tables of test cases."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import pytest


def rows(*values: Sequence[Any], ids: Any = None) -> Callable[[Any], Any]:
    """Parametrize a test by rows, whose values are its first parameters."""

    def parametrize(test: Any) -> Any:
        names = [*signature(test).parameters][: len(values[0])]
        return pytest.mark.parametrize(names, values, ids=ids)(test)

    return parametrize


def cases(names: str | Sequence[str] = (), /, **named: Any) -> Callable[[Any], Any]:
    """Parametrize a test by named rows: a value per row, or a tuple if there are several names.

    Without names, the values of a row are the first parameters of the test.
    """
    if not names:
        return rows(*named.values(), ids=[*named])
    return pytest.mark.parametrize(names, [*named.values()], ids=[*named])
