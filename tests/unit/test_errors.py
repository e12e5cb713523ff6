"""The error tree: codes, prefixes, and errors restored from messages."""

import pytest

from nereid.base import serving_errors as errors
from tests.tables import cases


@pytest.mark.parametrize(
    "kind", [errors.InvalidRequest, errors.InferenceFailed, errors.Overloaded, errors.Cancelled]
)
@pytest.mark.parametrize("words", ["", "in ensemble 'classify_v1', "], ids=["plain", "through an ensemble"])
def test_error_survives_as_text(kind, words):
    restored = errors.from_message(f"{words}{kind('x')}")

    assert (type(restored), str(restored)) == (kind, str(kind("x")))


@cases(
    ("text", "expected"),
    {
        "dead": ("Stub process 'classify_v1_0_1' is not healthy.", errors.Died),
        "not ready": ("Failed to execute the request. Model 'nope' is not ready.", errors.Unavailable),
        "late": ("Request timeout expired", errors.DeadlineExceeded),
        "queue": ("[request id: 1] Exceeds maximum queue size", errors.Overloaded),
        "memory": ("Failed to increase the shared memory pool size for key 'a'", errors.Overloaded),
        "other": ("onnx runtime error 2: Unexpected input data type", errors.InferenceFailed),
        "quotes another": ("invalid request: variant said invalid image: x", errors.InvalidRequest),
    },
)
def test_class_follows_from_the_text(text, expected):
    assert type(errors.from_message(text)) is expected
