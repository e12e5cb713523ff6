"""The whole command line: help, version, exit codes, the last line on stderr, completion, `init`."""

import json
import os
import pty
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import typer.main
from typer.testing import CliRunner

from nereid.application.exit_codes import end
from nereid.base import assets
from nereid.base.errors import OperationFailed
from nereid.base.task_registry import DEFAULT_TASK
from nereid.base.units import escaped
from nereid.cli import demo, options, tables
from nereid.cli.main import app
from tests.commands import captured
from tests.publishing import classifier
from tests.tables import cases, rows
from tools.commands_page import commands

pytestmark = pytest.mark.process


def run(*words: str, **environment: str):
    return CliRunner().invoke(app, list(words), env=environment)


@pytest.mark.parametrize("words", [[], ["route"], ["key"]])
def test_without_a_command_the_help_is_shown(words):
    done = run(*words)

    assert (done.exit_code, done.stderr) == (0, "")
    assert "Commands" in done.stdout


@cases(
    title=("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    colour=("\x9b31m", r"\x9b31m"),
    line=("\rok", r"\rok"),
    direction=("\u202egnp", r"\u202egnp"),
    no_text=("\udcff", r"\udcff"),
)
@pytest.mark.parametrize("words", ["publish NAME net.onnx", "add NAME.onnx --name x --yes"])
def test_names_do_not_act_on_a_terminal(name, shown, words):
    done = run(*words.replace("NAME", name).split(" "))

    assert shown in done.stderr
    assert escaped(done.output) == done.output


def test_operators_do_not_act_on_a_terminal(tmp_path):
    """The message is that of the package `onnx`."""
    model = classifier()
    model.graph.node[0].op_type = "\x1b[2JCast"
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())

    done = run("add", str(tmp_path / "net.onnx"), "--name=x", "--yes", "--preset=imagenet")

    assert r"\x1b[2JCast" in done.stderr
    assert escaped(done.output) == done.output


def test_tables_do_not_act_on_a_terminal(capsys):
    tables.print_table("model", rows=[("\x1b[31mred",), ("\u2066a",)])

    assert escaped(out := capsys.readouterr().out) == out
    assert r"\x1b[31mred" in out


@pytest.mark.parametrize("name", commands(typer.main.get_command(app)))
def test_short_help_option_works_everywhere(name):
    assert run(*name.split(), "-h").stdout == run(*name.split(), "--help").stdout != ""


@rows(
    ("add /nonexistent.onnx --name x --preset imagenet", 2),
    ("publish unknown /nonexistent.onnx", 2),
    ("retire unknown 1", 2),
    ("watch /nonexistent", 2),
    ("tune unknown", 2),
    ("init /proc/nereid", 1),
    ("why classify", 1),
    ("why --route classify", 1),
    ("route history --model unknown", 2),
    ("key add alice", 2),
    ("key list --keys {broken}", 1),
    ("key revoke nobody --keys {empty}", 1),
    *((f"{command} --repository {{loop}}", 1) for command in ("remove classify --yes", "doctor")),
    *((f"{command} --repository {{loop}}", 2) for command in ("status", "serve")),
)
def test_failure_ends_with_one_line_that_has_the_reason(words, status, tmp_path):
    repository = tmp_path / "own"
    assert run("init", str(repository)).exit_code == 0
    folders = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"), str(tmp_path))
    (tmp_path / "broken.json").write_text("not JSON")
    (tmp_path / "loop").symlink_to("loop")
    paths = {"empty": tmp_path / "keys.json", "broken": tmp_path / "broken.json", "loop": tmp_path / "loop"}

    done = run(*words.format(**paths).split(), NEREID_REPOSITORY=str(repository), **folders)

    lines = done.stderr.splitlines()
    assert done.exit_code == status, done.stderr
    assert [line.startswith("error: ") for line in lines] == [False] * (len(lines) - 1) + [True]


@rows(
    ("unknown", "No such command 'unknown'"),
    ("serve --profile nope", "no model has the profile 'nope', expected one of: cpu, ensemble"),
    ("serve --gpu-id 77", "--gpu-id 77: no"),
    ("serve --repository /nonexistent", "/nonexistent is not a model repository"),
    ("serve --htpp-port 9999", "--htpp-port"),
    ("serve --host 0.0.0.0 --allow-shm", "--allow-shm needs --unguarded"),
    ("serve --host 0.0.0.0 --unguarded --allow-shm", "--allow-shm needs --host 127.0.0.1, got 0.0.0.0"),
    ("serve --guard -- --http-port=1", "cannot be used with: --http-port=1"),
    ("classify /nonexistent.jpg", "'/nonexistent.jpg' does not exist"),
    ("classify {coffee} --protocol smtp", "smtp"),
    ("classify {coffee} --url http://localhost:8000", "--url must be HOST:PORT without"),
)
def test_wrong_usage_is_exit_code_2(words, message):
    done = run(*words.format(coffee=assets.COFFEE).split(), NEREID_REPOSITORY=str(assets.REPOSITORY))

    last = done.stderr.splitlines()[-1]
    assert (done.exit_code, last.startswith("error: "), message in last) == (2, True, True), done.stderr


def test_reason_comes_after_its_details(capsys):
    with pytest.raises(SystemExit):
        end(OperationFailed("no\ndetail"))

    assert capsys.readouterr().err == "detail\nerror: no\n"


