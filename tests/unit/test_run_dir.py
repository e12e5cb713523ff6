"""Run directories: private, found by repository, cleaned up when their server is gone."""

import os
import shutil
import stat
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from nereid.base.errors import ServerError
from nereid.server import run_dir
from nereid.server.ports import Ports
from nereid.server.run_dir import ServerRecord
from tests.tables import cases


@pytest.fixture
def base(tmp_path):
    return run_dir.root({"XDG_RUNTIME_DIR": str(tmp_path)})


def record(repository, token: str = "secret") -> ServerRecord:
    return ServerRecord(1, "127.0.0.1", Ports(1, 2, 3), str(repository), "cpu", token)


def test_server_is_found_by_its_repository_and_its_token_is_private(base, tmp_path):
    ours, other = tmp_path / "ours", tmp_path / "other"
    written = record(ours)
    assert run_dir.find(base, ours) is None
    assert not base.exists()

    with run_dir.occupy(base, ours) as folder:
        run_dir.write(folder, written)
        assert (run_dir.find(base, ours), run_dir.find(base, other)) == (written, None)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (base, folder, folder / "server.json")]

    assert (run_dir.find(base, ours), folder.exists()) == (None, False)
    assert written.url("grpc") == "127.0.0.1:2"
    assert modes == [0o700, 0o700, 0o600]


def test_newest_of_two_servers_is_found(base, tmp_path):
    with run_dir.occupy(base, tmp_path) as older, run_dir.occupy(base, tmp_path) as newer:
        run_dir.write(older, record(tmp_path, "older"))
        os.utime(older / "server.json", (1, 1))
        run_dir.write(newer, record(tmp_path, "newer"))

        assert run_dir.find(base, tmp_path).token == "newer"


@cases("content", {"empty": b"", "list": b"[]", "no text": b"\xff\xfe", "fields": b"{}"})
def test_damaged_record_is_named(base, tmp_path, content):
    with run_dir.occupy(base, tmp_path) as folder:
        run_dir.write(folder, record(tmp_path))
        (folder / "server.json").write_bytes(content)

        (folder / "gateway.json").write_bytes(content)

        for find, name in ((run_dir.find, "server"), (run_dir.find_gateways, "gateway")):
            text = rf"'{folder}/{name}\.json' is damaged: expected .*, got: .*; fix: restart the process"
            with pytest.raises(ServerError, match=text):
                find(base, tmp_path)


def test_server_without_a_supervisor_is_an_orphan(base, tmp_path):
    with run_dir.occupy(base, tmp_path) as folder:
        left = folder.with_name("left")
        left.mkdir()
        server, other = (subprocess.Popen(["sleep", "60"], cwd=each) for each in (left, folder))
        try:
            run_dir.write(folder, replace(record(tmp_path), pid=other.pid))
            run_dir.write(left, replace(record(tmp_path), pid=server.pid))
            assert run_dir.orphans(base, tmp_path) == [(server.pid, left)]
            run_dir.write(left, replace(record(tmp_path), pid=other.pid))
            assert run_dir.orphans(base, tmp_path) == []
        finally:
            for each in (server, other):
                each.kill()
                each.wait()
        run_dir.write(left, replace(record(tmp_path), pid=server.pid))
        assert run_dir.orphans(base, tmp_path) == []


def test_directory_of_a_killed_server_is_neither_found_nor_kept(base, tmp_path):
    with run_dir.occupy(base, tmp_path) as folder:
        run_dir.write(folder, record(tmp_path))
        left_over = shutil.copytree(folder, folder.with_name("left-over"))

    assert run_dir.find(base, tmp_path) is None
    with run_dir.occupy(base, tmp_path):
        assert not left_over.exists()


def test_unusable_runtime_folder_is_not_used(tmp_path):
    """An XDG_RUNTIME_DIR that does not exist, as under sudo or cron, is replaced by the temporary folder."""
    expected = Path(tempfile.gettempdir()) / f"nereid-{os.getuid()}"

    assert run_dir.root({"XDG_RUNTIME_DIR": str(tmp_path / "nowhere")}) == run_dir.root({}) == expected


def test_folder_open_to_others_is_rejected(base, tmp_path):
    with run_dir.occupy(base, tmp_path) as folder:
        run_dir.write(folder, record(tmp_path))
        base.chmod(0o755)
        assert run_dir.find(base, tmp_path) is None

    with (
        pytest.raises(ServerError, match=r"must be a directory of user .* with mode 0700; fix: remove it"),
        run_dir.occupy(base, tmp_path),
    ):
        pass
