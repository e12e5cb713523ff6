"""What the callers ask, and that no wrong answer passes."""

import json

import numpy as np
import pytest

from loadtest.users.photo_set import ESPRESSO, Photo, expectation
from loadtest.users.request_mix import Answer, ImageRequest, fault, read
from loadtest.users.run_statistics import RunStatistics
from nereid.client.results.result_kind import MALFORMED, HttpResult
from tests.tables import cases

PHOTO = Photo("s", b"", frozenset([ESPRESSO]))
TWO = Photo("s", b"", frozenset([1, ESPRESSO]))


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


def response(datatype: str = "BYTES", shape: tuple[int, ...] = (1, 1), **outputs: bytes) -> HttpResult:
    described = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, data in outputs.items()
    ]
    head = json.dumps({"outputs": described}).encode()
    return HttpResult(head + b"".join(outputs.values()), len(head))


def words(*given: str) -> bytes:
    return b"".join(len(each.encode()).to_bytes(4, "little") + each.encode() for each in given)


def test_lines_and_labels_are_read():
    got = read(response(text=words("1é")), "text")

    assert got == Answer(frozenset(["1é"]))
    label, none = ImageRequest(Photo("s", b"", expectation("1é"))), Answer(frozenset())
    assert fault(label, got, "http", RunStatistics()) == ""
    assert fault(label, none, "http", RunStatistics()) == "wrong result: expected 1é, got nothing"
    assert expectation("12") == {"12", 12}
    assert read(response(shape=(0,), text=b""), "text") == none
    assert read(response(text=words("No"), variant=words("v1")), "text") == Answer(frozenset(["No"]), "v1")


@cases(
    ("result", "output"),
    {
        "no output": (response(scores=words("No")), "text"),
        "cut off": (response(text=words("No")[:-1]), "text"),
        "more": (response(text=words("No"), variant=words("v1", "v2")), "text"),
        "not finite": (response("FP32", (1, 2), scores=np.full(2, np.nan, np.float32).tobytes()), "scores"),
        "too few scores": (response("FP32", (1, 2), scores=bytes(4)), "scores"),
        "no scores": (response("FP32", (1, 0), scores=b""), "scores"),
    },
)
def test_what_is_no_answer_is_refused(result, output):
    with pytest.raises(MALFORMED):
        read(result, output)
