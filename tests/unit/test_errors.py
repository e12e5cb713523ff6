"""The error tree: codes, prefixes, and the way back from a message."""

import pytest

from python_backend import errors

CASES = [
    errors.InvalidRequest("a"),
    errors.InvalidImage("b"),
    errors.InferenceFailed("d"),
]


@pytest.mark.parametrize("error", CASES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("words", ["", "in ensemble 'classify_v1', "], ids=["plain", "through an ensemble"])
def test_error_survives_as_text(error, words):
    """An error that BLS or an ensemble reduced to its text comes back with its class and message."""
    restored = errors.from_message(words + str(error))

    assert (type(restored), str(restored), restored.code) == (type(error), str(error), error.code)


def test_text_without_a_prefix_is_nobodys_bad_request():
    """A message that is not ours counts as a failure of the server."""
    restored = errors.from_message("Stub process 'x' is not healthy.")

    assert (type(restored), restored.code) == (errors.InferenceFailed, "INTERNAL")


def test_first_prefix_wins():
    """A message that quotes another error keeps its own class."""
    restored = errors.from_message("invalid request: variant said invalid image: x")

    assert type(restored) is errors.InvalidRequest


def test_any_exception_becomes_an_answer():
    """Ours stay what they are; others are a failure of the server that names what was raised."""
    ours = errors.InvalidImage("b")

    assert errors.from_exception(ours) is ours
    assert str(errors.from_exception(KeyError("x"))) == "inference failed: KeyError: 'x'"
