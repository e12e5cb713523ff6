"""The loop of `nereid watch`: networks that appear in a folder are published once they are complete."""

import contextlib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from nereid.base import files
from nereid.base.errors import InvalidConfig, OperationFailed, WrongUsage
from nereid.base.processes import StopFlag
from nereid.base.watched_folder import POLL_INTERVAL_S, changes
from nereid.models.publish import publisher
from nereid.models.publish.drop_folder import DropFolder, Publish, TemporaryFailure, WriteLine, journal_of
from nereid.models.publish.examination import ExaminationFailed, ExaminationLimits
from nereid.models.publish.network import PublishedNetwork, find_network
from nereid.models.publish.staged_version import DESCRIPTION, read_description
from nereid.models.publish.transaction import locked_repository
from nereid.models.rollout.rollout_journal import RolloutActive
from nereid.models.routes.location import check_repository
from nereid.repository.checksums import CHECKSUMS, digest
from nereid.repository.onnx_file import network_path
from nereid.server.run_dir import ServerInfo

LOCK_TIMEOUT_S = 0.5


def publication(
    repository: Path,
    find_server: Callable[[], ServerInfo | None],
    limits: ExaminationLimits,
    share: float,
    report: WriteLine,
) -> Publish:
    """Return a function that publishes to a repository and its running server.

    A copy of the newest served version is not published again: a kill or a lost server may have prevented the
    entry for its publication in the drop folder's journal.
    """

    def publish(name: str, source: Path) -> tuple[str, int]:
        server_info = find_server()
        with _temporary(OperationFailed, InvalidConfig), locked_repository(repository, server_info, report):
            pass
        with _temporary(ExaminationFailed, publisher.RouteFull, RolloutActive, InvalidConfig):
            network = find_network(repository, name)
            if version := _find_published(network, source):
                report(f"{source.name}: identical to version {version} of '{network.name}'")
                return network.name, version
            done = publisher.publish(repository, name, source, server_info, limits, share, report)
            return done.model, done.version

    return publish


@contextlib.contextmanager
def _temporary(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise TemporaryFailure(str(error)) from error


def _find_published(network: PublishedNetwork, source: Path) -> int:
    """Return the newest served version of a network if it was published from `source`, else 0."""
    version = max(network.served_versions(), default=0)
    published_digests = _published_digests(network, version) if version else set()
    source_digests = _digests_below(source)
    networks = _networks_of(source) if source.is_dir() else source_digests
    return version if networks and networks <= published_digests <= source_digests else 0


def _published_digests(network: PublishedNetwork, version: int) -> set[str]:
    """Return the digests of the files that a version was published from, before its network was changed."""
    folder = network.folder / str(version)
    digests = _digests_below(folder)
    if described := read_description(folder):
        adapted = network_path(folder, network.config(version).document)
        digests -= {digest(path) for path in (folder / DESCRIPTION, adapted) if path.is_file()}
        digests.add(described.sha256)
    return digests


def check(folder: Path, repository: Path, model: str, share: float = 0) -> None:
    """Refuse a folder, repository, model or share that would cause every file to be rejected.

    Raises:
        WrongUsage: one of them does not exist, or one folder contains the other, or the share is invalid.
        OperationFailed: a package is missing, or a route cannot be read.
        InvalidConfig: a config cannot be read.
    """
    if not folder.is_dir():
        raise WrongUsage(f"cannot watch '{folder}': it is not a folder; fix: mkdir {folder}")
    drop_path, repository_path = folder.resolve(), repository.resolve()
    if drop_path.is_relative_to(repository_path) or repository_path.is_relative_to(drop_path):
        raise WrongUsage(
            f"cannot watch '{folder}': it contains the repository '{repository}', or is inside it; "
            "fix: watch a separate folder"
        )
    publisher.check_share(share)
    check_repository(repository)
    if model:
        find_network(repository, model)
    for package in ("watchfiles", "onnx"):
        if not importlib.util.find_spec(package):
            raise OperationFailed(
                f"nereid watch needs the package '{package}'; fix: pip install 'nereid-serving[publish]'"
            )


def watch(
    folder: Path,
    repository: Path,
    publish: Publish,
    *,
    settle_s: float,
    model: str,
    terms: str,
    is_polling: bool,
) -> None:
    """Publish networks that appear in a folder until SIGINT or SIGTERM; finish a running publication first.

    A second signal ends it immediately; the next command repairs the repository from its journal. Without
    `is_polling`, it waits for filesystem events.

    Raises:
        OperationFailed: another `nereid watch` watches the folder.
    """
    folder = folder.resolve()
    # The copies of entries are beside the repository, because others could change them in `folder`.
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    staging = files.state_folder(repository) / f"drop-{name}"
    with journal_of(folder).locked(LOCK_TIMEOUT_S) as append:
        stop = StopFlag()
        drops = DropFolder(
            folder,
            append,
            staging,
            publish,
            settle_s=settle_s,
            model=model,
            terms=terms,
            announce=partial(report, to_stdout=True),
            report=report,
        )
        report(f"watching {folder}")
        for _ in changes(folder, min(settle_s / 2, POLL_INTERVAL_S), is_polling, stop, report):
            while not stop.is_set() and drops.step():
                pass
    report("stopped")


def report(line: str, to_stdout: bool = False) -> None:
    """Write a line to stderr; a closed stderr does not stop the watcher."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stdout if to_stdout else sys.stderr, flush=True)


def _networks_of(folder: Path) -> set[str]:
    paths = [network_path(folder, {"default_model_filename": path.name}) for path in folder.glob("*.onnx")]
    return {digest(path) for path in paths if path.is_file()}


def _digests_below(path: Path) -> set[str]:
    paths = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return {digest(path) for path in paths if path.name != CHECKSUMS}
