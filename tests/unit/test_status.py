"""`nereid status` without a server, and its lines; tests/e2e/test_your_model.py has it with a server."""

import json

from typer.testing import CliRunner

from nereid.base.assets import REPOSITORY
from nereid.base.units import format_duration
from nereid.cli.main import app


def test_durations_have_two_units_at_most():
    seconds = (0, 59.6, 61, 3599, 19_300, 273_700)

    texts = ["0 s", "60 s", "1 min", "59 min", "5 h 21 min", "3 d 4 h"]
    assert [format_duration(each) for each in seconds] == texts


def test_without_a_server_the_models_are_shown_and_the_command_fails(tmp_path):
    words = ["status", "--repository", str(REPOSITORY)]
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}

    shown = CliRunner().invoke(app, words, env=environment)
    document = json.loads(CliRunner().invoke(app, [*words, "--json"], env=environment).stdout)

    error = f"error: no server is running for '{REPOSITORY}'; fix: nereid serve"
    assert (shown.exit_code, shown.stderr.splitlines()[-1]) == (1, error)
    assert "1, 2 not served" in shown.stdout
    assert (document["server"], document["gateways"]) == (None, [])
    kinds = {"classify": "route", "classify_v1": "pinned", "classify_v2": "pinned"}
    kinds |= {"efficientnet_lite0": "network", "imagenet_preprocess": "preprocessing"}
    assert {each["name"]: each["kind"] for each in document["models"]} == kinds
