"""`nereid status` without a server, and its lines; tests/e2e/test_your_model.py has it with a server."""

import json

from typer.testing import CliRunner

from nereid.base.assets import REPOSITORY
from nereid.base.units import format_duration
from nereid.cli import status as command
from nereid.cli.main import app
from nereid.insight.observe.status import ModelStatus, ServerStatus, Status
from nereid.server.run_dir import GatewayRecord


def test_durations_have_two_units_at_most():
    seconds = (0, 59.6, 61, 3599, 19_300, 273_700)

    texts = ["0 s", "60 s", "1 min", "59 min", "5 h 21 min", "3 d 4 h"]
    assert [format_duration(each) for each in seconds] == texts


def test_without_a_server_the_models_are_shown_and_the_command_fails(tmp_path):
    words = ["status", "--repository", str(REPOSITORY)]
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}

    shown = CliRunner().invoke(app, words, env=environment)
    document = json.loads(CliRunner().invoke(app, [*words, "--json"], env=environment).stdout)

    error = f"error: no server of '{REPOSITORY}' runs; fix: nereid serve"
    assert (shown.exit_code, shown.stderr.splitlines()[-1]) == (1, error)
    assert "1, 2 not served" in shown.stdout
    assert (document["server"], document["gateways"]) == (None, [])
    assert {each["name"]: each["kind"] for each in document["models"]} == {
        "classify": "route",
        "classify_v1": "pinned",
        "classify_v2": "pinned",
        "efficientnet_lite0": "network",
        "imagenet_preprocess": "preprocessing",
    }


def test_lines_of_a_running_server(capsys):
    models = [
        ModelStatus("dogs", "route", [1], [1], False, {"v1": 0.9, "v2": 0.1}, 1, 30_000_000),
        ModelStatus("dogs_v2", "pinned", [], [1], False, {}, 0, 0),
        ModelStatus("dogs_v3", "pinned", [1], [1], False, {}, 2, 0, "2 of 1-4"),
        ModelStatus("dogs_network", "network", [], [1, 2], True, {}, 0, 0),
    ]
    server = ServerStatus(5, "127.0.0.1", {"http": 8000, "grpc": 8001}, "cpu", 61, 20_000_000, "")

    command.show(Status("/models", server, [GatewayRecord(7, "127.0.0.1", 8080)], models))

    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "repository  /models",
        "server      running for 1 min, pid 5, profile cpu",
        "addresses   http 127.0.0.1:8000, grpc 127.0.0.1:8001",
        "gateway     http://127.0.0.1:8080, pid 7",
        "memory      50.0 MB: tritonserver and 3 model processes",
    ]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[8:-1]]
    assert cells == [
        ["dogs", "route", "1", "v1 90 %, v2 10 %", "1", "30.0 MB"],
        ["dogs_v2", "pinned", "1 not loaded", "", "", ""],
        ["dogs_v3", "pinned", "1", "", "2 (instances 2 of 1-4)", "0 bytes"],
        ["dogs_network", "network", "1, 2 inside the pinned models", "", "", ""],
    ]
