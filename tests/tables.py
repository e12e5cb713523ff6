"""Tables of test cases, each row with its name."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import MappingProxyType
from typing import Any

import pytest


def cases(
    names: str | Sequence[str] = (), table: Mapping[str, Any] = MappingProxyType({}), /, **rows: Any
) -> Callable[[Any], Any]:
    """Parametrize a test by named rows: a value per row, or a tuple if there are several names.

    Without names, the values of a row are the first parameters of the test.
    """
    named = {**table, **rows}

    def parametrize(test: Any) -> Any:
        found = names or [*signature(test).parameters][: len(next(iter(named.values())))]
        return pytest.mark.parametrize(found, list(named.values()), ids=list(named))(test)

    return parametrize
