"""Tables of test cases, each row with its name."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def cases(names: str | Sequence[str], rows: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize a test by named rows: a value per row, or a tuple if there are several names."""
    return pytest.mark.parametrize(names, list(rows.values()), ids=list(rows))
