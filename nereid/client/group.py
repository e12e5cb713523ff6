"""Images that are sent in one request: what became of each, and which are to be sent again. No I/O."""

import re
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from nereid.client.errors import ClassifierError
from nereid.client.prediction import Prediction

# Why something that was given as an image cannot be sent: `nereid.client.images.encoded`.
Unusable: TypeAlias = OSError | TypeError | ValueError
Outcome: TypeAlias = Prediction | ClassifierError | Unusable
# Source: `_merge` of nereid/imaging/pipeline.py, and core r24.10. A test asks a server for both.
_BAD = re.compile(r"(\d+) of (\d+) images cannot be used: (.*)", re.DOTALL)
_EACH = re.compile(r"(?:^|; )image (\d+): ")
_LIMIT = re.compile(r"batch-size must be <= (\d+)")


class Group:
    """A few images that share a request for as long as the server takes them together.

    Args:
        images: each an image file, or why there is none.
        limit: how many images a request may have.
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

    def next(self) -> list[bytes] | None:
        """Return the images of the next request, or None once all have an outcome."""
        return [self._images[place] for place in self._requests[0]] if self._requests else None

    def answered(self, predictions: Sequence[Prediction]) -> None:
        """Note the answer to the request."""
        self._outcomes.update(zip(self._requests.popleft(), predictions, strict=True))

    def failed(self, error: ClassifierError | OSError) -> None:
        """Note that the request failed: what of it may be answered otherwise is sent again."""
        places = self._requests.popleft()
        text = str(error)
        if (most := _LIMIT.search(text)) and 0 < int(most[1]) < len(places):
            self.limit = int(most[1])
            self._requests.extendleft(reversed(_parts(places, self.limit)))
        elif len(places) > 1 and (named := _BAD.search(text)):
            bad = bad_images(named, len(places))
            rest = [place for index, place in enumerate(places) if index not in bad]
            prefix = text[: named.start()]
            self._outcomes.update(
                {places[index]: type(error)(prefix + reason) for index, reason in bad.items()}
            )
            # What names no image that was sent is no reason to trust in any.
            self._requests.extendleft(reversed(_parts(rest, len(places) if bad else 1)))
        else:
            self._outcomes.update(dict.fromkeys(places, error))

    def outcomes(self) -> list[Outcome]:
        """Return what became of each image, in their order."""
        return [self._outcomes[place] for place in sorted(self._outcomes)]


def bad_images(named: re.Match[str], count: int) -> dict[int, str]:
    """Return why each image that a refusal names is bad, by its index; nothing if it is not understood."""
    _, *pairs = _EACH.split(named[3])
    reasons = {int(index): reason for index, reason in zip(pairs[::2], pairs[1::2], strict=True)}
    is_understood = int(named[1]) == len(reasons) == len(pairs) // 2 and int(named[2]) == count
    return reasons if is_understood and max(reasons) < count else {}


def _parts(places: list[int], size: int) -> list[list[int]]:
    return [places[start : start + size] for start in range(0, len(places), size)]
