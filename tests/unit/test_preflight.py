"""Requirements of the machine before installation."""

import pytest

from nereid.server import preflight


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("3.13", "Python 3.11 or 3.12, found 3.13; fix: install one"),
        ("3.12", "libpython3.12.so.1.0; fix: apt-get install libpython3.12"),
        ("3.11", "libpython3.11.so.1.0; fix: apt-get install libpython3.11"),
    ],
)
def test_preflight_says_what_to_install(tmp_path, python, message):
    found = [f"{each}; fix: {fix}" for each, fix in preflight.missing(python, (tmp_path,))]

    assert any(each.startswith(message) for each in found)
