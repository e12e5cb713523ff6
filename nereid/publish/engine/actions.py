"""The actions that a change of a repository is made of: each can be done twice, and taken back twice.

So whoever finds some of them done, however that came about, does them all, or takes them all back. Their
order keeps the repository such that a server which starts at any moment can load it.
"""

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from nereid import files
from nereid.config.model_config import read_pbtxt
from nereid.errors import OperationFailed
from nereid.publish.engine import variants, warm
from nereid.repository import pbtxt
from nereid.repository.layout import CONFIGS, config_files, hidden_models, served_versions
from nereid.routes.change import change_with_retry
from nereid.routes.served import RunningServer
from nereid.routes.target import find_route
from nereid.server.control import Control, Refused
from nereid.server.run_dir import ServerRecord

READY_S, POLL_S = 60.0, 0.05
# How long a request that chose a variant just before it left the route may take to reach its model.
DRAIN_S = 1.0
ROUTE_S = 30.0


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where actions take place.

    `staging` holds `new`, what is to come into the repository; `old`, what was taken out of it; and `before`,
    files as they were. `record` is that of the running server, if there is one; `report` gets what is done.
    """

    repository: Path
    staging: Path
    record: ServerRecord | None
    report: Callable[[str], None]

    @property
    def control(self) -> Control | None:
        """The running server, to be told what to load."""
        return Control(self.record) if self.record else None

    @property
    def server(self) -> RunningServer | None:
        """The running server, to be asked about routes."""
        return RunningServer(self.record) if self.record else None


class Install(Struct, frozen=True, tag=True):
    """A file or folder that comes into the repository: a `model`, a `version` of one, or neither."""

    path: str
    model: str = ""
    version: int = 0

    def forward(self, site: Workspace) -> None:
        """Move it in, at once."""
        source, target = site.staging / "new" / self.path, site.repository / self.path
        if source.exists():
            if target.exists():
                raise OperationFailed(f"'{target}' is there already")
            files.move(source, target)
        elif not target.exists():
            raise OperationFailed(f"'{target}' is gone")
        site.report(f"{self.path}: in the repository")

    def backward(self, site: Workspace) -> None:
        """Move it out, at once; a server may have it loaded, and then lets go of it.

        What is still staged never came in: then another thing of that name is there, and stays.
        """
        source, target = site.repository / self.path, site.staging / "old" / self.path
        if (site.staging / "new" / self.path).exists():
            return
        if source.exists():
            shutil.rmtree(target, ignore_errors=True)
            files.move(source, target)
        if self.version:
            _let_go(site, self.model, self.version)
        elif self.model and site.control:
            site.control.unload(self.model)
        site.report(f"{self.path}: out of the repository")


class Policy(Struct, frozen=True, tag=True):
    """A version that is served: in config.pbtxt and in those of all profiles.

    Files that say `all` stay as they are: Triton 24.10 loads every version anew, in the background, when a
    config changes that is not the one in use.
    """

    model: str
    version: int

    def forward(self, site: Workspace) -> None:
        """Add it; each file is replaced at once."""
        for path in self._files(site):
            before = self._before(site, path)
            if not before.exists():
                before.parent.mkdir(parents=True, exist_ok=True)
                files.replace(before, path.read_bytes())
            self._write(site, path, {*self._others(path), self.version})
        site.report(f"{self.model}: version {self.version} is to be served")

    def backward(self, site: Workspace) -> None:
        """Take it out, or restore the files as they were, and let a server that has it let go of it."""
        files = self._files(site)
        for path in files:
            before = self._before(site, path)
            if before.exists():
                self._replace(site, path, before.read_text())
            else:
                self._write(site, path, self._others(path))
        if files:
            _let_go(site, self.model, self.version)
        site.report(f"{self.model}: version {self.version} is not to be served any more")

    def _files(self, site: Workspace) -> list[Path]:
        files = config_files(site.repository / self.model)
        return [path for path in files if "all" not in read_pbtxt(path).get("version_policy", {})]

    def _before(self, site: Workspace, path: Path) -> Path:
        return site.staging / "before" / path.relative_to(site.repository)

    def _others(self, path: Path) -> set[int]:
        folder = path.parent.parent if path.parent.name == CONFIGS else path.parent
        return {*served_versions(folder, read_pbtxt(path), without=self.version)}

    def _write(self, site: Workspace, path: Path, versions: set[int]) -> None:
        self._replace(site, path, pbtxt.with_versions(path.read_text(), sorted(versions)))

    def _replace(self, site: Workspace, path: Path, text: str) -> None:
        if text != path.read_text():
            files.replace(path, text.encode(), site.staging)


class Load(Struct, frozen=True, tag=True):
    """A version of a model that the running server is to have loaded."""

    model: str
    version: int

    def forward(self, site: Workspace) -> None:
        """Load it, if its profile has use for it."""
        control = site.control
        if control is None or not self._is_wanted(site, control):
            return
        control.load(self.model)
        _wait(lambda: control.is_ready(self.model, self.version), f"{self} is not ready")
        site.report(f"{self.model}: version {self.version} is ready")

    def backward(self, site: Workspace) -> None:
        """Do nothing: whoever takes the files away tells the server."""

    def __str__(self) -> str:
        return f"version {self.version} of '{self.model}'"

    def _is_wanted(self, site: Workspace, control: Control) -> bool:
        profile = site.record.profile if site.record else ""
        is_hidden = self.model in hidden_models(site.repository, profile)
        return not is_hidden or self.model in control.ready_versions()


class Warm(Struct, frozen=True, tag=True):
    """A loaded version that answers batches of every size before anybody depends on it."""

    model: str
    version: int

    def forward(self, site: Workspace) -> None:
        """Ask it."""
        if site.record and site.control and site.control.is_ready(self.model, self.version):
            sizes = warm.warm(site.record, site.repository / self.model, self.version)
            site.report(f"{self.model}: version {self.version} answers batches of 1 to {sizes}")

    def backward(self, site: Workspace) -> None:
        """Do nothing."""


class AddVariant(Struct, frozen=True, tag=True):
    """A variant of a route."""

    route: str
    name: str
    model: str
    weight: float

    def forward(self, site: Workspace) -> None:
        """Add it to the route, and wait until that is served."""
        self._change(site, variants.added(self.name, self.model, self.weight))

    def backward(self, site: Workspace) -> None:
        """Take it out, and give requests that have chosen it time to reach its model.

        Raises:
            VariantInUse: it has been given other traffic since.
        """
        if not (site.repository / self.route).exists():
            return
        self._change(site, variants.removed(self.name, self.model, self.weight))
        if site.server:
            time.sleep(DRAIN_S)

    def _change(self, site: Workspace, propose: variants.Propose) -> None:
        target = find_route(site.repository, self.route)
        site.report(change_with_retry(target, propose, site.server, ROUTE_S))


Action = Install | Policy | Load | Warm | AddVariant


def forward(actions: Iterable[Action], site: Workspace) -> None:
    """Do all actions, in their order."""
    for action in actions:
        action.forward(site)


def backward(actions: Iterable[Action], site: Workspace) -> None:
    """Take all actions back, the last one first."""
    for action in reversed([*actions]):
        action.backward(site)


def _let_go(site: Workspace, model: str, version: int) -> None:
    """Load a model as its folder is now, if the server still has a version that is gone from there."""
    control = site.control
    if control and version in control.ready_versions().get(model, ()):
        control.load(model)
        _wait(lambda: not control.is_ready(model, version), f"version {version} of '{model}' is still loaded")


def _wait(is_so: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + READY_S
    while not is_so():
        if time.monotonic() > deadline:
            raise Refused(f"{otherwise} after {READY_S:g} s")
        time.sleep(POLL_S)
