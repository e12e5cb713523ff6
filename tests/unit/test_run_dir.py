"""Run directories: private, found by repository, cleaned up when their server is gone."""

import os
import stat
import subprocess
import sys

import pytest

from ops import run_dir
from ops.embedded import Ports, ServerError
from ops.run_dir import ServerRecord


@pytest.fixture
def base(tmp_path):
    """This user's folder for run directories."""
    return run_dir.root({"XDG_RUNTIME_DIR": str(tmp_path)})


def record(repository, pid: int) -> ServerRecord:
    """Describe a server of `repository`."""
    return ServerRecord(pid, "127.0.0.1", Ports(1, 2, 3), str(repository), "cpu", "secret")


def test_server_is_found_by_its_repository(base, tmp_path):
    """A record written for one repository is found from it, and not from another."""
    ours, other = tmp_path / "ours", tmp_path / "other"
    written = record(ours, os.getpid())
    run_dir.write(run_dir.create(base, ours), written)

    assert (run_dir.find(base, ours), run_dir.find(base, other)) == (written, None)
    assert written.url("grpc") == "127.0.0.1:2"


def test_token_is_readable_by_its_owner_only(base, tmp_path):
    """Neither the folder nor the file with the token is open to others."""
    folder = run_dir.create(base, tmp_path)
    run_dir.write(folder, record(tmp_path, os.getpid()))

    modes = [stat.S_IMODE(path.stat().st_mode) for path in (base, folder / "server.json")]

    assert modes == [0o700, 0o600]


def test_dead_server_is_neither_found_nor_kept(base, tmp_path):
    """A record whose process is gone is ignored, and its folder removed by the next server."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = run_dir.create(base, tmp_path).rename(base / "moved")
    run_dir.write(stale, record(tmp_path, ended.pid))
    stale = stale.rename(run_dir.create(base, tmp_path).parent / str(ended.pid))

    assert run_dir.find(base, tmp_path) is None
    run_dir.create(base, tmp_path)
    assert not stale.exists()


def test_folder_open_to_others_is_refused(tmp_path):
    """A folder that others could write to could plant a backend: it is not used."""
    (tmp_path / f"nereid-{os.getuid()}").mkdir(mode=0o755)

    with pytest.raises(ServerError, match=r"must be a directory of user .* with mode 0700; mend: remove it"):
        run_dir.root({"XDG_RUNTIME_DIR": str(tmp_path)})
