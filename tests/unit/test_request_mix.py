"""What the callers ask, and that no wrong answer passes."""

import json

import numpy as np
import pytest

from loadtest.users.photo_set import ESPRESSO, Photo, expectation
from loadtest.users.request_mix import (
    LENGTH,
    Answer,
    ImageRequest,
    fault,
    http_outputs,
    read,
)
from loadtest.users.run_statistics import RunStatistics
from tests.tables import cases

V1 = LENGTH.pack(2) + b"v1"
PHOTO = Photo("s", b"", frozenset([ESPRESSO]))
TWO = Photo("s", b"", frozenset([1, ESPRESSO]))


def scores(best: int) -> bytes:
    values = np.zeros(1000, np.float32)
    values[best] = 0.9
    return values.tobytes()


@cases(
    ("question", "answer", "expected"),
    {
        "neither": (ImageRequest(TWO), Answer(frozenset([281])), "wrong result: expected 1 or 967, got 281"),
        "one of two": (ImageRequest(TWO), Answer(frozenset([ESPRESSO])), ""),
        "any": (ImageRequest(Photo("s", b"")), Answer(frozenset([281])), ""),
        "forced": (ImageRequest(PHOTO, variant="v1"), Answer(frozenset([ESPRESSO]), "v1"), ""),
        "other": (
            ImageRequest(PHOTO, variant="v2"),
            Answer(frozenset([ESPRESSO]), "v1"),
            "expected 'v2', got 'v1'",
        ),
        "moved": (
            ImageRequest(PHOTO, key="known"),
            Answer(frozenset([ESPRESSO]), "v2"),
            "from variant 'v1' to 'v2'",
        ),
        "new key": (ImageRequest(PHOTO, key="new"), Answer(frozenset([ESPRESSO]), "v2"), ""),
        "no variant": (
            ImageRequest(PHOTO, key="new"),
            Answer(frozenset([ESPRESSO])),
            "for a sticky key, got none",
        ),
    },
)
def test_wrong_answers_are_told(question, answer, expected):
    statistics = RunStatistics(variants={"known": ("v1", "grpc")})

    found = fault(question, answer, "http", statistics)

    assert found.endswith(expected)
    assert bool(found) == bool(expected)


def http_answer(**outputs: bytes) -> tuple[bytes, str]:
    described = [
        {"name": name, "parameters": {"binary_data_size": len(tensor)}} for name, tensor in outputs.items()
    ]
    head = json.dumps({"outputs": described}).encode()
    return head + b"".join(outputs.values()), str(len(head))


def test_lines_and_labels_are_read():
    words = LENGTH.pack(2) + b"No" + LENGTH.pack(0) + LENGTH.pack(3) + "1é".encode()

    got = read({"text": words, "variant": V1}, "text")

    assert got == Answer(frozenset(["No", "", "1é"]), "v1")
    label, none = ImageRequest(Photo("s", b"", expectation("No"))), Answer(frozenset())
    assert fault(label, got, "http", RunStatistics()) == ""
    assert fault(label, none, "http", RunStatistics()) == "wrong result: expected No, got nothing"
    assert expectation("12") == {"12", 12}
    assert read({"text": b""}, "text") == none
    with pytest.raises(ValueError, match="expected words as BYTES"):
        read({"text": words[:-1]}, "text")
    with pytest.raises(ValueError, match=r"expected text, got the outputs \['scores'\]"):
        read({"scores": b""}, "text")


@cases(
    ("body", "size"),
    {
        "no size": (b"{}", None),
        "JSON data": (b'{"outputs": [{"name": "scores", "data": [1]}]}', "46"),
        "not finite": http_answer(scores=np.full(1000, np.nan, np.float32).tobytes()),
        "cut off": (http_answer(scores=scores(3))[0][:-1], http_answer(scores=scores(3))[1]),
        "no length": http_answer(scores=scores(3), variant=b"v1"),
        "more": http_answer(scores=scores(3), variant=V1 + b"!"),
    },
)
def test_what_is_no_answer_is_refused(body, size):
    with pytest.raises(ValueError, match="expected"):
        read(http_outputs(body, size))
