"""Servers to measure: the real one, on free ports, for as long as a context lasts."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ops import embedded


@contextlib.contextmanager
def served(
    folder: Path,
    environment: Mapping[str, str],
    profile: str = embedded.DEFAULT_PROFILE,
    repository: Path = embedded.REPOSITORY,
    flags: Sequence[str] = (),
) -> Iterator[embedded.EmbeddedServer]:
    """Serve a repository until ready.

    Args:
        folder: takes what the server writes; several servers may share one.
        environment: to start the server from.
        flags: for `tritonserver`.
    """
    ports = embedded.Ports(*embedded.free_ports(3))
    options = embedded.ServerOptions(repository, profile, ports=ports, flags=tuple(flags))
    run_dir = folder / f"server-{ports.http}"
    run_dir.mkdir()
    with embedded.EmbeddedServer(options, run_dir, environment) as server:
        yield server
