"""A route's file: read and checked, replaced atomically, and watched by whoever serves it."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from nereid.config.model_config import ModelConfig, RouteSettings, TensorSpec
from nereid.routing.assignment import Route, Shadow, Table, parse_route
from nereid.serving_errors import InvalidConfig

IsReady = Callable[[str, int], bool]
MAX_BYTES = 1_000_000
# The outputs of a route that its variants do not give.
TOLD = ("variant", "version", "route_reason")


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
        InvalidConfig: the text is no route, or a model or version that it names is not there or has other
            tensors.
    """
    route, output = parse_route(text), config.outputs[0].name
    try:
        versions = {
            each.name: config.pinned_network_version(each.model, each.version, output)
            for each in route.targets()
        }
        for each in route.targets():
            _check_tensors(config, each.model, each.version)
    except OSError as error:  # such as a name too long for a folder
        raise InvalidConfig(f"cannot read what the route names: {error}") from None
    return Table(route, sha256(text).hexdigest(), versions)


def _check_tensors(config: ModelConfig, model: str, version: int) -> None:
    """Check that a model takes what the route hands on, and gives what it answers; one without config may."""
    if not (config.folder.parent / model / "config.pbtxt").exists():
        return
    theirs = config.sibling(model, version)
    outputs = [output for output in config.outputs if output.name not in TOLD]
    for ours, found in ((config.inputs, theirs.inputs), (outputs, theirs.outputs)):
        by_name = {tensor.name: tensor for tensor in found}
        for tensor in ours if by_name else ():
            other = by_name.get(tensor.name)
            if other is None or not _fits(tensor, other):
                got = f"{other.datatype} {list(other.dims)}" if other else "none"
                raise InvalidConfig(
                    f"model '{config.name}' names '{model}' for '{tensor.name}': "
                    f"expected {tensor.datatype} {list(tensor.dims)}, got {got}"
                )


def _fits(ours: TensorSpec, theirs: TensorSpec) -> bool:
    is_shape = len(ours.dims) == len(theirs.dims) and all(
        -1 in pair or pair[0] == pair[1] for pair in zip(ours.dims, theirs.dims, strict=True)
    )
    return is_shape and ours.datatype == theirs.datatype


def read(path: Path) -> tuple[bytes, os.stat_result]:
    """Return a file's content and status; never waits, and takes no more memory than a route needs.

    Raises:
        InvalidConfig: it is too large, or no file.
        OSError: it cannot be read.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InvalidConfig(f"'{path}' is no file")
        return read_all(file, str(path)), status


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_all(file: BinaryIO, name: str) -> bytes:
    """Return what `file`, called `name`, holds.

    Raises:
        InvalidConfig: it is more than a route can be.
    """
    text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise InvalidConfig(f"'{name}' has more than {MAX_BYTES:,} bytes")
    return text


def replace(path: Path, text: bytes, staging: Path | None = None) -> None:
    """Put `text` in the place of the file at once: a reader sees all of the old or all of the new.

    Args:
        staging: a folder of the same filesystem to write it in first; by default the file's own.
    """
    target = path.resolve()  # a link stays, and what it leads to is replaced
    handle, name = tempfile.mkstemp(dir=staging or target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as new:
            new.write(text)
            new.flush()
            _take_over(target, new.fileno())
            os.fsync(new.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _take_over(target: Path, handle: int) -> None:
    """Let who may read the file that is replaced read the new one."""
    try:
        before = target.stat()
    except FileNotFoundError:
        os.fchmod(handle, 0o644)
        return
    with contextlib.suppress(PermissionError):  # only root may give a file away
        os.fchown(handle, before.st_uid, before.st_gid)
    os.fchmod(handle, before.st_mode & 0o777)


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
            return read(self.path)[0]
        except OSError as error:
            raise InvalidConfig(f"cannot read '{self.path}': {error.strerror}") from None


def check_ready(route: Route, is_ready: IsReady) -> None:
    """Check that everything the route sends requests to can be called.

    A variant that is only for those who ask for it by name may be away: so a route can turn away from one
    that has failed.

    Raises:
        InvalidConfig: a version of a model is not ready.
    """
    for each in route.targets():
        is_asked = isinstance(each, Shadow) or each.weight or each.headers or each.name == route.default
        if is_asked and not is_ready(each.model, each.version):
            raise InvalidConfig(f"'{each.name}' names version {each.version} of '{each.model}': not ready")
