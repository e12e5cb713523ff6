"""The rollouts of route `r` from variant `old` to `new`, as a test starts and sees them."""

from pathlib import Path
from typing import Any

from nereid.models.rollout import commands
from nereid.models.rollout.plan import RolloutPlan, make_plan
from nereid.models.rollout.rollout_journal import Rollout, RolloutJournals
from nereid.models.routes.location import find_route, read_route_file
from nereid.server.run_dir import ServerInfo
from tests.routes import document, variant

ROUTE = "r"
# The limits are wide, so that few requests suffice.
QUICK = {"candidate": "new", "steps": [10, 50, 100], "min_requests": 50}
QUICK |= {"max_error_increase": 0.05, "max_slow_increase": 0.9}


def before(**more: Any) -> dict[str, Any]:
    """Return the route before a rollout: `new` is served only on request."""
    return document(variant("old", "net_old", 100), variant("new", "net_new", 0), **more)


class Rollouts:
    """The rollouts on a server; `values` are those of their plans that differ from QUICK."""

    def __init__(self, repository: Path, server_info: ServerInfo, **values: Any) -> None:
        self.server_info, self.location = server_info, find_route(repository)
        self._values = QUICK | values

    @property
    def state(self) -> Any:
        return RolloutJournals.of(self.location).latest()

    def weights(self) -> dict[str, float]:
        return {entry.name: entry.weight for entry in read_route_file(self.location).route().variants}

    def plan(self, **changed: Any) -> RolloutPlan:
        return make_plan(**self._values | changed)

    def start(self, **changed: Any) -> Rollout:
        return commands.start(self.location, self.plan(**changed), self.server_info)
