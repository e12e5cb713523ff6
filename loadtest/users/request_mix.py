"""The requests of a load test, and the checks of their responses."""

import itertools
import json
import operator
import random
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.users.photo_set import Photo
from loadtest.users.run_statistics import RunStatistics
from nereid.contract import LABEL, ROUTE_KEY_HEADER, SCORES, TEXT, VARIANT, VARIANT_HEADER

PLAIN, FORCED, STICKY = "plain", "forced", "sticky"
# Relative frequencies.
WAYS = {PLAIN: 2, FORCED: 1, STICKY: 1}
LENGTH = struct.Struct("<I")
# By task, the output that has the result.
RESULTS = {"classify": SCORES, "read": TEXT, "detect": LABEL}
# Results in a message.
MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """A photo, and the variant or the route key of its request."""

    photo: Photo
    variant: str = ""
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the request, over both protocols."""
        named = {VARIANT_HEADER: self.variant, ROUTE_KEY_HEADER: self.key}
        return {name: value for name, value in named.items() if value}


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of a response: its best class, its lines of text, or the labels of its objects.

    `variant` is empty for a model that is not a route.
    """

    found: frozenset[int | str]
    variant: str = ""


class RequestMix:
    """Random requests, which send the photos again and again.

    Args:
        variants: of the route; empty for a model that is not a route.
        keys: number of sticky callers; 0 for none.
    """

    def __init__(
        self, photos: Sequence[Photo], variants: Sequence[str], keys: int, draw: random.Random
    ) -> None:
        self._variants, self._keys, self._draw = variants, keys, draw
        self._photos = itertools.cycle(draw.sample(photos, len(photos)))
        ways = {PLAIN: True, FORCED: bool(variants), STICKY: bool(variants) and keys > 0}
        self._ways = {way: weight for way, weight in WAYS.items() if ways[way]}

    def next(self) -> ImageRequest:
        """Return another request."""
        (way,) = self._draw.choices(list(self._ways), list(self._ways.values()))
        variant = self._draw.choice(self._variants) if way == FORCED else ""
        key = f"caller-{self._draw.randrange(self._keys)}" if way == STICKY else ""
        return ImageRequest(next(self._photos), variant, key)


def fault(request: ImageRequest, got: Answer, protocol: str, statistics: RunStatistics) -> str:
    """Return the fault of a response, empty for a correct one; the statistics have earlier sticky keys."""
    if request.photo.expected and not got.found & request.photo.expected:
        return f"wrong result: expected {_words(request.photo.expected)}, got {_words(got.found)}"
    if request.variant and got.variant != request.variant:
        return f"wrong variant: expected '{request.variant}', got '{got.variant}'"
    if request.key and not got.variant:
        return "expected a variant for a sticky key, got none"
    if request.key and (before := statistics.moved(request.key, got.variant, protocol)):
        return f"a sticky key moved from variant '{before}' to '{got.variant}'"
    return ""


def read(outputs: Mapping[str, bytes], output: str = SCORES) -> Answer:
    """Parse the binary tensors of a response; `output` has the result of the task, see `RESULTS`.

    Raises:
        ValueError: the tensors are not from a model of the task.
    """
    if output not in outputs:
        raise ValueError(f"expected {output}, got the outputs {sorted(outputs)}")
    found = _best(outputs[output]) if output == SCORES else frozenset(_split(outputs[output]))
    return Answer(found, _word(outputs[VARIANT]) if VARIANT in outputs else "")


def http_outputs(body: bytes, json_size: str | None) -> dict[str, bytes]:
    """Return the binary tensors of a response over HTTP, whose JSON has this size.

    Raises:
        ValueError: the body is invalid.
    """
    if json_size is None:
        raise ValueError("expected binary tensors, got a response without Inference-Header-Content-Length")
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
    """Return the binary tensors of a `ModelInferResponse`.

    Raises:
        ValueError: the numbers of names and tensors differ.
    """
    names = (output.name for output in response.outputs)
    return dict(zip(names, response.raw_output_contents, strict=True))


def _best(tensor: bytes) -> frozenset[int | str]:
    scores = np.frombuffer(tensor, "<f4")
    if not len(scores) or not np.isfinite(scores).all():
        raise ValueError("expected finite scores, got others, or none")
    return frozenset([int(scores.argmax())])


def _word(tensor: bytes) -> str:
    words = _split(tensor)
    if len(words) != 1:
        raise ValueError(f"expected one word as BYTES, got {len(words)}")
    return words[0]


def _split(tensor: bytes) -> list[str]:
    """Return the words of a tensor of BYTES."""
    words, begin = [], 0
    while begin < len(tensor):
        (size,) = LENGTH.unpack_from(tensor, begin) if len(tensor) >= begin + LENGTH.size else (-1,)
        begin += LENGTH.size
        if size < 0 or len(tensor) < begin + size:
            raise ValueError(f"expected words as BYTES, got {tensor[:40]!r}")
        words.append(tensor[begin : begin + size].decode())
        begin += size
    return words


def _words(found: Iterable[int | str]) -> str:
    names = sorted({*map(str, found)})
    more = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return " or ".join([*names[:MAX_NAMED], *more]) or "nothing"
