"""What operators do meanwhile: versions come and go, weights change, models are loaded again."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from loadtest.servers import Supervised
from loadtest.swap import HALF, NETWORK, ROUTE, References, write_candidate
from nereid.publish.publisher import Gates, publish, retire, rollback
from nereid.repository.layout import versions_there
from nereid.routes.change import insist, reweighted
from nereid.routes.served import RunningServer
from nereid.routes.target import find_route
from nereid.server import stubs
from nereid.server.control import Control

# Networks that take turns as the next version, and the pinned model that is loaded again.
CANDIDATES, RELOADED = 3, "classify_v1"
# How long a new version, and other weights, are left with their traffic.
PAUSE_S = 1.0


class Changes:
    """Changes a running server as operators do; `counts` is how often, by what.

    Args:
        running: the server, of a repository like the one that ships.
        folder: takes the networks that are published.
        references: are told what each version is to answer.
    """

    def __init__(self, running: Supervised, folder: Path, references: Sequence[References]) -> None:
        self.counts = {"published, rolled back and retired": 0, "weights changed": 0, "loaded again": 0}
        self._running, self._references = running, references
        numbers = range(1, CANDIDATES + 1)
        self._candidates = itertools.cycle([write_candidate(folder / str(each), each) for each in numbers])
        # No number is used twice.
        self._next = max(versions_there(running.repository / NETWORK)) + 1

    def cycle(self) -> None:
        """Do each once; everything is afterwards as it was."""
        self._publish()
        self._reweight({"v1": 90, "v2": 10})
        time.sleep(PAUSE_S)
        self._reweight({"v1": 50, "v2": 50})
        self._reload()

    def _publish(self) -> None:
        record, repository, source = self._running.record, self._running.repository, next(self._candidates)
        for each in self._references:
            each.add(self._next, source.parent)
        done = publish(repository, ROUTE, source, record, Gates(is_change_accepted=True), HALF)
        self._next = done.version + 1
        time.sleep(PAUSE_S)
        rollback(repository, ROUTE, record)
        retire(repository, ROUTE, done.version, record)
        self.counts["published, rolled back and retired"] += 1

    def _reweight(self, weights: dict[str, float]) -> None:
        target = find_route(self._running.repository, ROUTE)
        insist(target, reweighted(weights), RunningServer(self._running.record))
        self.counts["weights changed"] += 1

    def _reload(self) -> None:
        stubs.touch(self._running.repository / RELOADED / "1")
        Control(self._running.record).load(RELOADED)
        self.counts["loaded again"] += 1
