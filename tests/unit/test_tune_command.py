"""`nereid tune` without a server: what it refuses, and with which exit code."""

import importlib.util

import pytest
from typer.testing import CliRunner

from loadtest.tune import command
from ops.__main__ import app
from ops.cli import CommandFailed
from ops.embedded import REPOSITORY


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nosuch"], "has no model 'nosuch', it has: classify, classify_v1, classify_v2"),
        (["classify"], "tune its variants: classify_v1, classify_v2"),
        (["classify_v1", "--profile", "nosuch"], "no model has the profile 'nosuch', known are: "),
        (["classify_v1", "--profile", "ensemble"], "tune its steps: imagenet_preprocess"),
        (["classify_v1", "--objective", "beauty"], "'beauty' is not one of"),
        (["classify_v1", "--p99-ms", "-1"], "greater than or equal to"),
        (["classify_v1", "--concurrency", "0"], "greater than or equal to"),
        (["classify_v1", "--images", "nowhere.jpg"], "nowhere.jpg does not exist"),
    ],
    ids=["unknown", "route", "profile", "ensemble", "objective", "p99", "concurrency", "images"],
)
def test_what_cannot_be_meant_is_refused(words, reason):
    """Exit code 2, before any server is started, and the reason on stderr."""
    environment = {"NEREID_REPOSITORY": str(REPOSITORY), "COLUMNS": "200"}

    done = CliRunner().invoke(app, ["tune", *words], env=environment)

    assert (done.exit_code, done.stdout) == (2, "")
    assert reason in done.stderr


def test_missing_package_is_told(monkeypatch):
    """The load generator is an extra; the message says which."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvloop" else found(name))

    with pytest.raises(CommandFailed, match=r"needs uvloop; mend: pip install 'nereid\[load\]'"):
        command.tune(command.Wish(REPOSITORY, "classify_v1", "cpu"), {}, False)


def test_command_of_a_wish_asks_for_the_same():
    """It stands in what is written, so that the search can be run again."""
    wish = command.Wish(REPOSITORY, "a b", "cpu", "latency", 12.5, 2, (1, 4))

    assert wish.command == (
        "nereid tune 'a b' --objective latency --p99-ms 12.5 --minutes 2 --profile cpu --seed 0 "
        "--concurrency 1 --concurrency 4"
    )
