"""The route of a repository on this machine, as a gateway shows and changes it."""

from collections.abc import Callable, Mapping
from pathlib import Path

from nereid.errors import OperationFailed, WrongUsage
from nereid.gateway.route_control import RouteConflict, RouteFailed, RouteRefused, RouteState, VariantState
from nereid.routes import change
from nereid.routes.change import Proposal, Propose
from nereid.routes.served import NO_SERVER, SERVED, RunningServer, ask_served
from nereid.routes.target import Present, check, find_route, look
from nereid.routing.assignment import shares
from nereid.server.run_dir import ServerRecord
from nereid.serving_errors import InvalidConfig


class RepositoryRoute:
    """One route; its methods block.

    Args:
        repository: the one that is served.
        name: of the route.
        find: returns the running server of the repository, if there is one.
    """

    def __init__(self, repository: Path, name: str, find: Callable[[], ServerRecord | None]) -> None:
        self._repository, self._name, self._find = repository, name, find

    def show(self) -> RouteState:
        """Return the route as its file has it, and what the server makes of it.

        Raises:
            RouteFailed: there is no such route, or its file cannot be read.
        """
        try:
            target = find_route(self._repository, self._name)
            present = look(target)
            route = present.route()
            table = check(target, present.text or b"")
            told, served = ask_served(self._server(), target.name, table.sha256)
        except (OperationFailed, InvalidConfig, OSError) as error:
            raise RouteFailed(str(error)) from None
        share, breakers = shares(route), served.breakers if served else {}
        variants = [
            VariantState(
                each.name,
                each.model,
                table.network_versions[each.name],
                each.weight,
                share[each.name],
                breakers.get((each.name, table.network_versions[each.name]), ""),
            )
            for each in route.variants
        ]
        return RouteState(
            target.name, route.generation, route.default, told == SERVED, _without_address(told), variants
        )

    def set_weights(self, weights: Mapping[str, float], generation: int | None, who: str) -> RouteState:
        """Give variants new weights, and wait until the server serves that.

        Args:
            weights: by variant; others keep theirs.
            generation: which the route must still have; None for any.
            who: whose change it is, for the history.

        Raises:
            RouteConflict: the route has another generation.
            RouteRefused: there is no such variant, or the weights make no route.
            RouteFailed: it cannot be written, or the server does not take it.
        """
        try:
            target = find_route(self._repository, self._name)
            change.change(target, _propose(weights, generation, who), self._server())
        except (WrongUsage, InvalidConfig) as error:
            raise RouteRefused(str(error)) from None
        except (OperationFailed, OSError) as error:
            raise RouteFailed(str(error)) from None
        return self.show()

    def _server(self) -> RunningServer | None:
        record = self._find()
        return RunningServer(record) if record else None


def _without_address(told: str) -> str:
    """Return for callers of a gateway what a server makes of a route file."""
    if told in (SERVED, NO_SERVER):
        return told
    return "not served yet, or not known to be"


def _propose(weights: Mapping[str, float], generation: int | None, who: str) -> Propose:
    def propose(present: Present) -> Proposal:
        current = present.route().generation
        if generation is not None and generation != current:
            raise RouteConflict(f"the route has generation {current}, not {generation}")
        return Proposal(change.reweighted(weights)(present).route, f"set through the gateway by {who}")

    return propose
