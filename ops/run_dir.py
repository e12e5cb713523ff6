"""Where a running server leaves its `server.json`, so that other commands find it by repository."""

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from ops.embedded import Ports, ServerError

SERVER_FILE = "server.json"


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A running server: where it listens, what it serves, and the token of its administrative APIs."""

    pid: int
    host: str
    ports: Ports
    repository: str
    profile: str
    token: str

    def url(self, protocol: str) -> str:
        """Return HOST:PORT for `http` or `grpc`."""
        return f"{self.host}:{getattr(self.ports, protocol)}"


def root(environment: Mapping[str, str]) -> Path:
    """Return this user's folder for run directories, made private.

    Raises:
        ServerError: the folder belongs to somebody else, who could then read tokens or plant backends.
    """
    base = environment.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"nereid-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        owner = f"user {os.getuid()}"
        raise ServerError(f"{folder} must be a directory of {owner} with mode 0700; mend: remove it")
    return folder


def create(base: Path, repository: Path) -> Path:
    """Make the run directory of a server of `repository`; those of servers that are gone are removed."""
    folder = _folder(base, repository)
    for stale in folder.glob("*"):
        if not _is_alive(int(stale.name)):
            shutil.rmtree(stale, ignore_errors=True)
    run_dir = folder / str(os.getpid())
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def write(run_dir: Path, record: ServerRecord) -> None:
    """Store `record` in `run_dir`, readable by this user only."""
    path = run_dir / SERVER_FILE
    path.touch(mode=0o600)
    path.write_text(json.dumps(asdict(record)))


def find(base: Path, repository: Path) -> ServerRecord | None:
    """Return the newest running server of `repository`, if there is one."""
    files = sorted(_folder(base, repository).glob(f"*/{SERVER_FILE}"), key=lambda path: path.stat().st_mtime)
    for path in reversed(files):
        record = json.loads(path.read_text())
        if _is_alive(record["pid"]):
            return ServerRecord(**record | {"ports": Ports(**record["ports"])})
    return None


def _folder(base: Path, repository: Path) -> Path:
    return base / blake2b(str(repository.resolve()).encode(), digest_size=8).hexdigest()


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
