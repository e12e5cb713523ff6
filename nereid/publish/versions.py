"""`nereid versions`: what there is of a network, what is served, and who gets it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid.publish.network import Network, find_network
from nereid.repository.check import SUMS, digest
from nereid.repository.layout import versions_there
from nereid.repository.onnx_file import network_path
from nereid.routes.target import find_routes, read_state
from nereid.routing.assignment import shares
from nereid.server.control import Control
from nereid.server.run_dir import ServerRecord

PUBLISHED = re.compile(r"^# published (?P<when>\S+) by (?P<who>\S+) from (?P<source>.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class VersionState:
    """One version of a network.

    `state` is `ready` (the running server answers with it), `not loaded` (it should, and does not),
    `published` (no server runs), or `not served`; `shares` has, by route, its part of the traffic, 0 to 1,
    and `published` is empty for a version that was put there by hand.
    """

    version: int
    state: str
    size_bytes: int
    sha256: str
    published: str
    source: str
    pinned: tuple[str, ...]
    shares: Mapping[str, float]


def versions(repository: Path, name: str, record: ServerRecord | None) -> tuple[str, list[VersionState]]:
    """Return a network's name, and its versions, the newest first.

    Raises:
        WrongUsage: there is no such network.
        OperationFailed, InvalidConfig: a route or config cannot be read, or the server does not answer.
    """
    network = find_network(repository, name)
    ready = Control(record).ready_versions() if record else None
    found = [_state(repository, network, version, ready) for version in versions_there(network.folder)]
    return network.name, found[::-1]


def _state(
    repository: Path, network: Network, version: int, ready: Mapping[str, set[int]] | None
) -> VersionState:
    folder, own = network.folder / str(version), network.of(version)
    sums = folder / SUMS
    told = PUBLISHED.search(sums.read_text()) if sums.exists() else None
    files = [path for path in folder.rglob("*") if path.is_file()]
    document = network.config(version).document
    model = network_path(folder, document)
    names = tuple(pin.model for pin in own.pins)
    return VersionState(
        version=version,
        state=_word(network, version, names, ready),
        size_bytes=sum(path.stat().st_size for path in files),
        sha256=digest(model) if model.is_file() else "",
        published=told["when"] if told else "",
        source=told["source"] if told else "",
        pinned=names,
        shares=_shares(repository, own),
    )


def _word(
    network: Network, version: int, pinned: tuple[str, ...], ready: Mapping[str, set[int]] | None
) -> str:
    if version not in network.served():
        return "not served"
    if ready is None:
        return "published"
    # What callers ask is the pinned models; a network without any is asked itself.
    is_loaded = version in ready.get(network.name, ())
    is_ready = all(name in ready for name in pinned) if pinned else is_loaded
    return "ready" if is_ready else "not loaded"


def _shares(repository: Path, own: Network) -> dict[str, float]:
    found: dict[str, float] = {}
    for target in find_routes(repository):
        names = [branch.variant.name for branch in own.branches if branch.route == target.name]
        if names:
            parts = shares(read_state(target).route())
            found[target.name] = sum(parts[name] for name in names)
    return found
