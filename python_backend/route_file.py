"""A route's file: read and checked, replaced atomically, and watched by whoever serves it."""

import os
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from python_backend.errors import InvalidConfig
from python_backend.model_config import ModelConfig, RouteSettings
from python_backend.routing import Route, Table, parse_route

IsReady = Callable[[str, int], bool]


def path_of(config: ModelConfig) -> Path:
    """Return where the route of the model `config` lies.

    Raises:
        InvalidConfig: the model names none, or one in a model's folder, where a change would reload it.
    """
    repository = config.folder.parent.resolve()
    path = repository / config.settings(RouteSettings).route
    folder = Path(os.path.normpath(path)).parent
    if folder != repository and folder.is_relative_to(repository):
        raise InvalidConfig(f"model '{config.name}': the route must lie outside model folders, got '{path}'")
    return path


def read_table(config: ModelConfig, text: bytes) -> Table:
    """Read a route for the model `config`: what it names must be in the repository.

    Raises:
        InvalidConfig: the text is no route, or a variant's model or version is not there.
    """
    route, output = parse_route(text), config.outputs[0].name
    try:
        versions = {
            each.name: config.pinned_network_version(each.model, each.version, output)
            for each in route.targets()
        }
    except OSError as error:  # such as a name too long for a folder
        raise InvalidConfig(f"cannot read what the route names: {error}") from None
    return Table(route, sha256(text).hexdigest(), versions)


def replace(path: Path, text: bytes) -> None:
    """Put `text` in the place of the file at once: a reader sees all of the old or all of the new."""
    target = path.resolve()  # a link stays, and what it leads to is replaced
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
            os.fchmod(new.fileno(), target.stat().st_mode & 0o777 if target.exists() else 0o644)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class RouteWatch:
    """The route file of a model that is being served; call `poll` from time to time.

    Args:
        config: of the model.
        is_ready: tells whether a version of a model can be called.
    """

    def __init__(self, config: ModelConfig, is_ready: IsReady) -> None:
        self.path = path_of(config)
        self._config = config
        self._is_ready = is_ready
        self._refused = ""
        self.table = read_table(config, self._read())

    def poll(self) -> Table | None:
        """Return the new table if the file has changed to a valid one, else None: the old one stays.

        Raises:
            InvalidConfig: the file is wrong, or names a version that is not ready; raised once per reason.
                It is looked at again with every call, so a version that becomes ready is taken.
        """
        try:
            text = self._read()
            if sha256(text).hexdigest() == self.table.sha256:
                self._refused = ""
                return None
            table = read_table(self._config, text)
            check_ready(table.route, self._is_ready)
        except InvalidConfig as error:
            if str(error) == self._refused:
                return None
            self._refused = str(error)
            raise
        self.table, self._refused = table, ""
        return table

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise InvalidConfig(f"cannot read '{self.path}': {error.strerror}") from None


def check_ready(route: Route, is_ready: IsReady) -> None:
    """Check that everything the route names can be called.

    Raises:
        InvalidConfig: a version of a model is not ready.
    """
    for each in route.targets():
        if not is_ready(each.model, each.version):
            raise InvalidConfig(f"'{each.name}' names version {each.version} of '{each.model}': not ready")
