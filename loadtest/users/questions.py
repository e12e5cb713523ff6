"""What the callers of a load test ask, and whether an answer is right: a fast wrong one is a failure."""

import functools
import json
import operator
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.users.ledger import Ledger
from nereid.client.prediction import SCORES, VARIANT
from nereid.tune import photos

ESPRESSO = 967
# How often each is asked, compared with the others.
SIZES = {"640x427": 9, "1920x1080": 1}
PLAIN, FORCED, STICKY = "plain", "forced", "sticky"
WAYS = {PLAIN: 2, FORCED: 1, STICKY: 1}
LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Question:
    """One request: an image, and how the route is to choose."""

    size: str
    image: bytes
    variant: str = ""
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What goes with the image, over both protocols."""
        named = {"x-variant": self.variant, "x-route-key": self.key}
        return {name: value for name, value in named.items() if value}


@dataclass(frozen=True, slots=True)
class Answer:
    """The best class, and the variant that found it; empty for a model that is no route."""

    best: int
    variant: str = ""


class Questions:
    """Draw what is asked next.

    Args:
        variants: of the route; none for a model that is no route.
        keys: how many sticky callers there are; 0 for none.
        draw: of sizes, variants and keys.
    """

    def __init__(self, variants: Sequence[str], keys: int, draw: random.Random) -> None:
        self._variants, self._keys, self._draw = variants, keys, draw
        for size in SIZES:
            image(size)  # now: to make a photo within a turn would count as the server's time
        ways = {PLAIN: True, FORCED: bool(variants), STICKY: bool(variants) and keys > 0}
        self._ways = {way: weight for way, weight in WAYS.items() if ways[way]}

    def next(self) -> Question:
        """Return one more."""
        (size,) = self._draw.choices(list(SIZES), list(SIZES.values()))
        (way,) = self._draw.choices(list(self._ways), list(self._ways.values()))
        variant = self._draw.choice(self._variants) if way == FORCED else ""
        key = f"caller-{self._draw.randrange(self._keys)}" if way == STICKY else ""
        return Question(size, image(size), variant, key)


@functools.cache
def image(size: str) -> bytes:
    """Return the photo of that size, which all callers share."""
    return photos.jpeg(photos.SIZES_WH[size])


def wrong(question: Question, answer: Answer, expected: int, protocol: str, ledger: Ledger) -> str:
    """Tell what is wrong with an answer, if anything.

    Args:
        question: what was asked.
        answer: what came.
        expected: the class that the photo shows.
        protocol: over which it came.
        ledger: knows which variants the sticky keys have got.
    """
    if answer.best != expected:
        return f"wrong class: expected {expected}, got {answer.best}"
    if question.variant and answer.variant != question.variant:
        return f"wrong variant: asked for '{question.variant}', got '{answer.variant}'"
    if question.key and not answer.variant:
        return "expected a variant for a sticky key, got none"
    if question.key and (before := ledger.moved(question.key, answer.variant, protocol)):
        return f"a sticky key moved from variant '{before}' to '{answer.variant}'"
    return ""


def read(outputs: Mapping[str, bytes]) -> Answer:
    """Read an answer out of its binary tensors.

    Raises:
        ValueError: they are no answer of a classifier.
    """
    if not outputs.get(SCORES):
        raise ValueError(f"expected scores, got the outputs {sorted(outputs)}")
    scores = np.frombuffer(outputs[SCORES], "<f4")
    if not np.isfinite(scores).all():
        raise ValueError("expected scores, got some that are no numbers")
    return Answer(int(scores.argmax()), _word(outputs[VARIANT]) if VARIANT in outputs else "")


def http_outputs(body: bytes, json_size: str | None) -> dict[str, bytes]:
    """Return the binary tensors of an answer over HTTP.

    Args:
        body: JSON, then the tensors.
        json_size: the header `Inference-Header-Content-Length`.

    Raises:
        ValueError: this is no such answer.
    """
    if json_size is None:
        raise ValueError("expected binary tensors, got an answer without Inference-Header-Content-Length")
    begin = int(json_size)
    try:
        sizes = {
            each["name"]: operator.index(each["parameters"]["binary_data_size"])
            for each in json.loads(body[:begin])["outputs"]
        }
    except (LookupError, TypeError) as error:
        raise ValueError(f"expected binary tensors, got JSON without {error}") from None
    if len(body) != begin + sum(sizes.values()):
        raise ValueError(f"expected {begin + sum(sizes.values())} bytes, got {len(body)}")
    outputs = {}
    for name, size in sizes.items():
        outputs[name], begin = body[begin : begin + size], begin + size
    return outputs


def grpc_outputs(response: Any) -> dict[str, bytes]:
    """Return the binary tensors of an answer over gRPC, a `ModelInferResponse`.

    Raises:
        ValueError: it has another number of them than it says.
    """
    names = (output.name for output in response.outputs)
    return dict(zip(names, response.raw_output_contents, strict=True))


def _word(tensor: bytes) -> str:
    (size,) = LENGTH.unpack_from(tensor) if len(tensor) >= LENGTH.size else (-1,)
    if len(tensor) != LENGTH.size + size:
        raise ValueError(f"expected one word as BYTES, got {tensor[:40]!r}")
    return tensor[LENGTH.size :].decode()
