"""Access of other tools to `nereid serve`: token, server name, and statistics without the probes."""

import os
import shutil
import subprocess
from pathlib import Path

import onnx
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from nereid.base.assets import REPOSITORY
from nereid.cli.main import app
from nereid.models.publish.remove import reload
from nereid.server.model_control import ModelControl
from nereid.server.ports import free_ports
from tests.commands import captured
from tests.routes import wait_until
from tests.supervised import NEREID, serving, store_eyes
from tests.tables import cases

pytestmark = pytest.mark.slow
TOKEN = "a-token-of-the-operator"
WATCHDOG_S = 60


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A server of a copy of the default models and another one, with the operator's token."""
    folder = tmp_path_factory.mktemp("site")
    repository = shutil.copytree(REPOSITORY, folder / "models")
    store_eyes(repository, "eyes", 0.5)
    (folder / "token").touch(0o600)
    (folder / "token").write_text(f"{TOKEN}\n")
    (folder / "empty").mkdir()
    (port,) = free_ports(1)
    ports = ("--grpc-port", str(port), "--metrics-port", str(port + 1))
    with serving(repository, folder / "run", *ports, "--token-file", str(folder / "token")) as served:
        yield served


def elsewhere(site, *words: str, token_file: Path | str = "token") -> subprocess.CompletedProcess:
    """Run a command that cannot find the server, with its name and a file of its folder."""
    folder = site.repository.parent
    named = ["--server", f"127.0.0.1:{site.ports['grpc']}", "--token-file", str(folder / token_file)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder / "empty")}
    command = [NEREID, *words, "--repository", str(site.repository), *named]
    return captured(command, env=environment, timeout=WATCHDOG_S)


def curl(served, path: str, *words: str) -> tuple[int, str]:
    address = f"http://127.0.0.1:{served.ports['http']}{path}"
    command = ["curl", "-s", "-w", "\n%{http_code}", "-X", "POST", *words, address]
    done = captured(command, timeout=WATCHDOG_S, check=True)
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def test_other_tools_load_and_unload_with_the_token(site):
    path, header = "/v2/repository/models/eyes", ("-H", f"nereid-token: {TOKEN}")

    assert curl(site, f"{path}/unload")[0] == 403
    assert curl(site, f"{path}/unload", *header) == (200, "")
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{site.ports['grpc']}") as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.load_model("eyes")
        client.load_model("eyes", headers={"triton-grpc-protocol-nereid-token": TOKEN})
        assert client.is_model_ready("eyes")
    reload(site.repository, "eyes", site.server_info)  # finds the token in server.json


def test_requests_are_the_statistics_without_the_probes(site):
    """As docs/server.md says: Triton counts probes, and the supervisor's metric has their number."""

    def requests() -> float | None:
        """Return the difference, unless a probe came in between."""
        before = site.metric("probes_total", model="eyes")
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{site.ports['grpc']}") as client:
            (model,) = client.get_inference_statistics("eyes").model_stats
        after = site.metric("probes_total", model="eyes")
        return model.inference_count - before + 1000 if before == after else None

    wait_until(lambda: site.metric("probes_total", model="eyes") > 2, "probes")
    first = wait_until(requests, "no probe in between")
    site.numbers("eyes", count=7)
    wait_until(lambda: (now := requests()) and now == first + 7, "seven requests more")


def test_without_a_token_everybody_on_the_machine_administrates(tmp_path):
    store_eyes(tmp_path / "models", "eyes", 0.5)

    with serving(tmp_path / "models", tmp_path / "run", "--no-token") as served:
        assert curl(served, "/v2/repository/index")[0] == 200
        reload(served.repository, "eyes", served.server_info)


@cases(
    missing=(None, 0, [], "No such file or directory"),
    readable=(TOKEN, 0o644, [], "only you can read, got mode 0644; fix: chmod 600"),
    signs=(f"{TOKEN}:with=signs", 0o600, [], "expected 16 to 256 printable ASCII characters"),
    both=(TOKEN, 0o600, ["--no-token"], "--token-file and --no-token exclude each other"),
)
def test_unusable_token_is_wrong_usage(content, mode, words, message, tmp_path):
    path = tmp_path / "token"
    if content:
        path.write_text(content)
        path.chmod(mode)

    done = CliRunner().invoke(app, ["serve", "--token-file", str(path), *words])

    assert (done.exit_code, message in done.stderr.splitlines()[-1]) == (2, True), done.stderr


@cases(
    token=(["--no-token"], "--no-token needs --host 127.0.0.1, got 0.0.0.0"),
    keys=([], "listening beyond loopback needs API keys; fix: nereid key add"),
)
def test_unprotected_server_stays_on_this_machine(words, message, tmp_path):
    environment = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}

    done = CliRunner().invoke(app, ["serve", "--host", "0.0.0.0", *words], env=environment)

    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr


def test_commands_work_with_a_named_server(site, tmp_path):
    network = onnx.load(REPOSITORY / "efficientnet_lite0/1/model.onnx")
    network.doc_string = "of other bytes"
    onnx.save(network, tmp_path / "new.onnx")

    commands = [
        ("publish", "classify", str(tmp_path / "new.onnx"), "--share", "10%", "--max-slowdown", "100"),
        ("route", "set", "v1=50", "v2=30", "v3=20"),
        ("rollback", "classify"),
        ("reload", "classify_v1"),
        ("status",),
    ]
    results = [elsewhere(site, *words) for words in commands]

    assert [done.stderr for done in results if done.returncode] == []
    assert ModelControl(site.server_info).is_ready("classify_v3", 1)
    assert "running, profile cpu" in results[-1].stdout


def test_commands_need_the_token_of_a_named_server(site, tmp_path):
    (tmp_path / "wrong").write_text("something else")
    (tmp_path / "nothing").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")

    wrong, nothing, no_text = (
        elsewhere(site, "reload", "classify_v1", token_file=tmp_path / name)
        for name in ("wrong", "nothing", "bytes")
    )

    assert (wrong.returncode, "restricted" in wrong.stderr) == (1, True), wrong.stderr
    assert (nothing.returncode, "got an empty file" in nothing.stderr) == (2, True), nothing.stderr
    assert (no_text.returncode, "codec can't decode" in no_text.stderr) == (2, True), no_text.stderr
