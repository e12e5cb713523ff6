"""`nereid drift` without a server: usage, and errors that name the fix."""

import pytest
from typer.testing import CliRunner

from nereid.cli.drift import print_report
from nereid.cli.main import app
from nereid.insight.drift.comparison import SignalDrift, VariantDrift
from nereid.insight.drift.drift_report import Accuracy, Agreement, DriftReport
from nereid.insight.drift.monitor import RouteDrift

NUMBERS = {"psi": 0.5, "js": 0.25}


@pytest.fixture
def nereid(tmp_path):
    def run(*words: str):
        return CliRunner().invoke(app, ["drift", *words], env={"XDG_RUNTIME_DIR": str(tmp_path)})

    return run


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["baseline", "classify"], 2, "expected one of --images DIR and --from-traffic DURATION"),
        (["baseline", "classify", "--images", "x", "--from-traffic", "1h"], 2, "expected one of --images"),
        (["baseline", "classify", "--from-traffic", "1h"], 1, "fix: nereid serve"),
        (["show", "classify"], 1, "fix: nereid serve"),
        (["show", "missing"], 2, "no route 'missing'"),
    ],
)
def test_errors_name_the_fix(nereid, words, status, message):
    done = nereid(*words)

    assert done.exit_code == status
    assert message in done.stderr


def test_table_has_everything_that_is_known(capsys):
    signals = (SignalDrift("warmth", 300, "drift", NUMBERS, NUMBERS), SignalDrift("class", 9, "too few"))
    variants = (
        VariantDrift("v1", "net", 2, 300, 5.0, 7200.0, "", signals),
        VariantDrift("v2", "net", 3, 0, None, None, "the reference does not have this variant"),
    )
    route = RouteDrift("r", "photos", variants)
    agreement, accuracy = (Agreement("dark", 1800, 200, 190),), (Accuracy("v1", 10, 9, 0.6, 0.98),)

    print_report(DriftReport(1e9, 3600, 600, route, agreement, accuracy))
    lines = capsys.readouterr().out

    for text in (
        "v1 (version 2 of net): drift; 300 images in the window, reference 2 h 0 min old",
        "v2 (version 3 of net): not compared: the reference does not have this variant",
        "last 1 h 0 min, of which 10 min are recorded",
        "95.0%",
        "60.0% to 98.0%",
    ):
        assert text in lines
    assert "too few" in lines
