"""Adapter through which a gateway knows the models and the routes of a local repository."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from nereid.application.repository_publisher import RepositoryPublisher
from nereid.config.model_config import read_pbtxt
from nereid.errors import OperationFailed, WrongUsage
from nereid.gateway.models import DocumentField, PreviewRefused
from nereid.gateway.route_control import (
    RolloutOrder,
    RolloutState,
    RouteConflict,
    RouteFailed,
    RouteRefused,
    RouteState,
    VariantState,
)
from nereid.gateway.tasks.gateway_task import TASKS
from nereid.imaging.preprocess_settings import PreprocessSettings
from nereid.imaging.preview import preview
from nereid.repository.layout import output_names
from nereid.rollout import orders
from nereid.rollout.plan import make_plan
from nereid.rollout.progress import describe
from nereid.rollout.rollout_journal import Journals, RolloutActive
from nereid.routes import change
from nereid.routes.change import Proposal, Propose
from nereid.routes.served import NO_SERVER, SERVED, RunningServer, served_status
from nereid.routes.target import (
    RouteLocation,
    fields_of,
    find_route,
    find_routes,
    models_with,
    preprocessing_of,
    present_table,
    read_state,
)
from nereid.routes.target import RouteState as StoredRoute
from nereid.routing.assignment import shares
from nereid.server.run_dir import ServerRecord
from nereid.serving_errors import InvalidConfig, InvalidImage
from nereid.text.fields.specification import read_specification


class RepositoryModels:
    """The models of a repository; its methods block.

    Args:
        repository: the folder of the models.
        find: returns the running server, if one runs.
        first: models that come first, and are offered even if they are not routes.
    """

    def __init__(
        self, repository: Path, find: Callable[[], ServerRecord | None], first: Sequence[str] = ()
    ) -> None:
        self._repository, self._find, self._first = repository, find, first
        self.publisher = RepositoryPublisher(repository)

    def names(self) -> Sequence[str]:
        """Return the models of each task: its routes, or all such models if the task has no route."""
        found = (name for task in TASKS for name in models_with(self._repository, task.outputs))
        return list(dict.fromkeys([*self._first, *found]))

    def outputs(self, name: str) -> Collection[str]:
        """Return the outputs in the config of a model; empty if it cannot be read."""
        try:
            return output_names(read_pbtxt(self._repository / name / "config.pbtxt"))
        except (InvalidConfig, OSError):
            return ()

    def route(self, name: str) -> "RepositoryRoute | None":
        """Return the control of a route, or None for a model that is not a route."""
        is_route = any(route.name == name for route in find_routes(self._repository))
        return RepositoryRoute(self._repository, name, self._find) if is_route else None

    def preview(self, name: str, image: bytes) -> bytes | None:
        """Return an image as a model's network sees it (PNG); for a route, that of its default variant.

        Raises:
            PreviewRefused: it is not an image, or damaged.
        """
        config = preprocessing_of(self._repository, name)
        if config is None:
            return None
        try:
            return preview(PreprocessSettings.from_config(config), {"image": image}).png
        except InvalidImage as error:
            raise PreviewRefused(error.args[0]) from None

    def fields(self, name: str) -> list[DocumentField] | None:
        """Return the fields of a reader of documents; for a route, those of its default variant."""
        try:
            path = fields_of(self._repository, name)
            rules = read_specification(path).fields if path else ()
        except (InvalidConfig, OperationFailed, OSError):
            return None
        found = [
            DocumentField(each.name, each.required, [carrier.name for carrier in each.carriers])
            for each in rules
        ]
        return found or None


class RepositoryRoute:
    """One route of a repository; its methods block. `find` returns the running server, if one runs."""

    def __init__(self, repository: Path, name: str, find: Callable[[], ServerRecord | None]) -> None:
        self._repository, self._name, self._find = repository, name, find

    def show(self) -> RouteState:
        """Return the route file, and whether the server serves it.

        Raises:
            RouteFailed: the route does not exist, or its file cannot be read.
        """
        try:
            target = find_route(self._repository, self._name)
            table = present_table(target, read_state(target))
            status, served = served_status(self._server(), target.name, table.sha256)
            rollout = self._rollout(target)
        except (OperationFailed, InvalidConfig, OSError) as error:
            raise RouteFailed(str(error)) from None
        route = table.route
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
            target.name,
            route.generation,
            route.default,
            status == SERVED,
            _without_address(status),
            variants,
            rollout,
        )

    def set_weights(self, weights: Mapping[str, float], generation: int | None, author: str) -> RouteState:
        """Change weights of variants, and wait until the server serves them.

        Args:
            weights: new weight by variant; other variants keep their weights.
            generation: the generation that the route must still have; None for any.
            author: recorded as the author in the history.

        Raises:
            RouteConflict: the route has another generation.
            RouteRefused: a variant does not exist, or the weights are invalid.
            RouteFailed: the file cannot be written, or the server does not accept it.
        """
        try:
            target = find_route(self._repository, self._name)
            change.change(target, _propose(weights, generation, author), self._server())
        except (WrongUsage, InvalidConfig) as error:
            raise RouteRefused(str(error)) from None
        except (OperationFailed, OSError) as error:
            raise RouteFailed(str(error)) from None
        return self.show()

    def order_rollout(
        self, order: RolloutOrder, candidate: str, steps: Sequence[str | float], author: str
    ) -> RouteState:
        """Start a rollout with the default limits, or give an order to the active one.

        Raises:
            RouteConflict: another rollout is active, no controller runs, or the phase forbids the order.
            RouteRefused: the candidate or the steps do not fit.
            RouteFailed: the server does not respond, or a file cannot be written.
        """
        who = f"{order} through the gateway by {author}"
        try:
            target = find_route(self._repository, self._name)
            if order in ("start", "resume", "promote") and not orders.wait_controlled(target):
                raise RouteConflict("no controller runs; fix: nereid serve, or nereid rollout controller")
            if order == "start":
                plan = make_plan(candidate=candidate, **({"steps": steps} if steps else {}))
                orders.start(target, plan, self._find(), who)
            else:
                orders.order(target, order, who)
            if order == "abort" and not orders.is_controlled(target):
                orders.finish(target, self._find, lambda line: None)
        except (orders.OrderRefused, RolloutActive) as error:
            raise RouteConflict(str(error)) from None
        except WrongUsage as error:
            raise RouteRefused(str(error)) from None
        except (OperationFailed, InvalidConfig, OSError) as error:
            raise RouteFailed(str(error)) from None
        return self.show()

    def _rollout(self, target: RouteLocation) -> RolloutState | None:
        try:
            state = Journals.of(target).latest()
        except OperationFailed:  # a damaged journal; the commands name it
            state = None
        if state is None:
            return None
        if state.waiting:  # it may have addresses and paths of this machine
            state = replace(state, waiting="see nereid rollout status")
        allowed: list[str] = [each for each, phases in orders.ORDERS.items() if state.phase in phases]
        return RolloutState(state.number, state.plan.candidate, state.phase, allowed, describe(state))

    def _server(self) -> RunningServer | None:
        record = self._find()
        return RunningServer(record) if record else None


def _without_address(status: str) -> str:
    """Return the status of a route file without the server's address, for clients of a gateway."""
    if status in (SERVED, NO_SERVER):
        return status
    return "not served yet, or unknown"


def _propose(weights: Mapping[str, float], generation: int | None, author: str) -> Propose:
    def propose(present: StoredRoute) -> Proposal:
        current = present.route().generation
        if generation is not None and generation != current:
            raise RouteConflict(f"expected generation {generation}, got {current}: the route has changed")
        return Proposal(change.reweighted(weights)(present).route, f"set through the gateway by {author}")

    return propose
