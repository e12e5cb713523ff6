"""Tables of test cases, each row with its name."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest


def cases(
    names: str | Sequence[str], table: Mapping[str, Any] = MappingProxyType({}), /, **rows: Any
) -> pytest.MarkDecorator:
    """Parametrize a test by named rows: a value per row, or a tuple if there are several names."""
    named = {**table, **rows}
    return pytest.mark.parametrize(names, list(named.values()), ids=list(named))
