"""Run directories: their `server.json` lets other commands find a server by its repository.

A run directory is locked while its server runs. The kernel releases the lock however the server ends, so an
unlocked directory is a leftover.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec

from nereid.base import files
from nereid.base.addresses import UNIX, unix_path
from nereid.base.contract import GRPC_PORT
from nereid.base.errors import ServerError
from nereid.server.ports import Ports

LOOPBACK, ALL_INTERFACES = "127.0.0.1", ("0.0.0.0", "::")
# Source: unix(7), sun_path without the final null byte.
MAX_SOCKET_PATH = 107
Info = TypeVar("Info", "ServerInfo", "GatewayInfo")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A running server: its addresses, its repository and profile, and the token of its administrative APIs.

    `health_port` is the port of its supervisor's pages, 0 for none. `sockets` is the folder of Triton's own
    sockets if the server is guarded; host and ports then belong to its gateway. `cores` is the number of
    cores that the instances are fitted to, 0 if they are not; `fitted_backends` lists the backends of such
    models. `completes_configs` says whether a model with an incomplete config can be loaded. `traces` is the
    socket of the trace collector, "" for none; `trace_share` and `objective_ms` select the traces to keep.
    `records` is the file with the latest trace records.
    """

    pid: int
    host: str
    ports: Ports
    repository: str
    profile: str
    token: str
    health_port: int = 0
    model_control_mode: str = "explicit"
    sockets: str = ""
    cores: int = 0
    fitted_backends: tuple[str, ...] = ()
    completes_configs: bool = True
    traces: str = ""
    records: str = ""
    trace_share: float = 0.0
    objective_ms: float = 0.0

    @property
    def all_ports(self) -> dict[str, int]:
        """The ports by name, including the one for the supervisor's pages."""
        return asdict(self.ports) | ({"health": self.health_port} if self.health_port else {})

    @property
    def health_url(self) -> str:
        """The address of the supervisor's pages, HOST:PORT."""
        return f"{reachable(self.host)}:{self.health_port}"

    def url(self, protocol: str) -> str:
        """Return Triton's own address for `http`, `grpc` or `metrics`: HOST:PORT or `unix:PATH`."""
        if self.sockets:
            return socket_url(Path(self.sockets), protocol)
        return f"{reachable(self.host)}:{getattr(self.ports, protocol)}"


def reachable(host: str) -> str:
    """Return the host at which this machine reaches a server that listens on `host`."""
    return LOOPBACK if host in ALL_INTERFACES else host


def socket_url(folder: Path, protocol: str) -> str:
    """Return the address of a guarded server for `http`, `grpc` or `metrics`."""
    # Triton appends the port to the path of gRPC's socket.
    return f"{UNIX}{folder}/{protocol}.sock" + (f":{GRPC_PORT}" if protocol == "grpc" else "")


def socket_folder(run_dir: Path, name: str = "sockets") -> Path:
    """Return a folder for sockets, by default those of a guarded server; the same after each restart.

    It is in the run directory, or in /tmp if that path is too long for a socket.
    """
    inside = run_dir / name
    if len(unix_path(socket_url(inside, "grpc"))) <= MAX_SOCKET_PATH:  # the longest name of a socket
        return inside
    digest = blake2b(str(run_dir).encode(), digest_size=8).hexdigest()
    return Path("/tmp") / f"nereid-{os.getuid()}-{digest}.{name}"


def trace_socket(run_dir: Path) -> Path:
    """Return the path of the socket for trace records; `make_socket_folder` creates its folder."""
    return socket_folder(run_dir, "traces") / "socket"


def make_socket_folder(folder: Path) -> None:
    """Create an empty folder for sockets that only this user can open.

    Raises:
        ServerError: the folder belongs to another user.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise ServerError(f"{folder} already exists and belongs to another user; fix: remove it") from None


@dataclass(frozen=True, slots=True)
class GatewayInfo:
    """A running gateway of a repository's server."""

    pid: int
    host: str
    port: int

    @property
    def url(self) -> str:
        """The address, HOST:PORT."""
        return f"{reachable(self.host)}:{self.port}"


FILES: dict[type, str] = {ServerInfo: "server.json", GatewayInfo: "gateway.json"}


