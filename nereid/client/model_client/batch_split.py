"""Batches of `infer_many`: the outcome of each image, and the images to send again. No I/O."""

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from nereid.base.contract import read_bad_images, read_batch_limit
from nereid.client.classifier_errors import ClassifierError, UnusableImage
from nereid.client.images import Unusable

# A result, of any kind.
Value = TypeVar("Value")


class BatchSplit(Generic[Value]):
    """Images that share a request until the server rejects it.

    After a rejection, good images are sent again without the bad ones, or in smaller requests.

    Args:
        images: each an image file, or the error that prevented its encoding.
        names: of the images, for their outcomes.
        limit: images per request.
    """

    def __init__(self, images: Sequence[bytes | Unusable], names: Sequence[str], limit: int) -> None:
        self.limit = limit
        self._names = names
        self._outcomes: dict[int, Value | ClassifierError | Unusable] = {}
        self._images: dict[int, bytes] = {}
        for place, image in enumerate(images):
            if isinstance(image, bytes):
                self._images[place] = image
            else:
                self._outcomes[place] = image
        self._requests = deque(_parts(list(self._images), limit))

    def next_request(self) -> list[bytes] | None:
        """Return the images of the next request, or None after all have an outcome."""
        return [self._images[place] for place in self._requests[0]] if self._requests else None

    def succeeded(self, results: Sequence[Value]) -> None:
        """Record the results of the current request."""
        self._outcomes.update(zip(self._requests.popleft(), results, strict=True))

    def failed(self, error: ClassifierError) -> None:
        """Record the error of the current request, and queue the images that may still succeed."""
        places = self._requests.popleft()
        text = str(error)
        if (limit := read_batch_limit(text)) and limit < len(places):
            self.limit = limit
            self._requests.extendleft(reversed(_parts(places, self.limit)))
        elif len(places) > 1 and (bad := read_bad_images(text, len(places))):
            rest = [place for index, place in enumerate(places) if index not in bad.reasons]
            self._outcomes.update(
                {places[index]: type(error)(bad.prefix + reason) for index, reason in bad.reasons.items()}
            )
            # If the list does not fit the request, each image goes alone.
            self._requests.extendleft(reversed(_parts(rest, len(places) if bad.reasons else 1)))
        else:
            self._outcomes.update(dict.fromkeys(places, error))

    def outcomes(self) -> list[Value | ClassifierError]:
        """Return the outcome of each image, in the order of the images."""
        return [_named(self._outcomes[place], name) for place, name in enumerate(self._names)]


def _named(outcome: Any, name: str) -> Any:
    if not isinstance(outcome, Exception):
        return replace(outcome, image=name)
    if isinstance(outcome, ClassifierError):
        error = copy.copy(outcome)  # images that share a request share its error
    else:
        error = UnusableImage(str(outcome))
        error.__cause__ = outcome
    error.image = name
    return error


def _parts(places: list[int], size: int) -> list[list[int]]:
    return [places[start : start + size] for start in range(0, len(places), size)]
