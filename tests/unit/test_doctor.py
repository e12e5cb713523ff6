"""Findings of `nereid doctor`."""

import importlib.util
import resource

import pytest

from nereid.base.assets import REPOSITORY
from nereid.insight.observe import doctor
from nereid.insight.observe.doctor import examine
from nereid.insight.observe.gpu_findings import Finding
from nereid.server import run_dir
from nereid.server.installation import INSTALL
from nereid.server.ports import Ports, free_ports
from nereid.server.run_dir import ServerRecord
from tests.tables import cases


@pytest.mark.parametrize("is_ours", [True, False], ids=["this repository", "another"])
def test_port_of_the_repositorys_own_server_is_not_a_problem(tmp_path, is_ours):
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    grpc = free_ports(1)[0]  # nothing listens there
    record = ServerRecord(7, "127.0.0.1", Ports(8000, grpc, 8002), str(REPOSITORY), "cpu", "")

    with run_dir.occupy(run_dir.root(environment), REPOSITORY) as folder:
        run_dir.write(folder, record)
        found = {each.check: each for each in examine(environment, REPOSITORY if is_ours else tmp_path)}

    if is_ours:
        serves = "process 7 serves this repository on 127.0.0.1:8000"
        assert found["server"] == Finding("server", "ok", serves)
        assert found["http port"] == Finding("http port", "ok", "8000 is in use by this repository's server")
        assert "in use" not in found["grpc port"].detail
    else:
        assert "server" not in found
        assert "this repository" not in found["http port"].detail


def test_missing_part_is_a_failure_with_its_fix(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (name != "pytriton" and find_spec(name)) or None
    )

    found = {each.check: each for each in examine({"XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path)}

    assert found["Triton"] == Finding("Triton", "fail", "nvidia-pytriton is not installed", INSTALL)


@cases(
    enough=(8192, 1024, ""),
    unlimited=(-1, 4096, ""),
    few_files=(1024, 4096, "ulimit -n 8192, or LimitNOFILE of the service"),
    short_queue=(20_000, 128, "sysctl net.core.somaxconn=1024"),
)
def test_limits_of_connections_are_checked(files, waiting, fix, tmp_path, monkeypatch):
    """Thousands of connections need open files, and a queue for those that are not accepted yet."""
    (tmp_path / "somaxconn").write_text(f"{waiting}\n")
    monkeypatch.setattr(doctor, "SOMAXCONN", tmp_path / "somaxconn")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    findings = examine({"XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path)
    found = {each.check: each for each in findings}["connections"]

    assert (found.status, found.fix) == ("note" if fix else "ok", fix)
