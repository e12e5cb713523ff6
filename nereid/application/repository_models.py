"""Models, routes and rollouts of a local repository, as a gateway knows and changes them."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from nereid.application.repository_publisher import publish
from nereid.backends.routing.assignment import LoadedRoute, shares
from nereid.base.config.model_config import ModelConfig, read_pbtxt
from nereid.base.errors import InvalidConfig, InvalidImage, OperationFailed, WrongUsage
from nereid.base.task_registry import TASKS
from nereid.gateway.failures import UNAVAILABLE_RETRY_S, Failure, invalid_request
from nereid.gateway.route_control import RolloutChange, RolloutState, RouteState, VariantState, Weights
from nereid.models.rollout import commands
from nereid.models.rollout.commands import ALLOWED_PHASES, CommandRefused
from nereid.models.rollout.plan import make_plan
from nereid.models.rollout.rollout_journal import RolloutActive, RolloutJournals
from nereid.models.routes import change
from nereid.models.routes.change import NO_SERVER_STATUS, SERVED_STATUS, served_status
from nereid.models.routes.location import (
    RouteFileSnapshot,
    RouteLocation,
    find_route,
    find_routes,
    load_current_route,
    models_with,
    preprocessing_of,
    read_route_file,
)
from nereid.repository.repository_index import output_names, versions_on_disk
from nereid.server.run_dir import ServerInfo
from nereid.vision.imaging.preprocess_settings import PreprocessSettings
from nereid.vision.imaging.preprocessor import preview


class RepositoryModels:
    """The models of a repository; its methods block.

    Args:
        find: returns the running server, if one runs.
        first: models that are listed first, and offered even if they are not routes.
    """

    publish = staticmethod(publish)

    def __init__(
        self, repository: Path, find: Callable[[], ServerInfo | None], first: Sequence[str] = ()
    ) -> None:
        self.repository, self._find, self._first = repository, find, first

    def names(self) -> Sequence[str]:
        """Return the models of each task: its routes, or all such models if the task has no route."""
        models = (name for task in TASKS for name in models_with(self.repository, task.outputs))
        return list(dict.fromkeys([*self._first, *models]))

    def outputs(self, name: str) -> Collection[str]:
        """Return the outputs in the config of a model; empty if it cannot be read."""
        try:
            return output_names(read_pbtxt(self.repository / name / "config.pbtxt"))
        except (InvalidConfig, OSError):
            return ()

    def route(self, name: str) -> "RepositoryRoute | None":
        """Return the control of a route, or None for a model that is not a route."""
        return RepositoryRoute(self.repository, name, self._find) if self._is_route(name) else None

    def preview(self, name: str, image: bytes) -> bytes | None:
        """Return an image as the network of a model, or of a route's default variant, sees it (PNG).

        Raises:
            Failure: it is not an image, or damaged.
        """
        config = preprocessing_of(self.repository, self._pinned(name)[0])
        if config is None:
            return None
        try:
            return preview(PreprocessSettings.from_config(config), {"image": image}).png
        except InvalidImage as error:
            raise Failure("invalid_image", error.args[0]) from None

    def config(self, name: str) -> ModelConfig | None:
        """Return a model's config, or a route's default variant's; None if it cannot be read."""
        try:
            model, version = self._pinned(name)
            return ModelConfig.from_file(self.repository / model, version)
        except (InvalidConfig, OperationFailed, OSError):
            return None

    def _is_route(self, name: str) -> bool:
        return any(route.name == name for route in find_routes(self.repository))

    def _pinned(self, name: str) -> tuple[str, int]:
        """Return model and version of a route's default variant; of another model, its newest version."""
        if not self._is_route(name):
            return name, max(versions_on_disk(self.repository / name), default=1)
        route = read_route_file(find_route(self.repository, name)).route()
        variant = next(variant for variant in route.variants if variant.name == route.default)
        return variant.model, variant.version


