"""Batches of `classify_many`: the outcome of each image, and the images to send again. No I/O."""

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from nereid.client.classifier_errors import ClassifierError
from nereid.client.images import Unusable
from nereid.client.prediction import Prediction
from nereid.contract import read_bad_images, read_batch_limit

Outcome: TypeAlias = Prediction | ClassifierError | Unusable


class BatchSplit:
    """Images that share a request until the server rejects it.

    After a rejection, good images are sent again without the bad ones, or in smaller requests.

    Args:
        images: each an image file, or the error that prevented its encoding.
        limit: images per request.
    """

    def __init__(self, images: Sequence[bytes | Unusable], limit: int) -> None:
        self.limit = limit
        self._outcomes: dict[int, Outcome] = {}
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

    def succeeded(self, predictions: Sequence[Prediction]) -> None:
        """Record the predictions of the current request."""
        self._outcomes.update(zip(self._requests.popleft(), predictions, strict=True))

    def failed(self, error: ClassifierError | OSError) -> None:
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

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each image, in the order of the images."""
        return [self._outcomes[place] for place in sorted(self._outcomes)]


def _parts(places: list[int], size: int) -> list[list[int]]:
    return [places[start : start + size] for start in range(0, len(places), size)]
