"""deploy/healthcheck.py as Compose and Kubernetes run it: a process, with the standard library only."""

import os
import shlex
from pathlib import Path

import pytest

from nereid.base.assets import CHELSEA
from nereid.server.ports import free_ports
from tests.conftest import ROOT
from tests.deployment import SERVICES, check_health, command_line, listening, running
from tests.e2e.conftest import url
from tests.supervised import NEREID
from tests.tables import cases

WATCHDOG_S = 60


@pytest.mark.parametrize("model", ["classify", "classify_v1", "classify_v2"])
def test_right_answer_is_healthy(server, model):
    assert check_health("--url", f"http://{url(server, 'http')}", "--model", model) == (0, "")


@cases(
    wrong_answer=(["--image", str(CHELSEA)], "'classify': expected the class 'espresso', got '"),
    refusal=(["--model", "nothing"], "unknown model: 'nothing'"),
    page=(["--page", "{url}/nothing"], " returned 40"),
)
def test_wrong_answers_are_not_healthy(words, message, server):
    address = f"http://{url(server, 'http')}"
    words = [word.replace("{url}", address) for word in words]

    code, text = check_health(*words, *([] if "--page" in words else ["--url", address]))

    assert (code, message in text) == (1, True), text
    assert check_health("--page", f"{address}/v2/health/ready") == (0, "")


def test_other_servers_are_not_healthy():
    code, message = check_health("--url", f"http://127.0.0.1:{free_ports(1)[0]}")

    assert (code, "refused" in message) == (1, True)
    with listening() as (address, _):
        assert check_health("--url", address) == (1, "no class in the response: {}\n")


def test_load_page_is_checked_until_its_end(tmp_path):
    """Compose's Locust is reached from outside of its container, and ends without a traceback."""
    (web_port,) = free_ports(1)
    (key := tmp_path / "first.key").write_text("a key\n")
    words = " ".join(shlex.quote(word) for word in command_line("locust"))
    words = words.replace("/workspace", str(ROOT)).replace("/keys/first.key", str(key))
    _, _, _, *check = SERVICES["locust"]["healthcheck"]["test"]
    # Another address of this machine, as the container's own address is for other machines.
    check = [word.replace("127.0.0.1:8089", f"127.0.0.2:{web_port}") for word in check]
    command, log = [*shlex.split(words), f"--web-port={web_port}"], tmp_path / "log"
    environment = os.environ | {"PATH": f"{Path(NEREID).parent}:{os.environ['PATH']}"}
    page = f"http://127.0.0.2:{web_port}"
    with running(command, log, page, cwd=tmp_path, env=environment) as process:
        assert check_health(*check) == (0, "")
        process.terminate()
        code = process.wait(WATCHDOG_S)

    assert (code, "Traceback" in log.read_text()) == (0, False), log.read_text()
