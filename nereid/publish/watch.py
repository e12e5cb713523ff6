"""`nereid watch`: a folder whose networks are published as they appear, each once it is complete."""

import contextlib
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from nereid import files
from nereid.errors import OperationFailed, WrongUsage
from nereid.processes import StopFlag
from nereid.publish import publisher
from nereid.publish.drop_folder import JOURNAL, STAGING, DropFolder, Publish, Tell, TemporaryFailure
from nereid.publish.engine.engine import locked_repository
from nereid.publish.examination.examine import ExaminationFailed
from nereid.publish.network import Network, find_network
from nereid.repository.check import SUMS, digest
from nereid.repository.onnx_file import network_path
from nereid.server.run_dir import ServerRecord
from nereid.serving_errors import InvalidConfig
from nereid.watched_folder import POLL_S, changes

LOCK_S = 0.5


def publication(
    repository: Path,
    find_record: Callable[[], ServerRecord | None],
    gates: publisher.Gates,
    weight: float,
    report: Tell,
) -> Publish:
    """Return what publishes to a repository, and to the server that runs at that moment.

    What is the newest served version already is not published again: so nothing is published twice when it
    was a kill, or a server that was gone, that came between a publication and its being remembered.
    """

    def publish(name: str, source: Path) -> tuple[str, int]:
        try:
            return publish_new(name, source)
        except (ExaminationFailed, publisher.RouteFull, InvalidConfig) as error:
            raise TemporaryFailure(str(error)) from error

    def publish_new(name: str, source: Path) -> tuple[str, int]:
        record = find_record()
        try:
            with locked_repository(repository, record, report):
                pass
        except (OperationFailed, InvalidConfig) as error:
            raise TemporaryFailure(str(error)) from error
        network = find_network(repository, name)
        if version := find_published(network, source):
            report(f"{source.name}: version {version} of '{network.name}' is the same")
            return network.name, version
        done = publisher.publish(repository, name, source, record, gates, weight, report)
        return done.model, done.version

    return publish


def find_published(network: Network, source: Path) -> int:
    """Return the newest served version of a network if it was made of the same files, else 0."""
    version = max(network.served(), default=0)
    own = _digests_below(network.folder / str(version)) if version else set()
    theirs = _digests_below(source)
    networks = _networks_of(source) if source.is_dir() else theirs
    return version if networks and networks <= own <= theirs else 0


def check(folder: Path, repository: Path, model: str) -> None:
    """Refuse what would only have every file rejected.

    Raises:
        WrongUsage: there is no such folder, repository or model, or the first two are not apart.
        OperationFailed: a package is missing, or a route cannot be read.
        InvalidConfig: a config cannot be read.
    """
    if not folder.is_dir():
        raise WrongUsage(f"{folder} is no folder")
    ours, theirs = folder.resolve(), repository.resolve()
    if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
        raise WrongUsage(f"{folder} and the repository {repository} must not lie one in the other")
    if not repository.is_dir():
        raise WrongUsage(f"{repository} is no model repository: there is no such folder")
    if model:
        find_network(repository, model)
    for package in ("watchfiles", "onnx"):
        if not importlib.util.find_spec(package):
            raise OperationFailed(
                f"nereid watch needs the package '{package}'; fix: pip install -e '.[publish]'"
            )


def watch(
    folder: Path, publish: Publish, *, settle_s: float, model: str, terms: str, is_polling: bool
) -> None:
    """Publish what appears in a folder until SIGINT or SIGTERM, which lets a publication come to its end.

    A second signal ends it at once, which the repository's journal makes good.

    Args:
        is_polling: whether to ask the filesystem rather than to be told.

    Raises:
        OperationFailed: another `nereid watch` watches the folder.
        OSError: its journal cannot be written.
    """
    folder = folder.resolve()
    with files.locked_file(folder / JOURNAL, "nereid watch", LOCK_S) as log:
        stop = StopFlag()
        shutil.rmtree(folder / STAGING, ignore_errors=True)
        drops = DropFolder(
            folder, log, publish, settle_s=settle_s, model=model, terms=terms, say=_say, tell=tell
        )
        tell(f"watching {folder}")
        for _ in changes(folder, min(settle_s / 2, POLL_S), is_polling, stop, tell):
            while not stop.is_set() and drops.step():
                pass
    tell("stopped")


def tell(line: str) -> None:
    """Write a line to stderr; a reader that went away stops nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)


def _networks_of(folder: Path) -> set[str]:
    paths = [network_path(folder, {"default_model_filename": each.name}) for each in folder.glob("*.onnx")]
    return {digest(path) for path in paths if path.is_file()}


def _digests_below(path: Path) -> set[str]:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return {digest(each) for each in files if each.name != SUMS}
