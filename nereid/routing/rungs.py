"""The variants that one request tries, one after the other."""

from nereid.routing.assignment import BREAKER, FORCED, RETRY, Choice, Route


class Rungs:
    """The chosen variant, then those that replace it; each is tried at most once.

    Attributes:
        first, first_label: the choice, and the label of its variant in metrics.
        is_forced: whether the request names its variant, so that no other may respond.
    """

    def __init__(self, route: Route, first: Choice) -> None:
        self.first, self.first_label = first, first.variant.name
        self.is_forced = first.reason in FORCED
        others = () if self.is_forced else route.replacements
        self._left = [first, *(Choice(each, BREAKER) for each in others if each is not first.variant)]

    def __bool__(self) -> bool:
        return bool(self._left)

    def next(self) -> Choice:
        """Return the next choice, and remove it."""
        return self._left.pop(0)

    def repeat(self, choice: Choice) -> None:
        """Try a choice again before all others: another instance of its model runs."""
        self._left.insert(0, choice)

    def retry(self) -> None:
        """Note that a variant was tried: the remaining ones are retries."""
        self._left = [Choice(each.variant, RETRY) for each in self._left]
