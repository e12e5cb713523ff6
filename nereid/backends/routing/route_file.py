"""Route files: reading, checks, and the watch of a served route."""

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from nereid.backends.routing.assignment import LoadedRoute, Route, Shadow, parse_route
from nereid.base.config.model_config import ModelConfig, RouteSettings
from nereid.base.contract import ROUTE_OUTPUTS
from nereid.base.errors import InvalidConfig
from nereid.base.files import read_regular

if TYPE_CHECKING:
    import numpy as np

IsReady = Callable[[str, int], bool]
MAX_BYTES = 1_000_000


def path_of(config: ModelConfig) -> Path:
    """Return the path of the route file of the model `config`.

    Raises:
        InvalidConfig: the model names no file, or one in a model's folder, where a change reloads the model.
    """
    repository = config.folder.parent.resolve()
    path = repository / config.settings(RouteSettings).route
    folder = Path(os.path.normpath(path)).parent
    if folder != repository and folder.is_relative_to(repository):
        raise InvalidConfig(f"model '{config.name}': the route must lie outside model folders, got '{path}'")
    return path


def load_route(config: ModelConfig, content: bytes) -> LoadedRoute:
    """Read a route for the model `config`; its models and versions must be in the repository.

    Raises:
        InvalidConfig: the content is not a route, or a model or version that it names is missing or has other
            tensors.
    """
    route, output = parse_route(content), config.outputs[0].name
    try:
        versions = {
            target.name: config.pinned_network_version(target.model, target.version, output)
            for target in route.targets()
        }
        for target in route.targets():
            _check_tensors(config, target.model, target.version)
    except OSError as error:  # for example, a name too long for a folder
        raise InvalidConfig(f"cannot read the models of the route: {error}") from None
    return LoadedRoute(route, sha256(content).hexdigest(), versions, _answer(config, route))


def _answer(config: ModelConfig, route: Route) -> dict[str, "np.ndarray"]:
    if not route.answer:
        return {}
    # Imported here because NumPy slows the start of each command.
    from nereid.backends.routing.configured_answer import read_answer

    return read_answer(route.answer, config.outputs)


def _check_tensors(config: ModelConfig, model: str, version: int) -> None:
    """Check that a model has the tensors of the route; a model without config is not checked."""
    if not (config.folder.parent / model / "config.pbtxt").exists():
        return
    model_config = config.sibling(model, version)
    outputs = [output for output in config.outputs if output.name not in ROUTE_OUTPUTS]
    for route_tensors, model_tensors in (
        (config.inputs, model_config.inputs),
        (outputs, model_config.outputs),
    ):
        by_name = {tensor.name: tensor for tensor in model_tensors}
        for tensor in route_tensors if by_name else ():
            other = by_name.get(tensor.name)
            if other is None or not tensor.fits(other):
                raise InvalidConfig(
                    f"model '{config.name}' names '{model}' for '{tensor.name}': "
                    f"expected {tensor.type_and_dims}, got {other.type_and_dims if other else 'none'}"
                )


def read(path: Path) -> tuple[bytes, os.stat_result]:
    """Return a file's content and status, reading at most `MAX_BYTES`; errors are as for `read_regular`."""
    return read_regular(path, MAX_BYTES)


class RouteWatch:
    """The route file of the model `config`; call `poll` periodically.

    `is_ready` returns whether a version of a model is ready.
    """

    def __init__(self, config: ModelConfig, is_ready: IsReady) -> None:
        self.path = path_of(config)
        self._config = config
        self._is_ready = is_ready
        self._last_error = ""
        self.loaded = load_route(config, self._read())

    def poll(self) -> LoadedRoute | None:
        """Return the new route if the file has changed to a valid one, else None: the old one stays.

        Raises:
            InvalidConfig: the file is invalid, or names a version that is not ready; raised once per reason.
                Each call checks the file again, so the route is used as soon as the version is ready.
        """
        try:
            content = self._read()
            if sha256(content).hexdigest() == self.loaded.sha256:
                self._last_error = ""
                return None
            loaded = load_route(self._config, content)
            check_ready(loaded.route, self._is_ready)
        except InvalidConfig as error:
            if str(error) == self._last_error:
                return None
            self._last_error = str(error)
            raise
        self.loaded, self._last_error = loaded, ""
        return loaded

    def _read(self) -> bytes:
        try:
            return read(self.path)[0]
        except OSError as error:
            raise InvalidConfig(f"cannot read '{self.path}': {error.strerror}") from None


def check_ready(route: Route, is_ready: IsReady) -> None:
    """Check that every model to which the route sends requests is ready.

    A variant that serves only on request may be absent, so that a route can move away from a failed one.

    Raises:
        InvalidConfig: a version of a model is not ready.
    """
    for entry in route.targets():
        replaces = entry in route.replacements
        is_needed = isinstance(entry, Shadow) or entry.weight or entry.headers or replaces
        if is_needed and not is_ready(entry.model, entry.version):
            raise InvalidConfig(f"'{entry.name}' names version {entry.version} of '{entry.model}': not ready")
