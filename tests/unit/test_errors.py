"""The error tree: codes, prefixes, and errors restored from messages."""

import pytest

from nereid import serving_errors as errors

CASES = [
    errors.InvalidRequest("a"),
    errors.InvalidImage("b"),
    errors.InferenceFailed("d"),
    errors.Overloaded("e"),
    errors.DeadlineExceeded("f"),
    errors.Unavailable("g"),
    errors.Cancelled("h"),
]


@pytest.mark.parametrize("error", CASES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("words", ["", "in ensemble 'classify_v1', "], ids=["plain", "through an ensemble"])
def test_error_survives_as_text(error, words):
    restored = errors.from_message(words + str(error))

    assert (type(restored), str(restored), restored.code) == (type(error), str(error), error.code)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Stub process 'classify_v1_0_1' is not healthy.", errors.Died),
        ("Failed for execute the inference request. Model 'nope' is not ready.", errors.Unavailable),
        ("Request timeout expired", errors.DeadlineExceeded),
        ("[request id: 1] Exceeds maximum queue size", errors.Overloaded),
        ("Failed to increase the shared memory pool size for key 'nereid-1-a'", errors.Overloaded),
        ("onnx runtime error 2: Unexpected input data type", errors.InferenceFailed),
    ],
    ids=lambda value: str(value)[:30],
)
def test_tritons_own_texts_are_known(text, expected):
    assert type(errors.from_message(text)) is expected


def test_first_prefix_wins():
    """A message that quotes another error keeps its own class."""
    restored = errors.from_message("invalid request: variant said invalid image: x")

    assert type(restored) is errors.InvalidRequest


def test_any_exception_becomes_a_serving_error():
    ours = errors.InvalidImage("b")

    assert errors.from_exception(ours) is ours
    assert str(errors.from_exception(KeyError("x"))) == "inference failed: KeyError: 'x'"