def root(environment: Mapping[str, str]) -> Path:
    """Return the folder for this user's run directories; it may not exist yet."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    parent = runtime if Path(runtime).is_dir() and runtime else tempfile.gettempdir()
    return Path(parent) / f"nereid-{os.getuid()}"


@contextlib.contextmanager
def occupy(run_root: Path, repository: Path) -> Iterator[Path]:
    """Create the run directory of a server or gateway of `repository`: locked in the context, then removed.

    Leftover directories of the same repository are removed.

    Raises:
        ServerError: `run_root` is open to another user, who could read tokens or plant backends.
    """
    _make_private(run_root)
    folder = _folder(run_root, repository)
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as held:
        with files.locked_folder(folder):
            for left_over in folder.iterdir():
                # Its process may be removing it.
                with contextlib.suppress(FileNotFoundError):
                    if not files.is_locked(left_over):
                        shutil.rmtree(left_over, ignore_errors=True)
            run_dir = Path(tempfile.mkdtemp(dir=folder))
            held.enter_context(files.locked_folder(run_dir))
        try:
            yield run_dir
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)


def write(run_dir: Path, info: ServerInfo | GatewayInfo) -> None:
    """Store `info` in `run_dir`, atomically and readable by this user only."""
    name = FILES[type(info)]
    new = run_dir / f".{name}"
    new.touch(mode=0o600)
    new.write_bytes(msgspec.json.encode(info))
    new.replace(run_dir / name)


def find(run_root: Path, repository: Path) -> ServerInfo | None:
    """Return the newest running server of `repository`, or None; ignores files that others could write."""
    servers = find_servers(run_root, repository)
    return servers[-1] if servers else None


def find_servers(run_root: Path, repository: Path) -> list[ServerInfo]:
    """Return the running servers of `repository`, the newest last."""
    return _read_running(run_root, _folder(run_root, repository).name, ServerInfo)


def find_folder(run_root: Path, repository: Path) -> Path | None:
    """Return the run directory of the newest running server of `repository`, or None."""
    paths = _running(run_root, _folder(run_root, repository).name, ServerInfo)
    return paths[-1].parent if paths else None


def find_all(run_root: Path) -> list[ServerInfo]:
    """Return all running servers of this user, the newest last."""
    return _read_running(run_root, "*", ServerInfo)


def find_gateways(run_root: Path, repository: Path) -> list[GatewayInfo]:
    """Return the running gateways of `repository`, the newest last."""
    return _read_running(run_root, _folder(run_root, repository).name, GatewayInfo)


def orphans(run_root: Path, repository: Path) -> list[tuple[int, Path]]:
    """Return pid and run directory of the servers of `repository` whose supervisor exited before they did."""
    servers = []
    for path in _folder(run_root, repository).glob(f"*/{FILES[ServerInfo]}") if _is_private(run_root) else ():
        with contextlib.suppress(OSError, ServerError):
            pid = _read(path, ServerInfo).pid
            if not files.is_locked(path.parent) and is_server_of(pid, path.parent):
                servers.append((pid, path.parent))
    return servers


def is_server_of(pid: int, run_dir: Path) -> bool:
    """Return whether a process is the live server of a run directory, which is its working directory.

    After a reboot, another process may have a recorded pid.
    """
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "cwd").readlink() == run_dir.resolve()
    return False


def _running(run_root: Path, folder: str, kind: type) -> list[Path]:
    """Return the info files of running processes, the newest last; ignores files that others could write."""
    dated: list[tuple[float, Path]] = []
    for path in run_root.glob(f"{folder}/*/{FILES[kind]}") if _is_private(run_root) else ():
        with contextlib.suppress(FileNotFoundError):  # its process may have just ended
            if files.is_locked(path.parent):
                dated.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(dated)]


def _read_running(run_root: Path, folder: str, kind: type[Info]) -> list[Info]:
    infos: list[Info] = []
    for path in _running(run_root, folder, kind):
        with contextlib.suppress(FileNotFoundError):  # its process may have just ended
            infos.append(_read(path, kind))
    return infos


def _read(path: Path, kind: type[Info]) -> Info:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServerError(
            f"'{path}' is damaged: expected the record of this release, got: {error}",
            "restart the process that wrote it",
        ) from None


def _folder(run_root: Path, repository: Path) -> Path:
    return run_root / blake2b(os.fsencode(os.path.realpath(repository)), digest_size=8).hexdigest()


def _make_private(run_root: Path) -> None:
    run_root.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(run_root):
        owner = f"user {os.getuid()}"
        raise ServerError(f"{run_root} must be a directory of {owner} with mode 0700; fix: remove it")


def _is_private(run_root: Path) -> bool:
    try:
        status = run_root.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
