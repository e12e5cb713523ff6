"""The server that a command uses."""

from dataclasses import replace

from typer.testing import CliRunner

from nereid.base.assets import REPOSITORY
from nereid.cli.main import app
from nereid.server import run_dir
from nereid.server.ports import Ports, free_ports
from nereid.server.run_dir import ServerRecord


def test_further_servers_of_the_repository_are_named(tmp_path):
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    base = run_dir.root(environment)
    record = ServerRecord(1001, "127.0.0.1", Ports(*free_ports(3)), str(REPOSITORY), "cpu", "t")
    with run_dir.occupy(base, REPOSITORY) as one, run_dir.occupy(base, REPOSITORY) as other:
        run_dir.write(one, record)
        alone = CliRunner().invoke(app, ["versions", "classify"], env=environment)
        run_dir.write(other, replace(record, pid=1002))
        both = CliRunner().invoke(app, ["versions", "classify"], env=environment)

    assert "note:" not in alone.stderr
    note = (
        "note: this command uses the newest server of this repository, pid 1002; it does not reach pid 1001"
    )
    assert both.stderr.count(note) == 1
