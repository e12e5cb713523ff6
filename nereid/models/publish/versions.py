"""The versions of a network with their states and shares of the traffic, for `nereid versions`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid.backends.routing.assignment import shares
from nereid.models.publish.intake import description
from nereid.models.publish.network import Network, find_network
from nereid.models.routes.target import find_routes, read_state
from nereid.repository.checksums import CHECKSUMS, digest
from nereid.repository.layout import versions_there
from nereid.repository.onnx_file import network_path
from nereid.server.control import Control
from nereid.server.run_dir import ServerRecord

PUBLISHED = re.compile(r"^# published (?P<when>\S+) by (?P<who>\S+) from (?P<source>.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class VersionState:
    """One version of a network.

    Args:
        state: `ready` (loaded by the running server), `not loaded` (the policy serves it, the server has not
            loaded it), `published` (the policy serves it, no server runs), or `not served`.
        published: time of the publication; empty for a version that was copied by hand.
        changes: what was changed in the file, one sentence each.
        shares: part of the traffic, 0 to 1, by route.
    """

    version: int
    state: str
    size_bytes: int
    sha256: str
    published: str
    source: str
    changes: tuple[str, ...]
    pinned: tuple[str, ...]
    shares: Mapping[str, float]


def versions(repository: Path, name: str, record: ServerRecord | None) -> tuple[str, list[VersionState]]:
    """Return a network's name, and its versions, the newest first.

    Raises:
        WrongUsage: the network does not exist.
        OperationFailed, InvalidConfig: a route, config or description cannot be read, or the server does not
            respond.
    """
    network = find_network(repository, name)
    ready = Control(record).ready_versions() if record else None
    found = [
        _version_state(repository, network, version, ready) for version in versions_there(network.folder)
    ]
    return network.name, found[::-1]


def _version_state(
    repository: Path, network: Network, version: int, ready: Mapping[str, set[int]] | None
) -> VersionState:
    folder, own = network.folder / str(version), network.at_version(version)
    checksums = folder / CHECKSUMS
    origin = PUBLISHED.search(checksums.read_text()) if checksums.exists() else None
    files = [path for path in folder.rglob("*") if path.is_file()]
    model = network_path(folder, network.config(version).document)
    described = description.read(folder)
    names = tuple(pin.model for pin in own.pins)
    return VersionState(
        version=version,
        state=_state(network, version, names, ready),
        size_bytes=sum(path.stat().st_size for path in files),
        sha256=digest(model) if model.is_file() else "",
        published=origin["when"] if origin else "",
        source=origin["source"] if origin else "",
        changes=described.changes if described else (),
        pinned=names,
        shares=_shares(repository, own),
    )


def _state(
    network: Network, version: int, pinned: tuple[str, ...], ready: Mapping[str, set[int]] | None
) -> str:
    if version not in network.served():
        return "not served"
    if ready is None:
        return "published"
    # Clients call the pinned models, or the network itself if it has none.
    is_loaded = version in ready.get(network.name, ())
    is_ready = all(name in ready for name in pinned) if pinned else is_loaded
    return "ready" if is_ready else "not loaded"


def _shares(repository: Path, own: Network) -> dict[str, float]:
    found: dict[str, float] = {}
    for location in find_routes(repository):
        names = [each.variant.name for each in own.variants if each.route == location.name]
        if names:
            parts = shares(read_state(location).route())
            found[location.name] = sum(parts[name] for name in names)
    return found