@pytest.mark.parametrize("words", [["check", "--json"], ["--version"]], ids=["long", "short"])
def test_closed_pipe_is_not_a_traceback(words):
    """`nereid check --json | head -0` ends without a message."""
    command = [sys.executable, "-m", "nereid", *words]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()

        assert process.stderr.read() == b""


def test_cancelled_question_is_one_line(tmp_path):
    repository = shutil.copytree(assets.REPOSITORY, tmp_path / "repository")
    words = [sys.executable, "-m", "nereid", "remove", "classify", "--repository", str(repository)]
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"\x04")

    done = subprocess.run(words, stdin=terminal, capture_output=True, text=True, timeout=60)

    os.close(keyboard)
    os.close(terminal)
    assert done.returncode == 1
    assert done.stderr == "error: cancelled; nothing has changed\n"
    assert (repository / "classify").exists()


def test_init_copies_the_default_models_and_nothing_else(tmp_path, monkeypatch):
    source = shutil.copytree(assets.REPOSITORY, tmp_path / "source")
    (source / "classify_v1" / "configs" / "tuned.pbtxt").touch()
    (source / "classify.route.history.jsonl").touch()
    monkeypatch.setattr(demo, "DEFAULT_TASK", replace(DEFAULT_TASK, repository=source))
    done = run("init", str(tmp_path / "own"))

    copied = {path.relative_to(tmp_path / "own") for path in (tmp_path / "own").rglob("*") if path.is_file()}
    assert (done.exit_code, f"nereid serve --repository {tmp_path / 'own'}" in done.stdout) == (0, True)
    assert {path.name for path in copied} >= {"config.pbtxt", "model.onnx", "classify.route.json"}
    assert [path for path in copied if path.name == "tuned.pbtxt" or ".history." in path.name] == []
    assert run("check", str(tmp_path / "own")).exit_code == 0


def test_init_leaves_a_used_folder_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")

    done = run("init", str(tmp_path))

    assert (done.exit_code, "is not an empty folder; fix: " in done.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_packaged_models_cannot_be_changed(tmp_path, monkeypatch):
    """An upgrade would remove the change, so the message names `nereid init`."""
    packaged = tmp_path / "packaged"
    assert run("init", str(packaged)).exit_code == 0
    monkeypatch.setattr(assets, "IS_CHECKOUT", False)
    monkeypatch.setattr(assets, "REPOSITORY", packaged)

    done = run("rollback", "classify", NEREID_REPOSITORY=str(packaged), XDG_RUNTIME_DIR=str(tmp_path))

    assert (done.exit_code, "fix: nereid init DIR" in done.stderr) == (2, True)


def test_doctor_gives_its_findings_as_json(tmp_path):
    findings = json.loads(run("doctor", "--json", XDG_RUNTIME_DIR=str(tmp_path)).stdout)

    assert {"Python", "Triton", "/dev/shm"} <= {finding["what"] for finding in findings}
    assert {finding["verdict"] for finding in findings} <= {"ok", "note", "fail"}


def test_status_without_a_server_shows_the_models_and_fails(tmp_path):
    words = ["status", "--repository", str(assets.REPOSITORY)]

    shown = run(*words, XDG_RUNTIME_DIR=str(tmp_path))
    document = json.loads(run(*words, "--json", XDG_RUNTIME_DIR=str(tmp_path)).stdout)

    error = f"error: no server is running for '{assets.REPOSITORY}'; fix: nereid serve"
    assert (shown.exit_code, shown.stderr.splitlines()[-1]) == (1, error)
    assert "1, 2 not served" in shown.stdout
    assert (document["server"], document["gateways"]) == (None, [])
    kinds = {"classify": "route", "classify_v1": "pinned", "classify_v2": "pinned"}
    kinds |= {"efficientnet_lite0": "network", "imagenet_preprocess": "preprocessing"}
    assert {model["name"]: model["kind"] for model in document["models"]} == kinds


def test_keys_are_listed_without_their_secrets(tmp_path):
    folder, name = {"XDG_CONFIG_HOME": str(tmp_path)}, "a-very-long-name-of-an-owner-" + "x" * 30
    secret = run("key", "add", name, "--scope", "infer", "--rate", "5", **folder).stdout.strip()

    listed = run("key", "list", "--json", **folder).stdout
    command, environment = [sys.executable, "-m", "nereid", "key", "list"], os.environ | {"COLUMNS": "40"}
    table = captured(command, env=environment | folder, check=True)

    (key,) = json.loads(listed)
    assert (key["name"], key["scopes"], key["rate_per_s"]) == (name, ["infer"], 5)
    assert name in table.stdout
    assert secret not in listed + table.stdout


@cases(
    models=(options.complete_model, {"classify", "classify_v1", "efficientnet_lite0"}),
    profiles=(options.complete_profile, {"cpu", "ensemble"}),
    variants=(options.complete_variant, {"v1", "v2"}),
    presets=(options.complete_preset, {"imagenet", "clip"}),
)
def test_completion_knows_the_names_of_the_repository(complete, expected):
    context = typer.main.get_command(app).make_context("nereid", ["check"])

    assert expected <= set(complete(context, ""))
    assert complete(context, "c") == sorted(name for name in complete(context, "") if name[0] == "c")


def test_completion_never_fails(tmp_path):
    (tmp_path / "classify.route.json").write_text("not JSON")
    context = typer.main.get_command(app).make_context("nereid", ["check"])
    context.params = {"repository": tmp_path}

    assert options.complete_variant(context, "") == []