class RepositoryRoute:
    """The `RouteControl` of a route in a repository; `find` returns the running server, if one runs."""

    def __init__(self, repository: Path, name: str, find: Callable[[], ServerInfo | None]) -> None:
        self._repository, self._name, self._find = repository, name, find

    def show(self) -> RouteState:
        """Return the route file, and whether the server serves it."""
        with _failures("the route cannot be read"):
            location = find_route(self._repository, self._name)
            loaded = load_current_route(location, read_route_file(location))
            status, served = served_status(self._find(), location.name, loaded.sha256)
            rollout = _rollout(location)
        route, variants = loaded.route, _variants(loaded, served.breakers if served else {})
        # The server's address is not for clients of a gateway.
        detail = status if status in (SERVED_STATUS, NO_SERVER_STATUS) else "not served yet, or unknown"
        return RouteState(
            location.name, route.generation, route.default, status == SERVED_STATUS, detail, variants, rollout
        )

    def set_weights(self, wanted: Weights, author: str) -> RouteState:
        """Change weights of variants, and wait until the server serves them."""

        def propose(current: RouteFileSnapshot) -> change.Proposal:
            generation = current.route().generation
            if wanted.generation not in (None, generation):
                text = f"expected generation {wanted.generation}, got {generation}: the route has changed"
                raise Failure("conflict", text)
            note = f"set through the gateway by {author}"
            return change.Proposal(change.propose_weights(wanted.weights)(current).route, note)

        failed = "the server does not serve the change; see the route and the log"
        with _failures(failed, WrongUsage, InvalidConfig):
            change.change(find_route(self._repository, self._name), propose, self._find())
        return self.show()

    def order_rollout(self, wanted: RolloutChange, author: str) -> RouteState:
        """Start a rollout with the default limits, or give an order to the active one."""
        order, steps = wanted.order, wanted.steps
        who = f"{order} through the gateway by {author}"
        with _failures("the rollout cannot be changed now; see the log", WrongUsage):
            location = find_route(self._repository, self._name)
            if order in ("start", "resume", "promote") and not commands.wait_controlled(location):
                text = "no controller is running; fix: nereid serve, or nereid rollout controller"
                raise Failure("conflict", text)
            if order == "start":
                plan = make_plan(candidate=wanted.candidate, **({"steps": steps} if steps else {}))
                commands.start(location, plan, self._find(), who)
            else:
                commands.issue(location, order, who)
            if order == "abort" and not commands.is_controlled(location):
                commands.finish(location, self._find, lambda line: None)
        return self.show()


def _variants(loaded: LoadedRoute, breakers: Mapping[tuple[str, str], str]) -> list[VariantState]:
    share, versions = shares(loaded.route), loaded.network_versions
    return [
        VariantState(v.name, v.model, version, v.weight, share[v.name], breakers.get((v.name, version), ""))
        for v in loaded.route.variants
        for version in [versions[v.name]]
    ]


def _rollout(location: RouteLocation) -> RolloutState | None:
    try:
        rollout = RolloutJournals.of(location).latest()
    except OperationFailed:  # a damaged journal; the commands name it
        return None
    if rollout is None:
        return None
    if rollout.waiting:  # it may have addresses and paths of this machine
        rollout = replace(rollout, waiting="see nereid rollout status")
    allowed: list[str] = [order for order, phases in ALLOWED_PHASES.items() if rollout.phase in phases]
    return RolloutState(rollout.number, rollout.plan.candidate, rollout.phase, allowed, str(rollout))


@contextlib.contextmanager
def _failures(failed: str, *refused: type[Exception]) -> Iterator[None]:
    """Translate errors into `RouteControl` errors.

    Args:
        failed: the message for `unavailable`; the error itself may have paths of this machine.
        refused: classes of errors that are the caller's fault.
    """
    try:
        yield
    except (CommandRefused, RolloutActive) as error:
        raise Failure("conflict", str(error)) from None
    except refused as error:
        raise invalid_request(str(error)) from None
    except (OperationFailed, InvalidConfig, OSError) as error:
        raise Failure("unavailable", failed, UNAVAILABLE_RETRY_S) from error
