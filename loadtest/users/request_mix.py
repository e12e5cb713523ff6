"""The requests of a load test, and the checks of their responses."""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.users.photo_set import Photo
from loadtest.users.run_statistics import RunStatistics
from nereid.base.contract import LABEL, ROUTE_KEY_HEADER, SCORES, TEXT, VARIANT, VARIANT_HEADER

PLAIN, FORCED, STICKY = "plain", "forced", "sticky"
# Relative frequencies.
WAYS = {PLAIN: 2, FORCED: 1, STICKY: 1}
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


def read(result: Any, output: str = SCORES) -> Answer:
    """Read an `HttpResult`, or gRPC's `InferResult`; `output` has the result of the task, see `RESULTS`.

    Raises:
        Exception: one of `MALFORMED_ERRORS`: the response is not from a model of the task.
    """
    values, variants = result.as_numpy(output), result.as_numpy(VARIANT)
    if values is None:
        raise ValueError(f"expected {output}, got a response without it")
    if output == SCORES:
        if not np.isfinite(values).all():
            raise ValueError("expected finite scores, got others")
        results: frozenset[int | str] = frozenset([int(values.argmax())])
    else:
        results = frozenset(map(bytes.decode, values.ravel()))
    return Answer(results, "" if variants is None else variants.item().decode())


def _words(found: Iterable[int | str]) -> str:
    names = sorted({*map(str, found)})
    more = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return " or ".join([*names[:MAX_NAMED], *more]) or "nothing"
