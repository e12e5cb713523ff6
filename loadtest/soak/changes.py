"""The changes by operators during a soak: versions, weights and reloads."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from loadtest.servers import Supervised
from loadtest.swap import GATES, HALF, NETWORK, ROUTE, References, write_candidate
from nereid.publish.publisher import publish, retire, rollback
from nereid.repository.layout import versions_there
from nereid.routes.change import change_with_retry, reweighted
from nereid.routes.served import RunningServer
from nereid.routes.target import find_route
from nereid.server.control import Control
from nereid.server.supervision import stubs

# The number of networks that are published in turn, and the pinned model that is reloaded.
CANDIDATES, RELOADED = 3, "classify_v1"
# The time that a new version, or new weights, get traffic.
PAUSE_S = 1.0


class Changes:
    """Changes a running server as operators do; `counts` has the number of changes by kind.

    Args:
        running: a server of a copy of the default repository.
        folder: takes the published networks.
        references: get the expected scores of each version.
    """

    def __init__(self, running: Supervised, folder: Path, references: Sequence[References]) -> None:
        self.counts = {"published, rolled back and retired": 0, "weights changed": 0, "loaded again": 0}
        self._running, self._references = running, references
        numbers = range(1, CANDIDATES + 1)
        self._candidates = itertools.cycle([write_candidate(folder / str(each), each) for each in numbers])
        # Version numbers are never reused.
        self._next = max(versions_there(running.repository / NETWORK)) + 1

    def cycle(self) -> None:
        """Make each change once; the end equals the begin."""
        self._publish()
        self._reweight({"v1": 90, "v2": 10})
        time.sleep(PAUSE_S)
        self._reweight({"v1": 50, "v2": 50})
        self._reload()

    def _publish(self) -> None:
        record, repository, source = self._running.record, self._running.repository, next(self._candidates)
        for each in self._references:
            each.add(self._next, source.parent)
        done = publish(repository, ROUTE, source, record, GATES, HALF)
        self._next = done.version + 1
        time.sleep(PAUSE_S)
        rollback(repository, ROUTE, record)
        retire(repository, ROUTE, done.version, record)
        self.counts["published, rolled back and retired"] += 1

    def _reweight(self, weights: dict[str, float]) -> None:
        target = find_route(self._running.repository, ROUTE)
        change_with_retry(target, reweighted(weights), RunningServer(self._running.record))
        self.counts["weights changed"] += 1

    def _reload(self) -> None:
        stubs.touch(self._running.repository / RELOADED / "1")
        Control(self._running.record).load(RELOADED)
        self.counts["loaded again"] += 1
