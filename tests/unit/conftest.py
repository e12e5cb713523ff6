"""What unit tests share."""

import pytest

from tests.publishing import store_published


@pytest.fixture
def repository(tmp_path):
    """A published network `net` with its route `r`, unless a module has a repository of its own."""
    store_published(tmp_path / "models")
    return tmp_path / "models"
