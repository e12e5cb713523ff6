"""deploy/healthcheck.py as Compose and Kubernetes run it: a process, with the standard library only."""

import contextlib
import http.client
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from nereid.assets import CHELSEA
from nereid.server.ports import free_ports
from tests.conftest import ROOT
from tests.deployment import ENV_EXAMPLE, SERVICES, check_health, command_line, listening
from tests.e2e.conftest import url
from tests.routes import wait_until
from tests.supervised import NEREID

WATCHDOG_S = 60


@pytest.mark.parametrize("model", ["classify", "classify_v1", "classify_v2"])
def test_right_answer_is_healthy(server, model):
    """The route and each variant find espresso, in both shapes of the repository."""
    assert check_health("--url", f"http://{url(server, 'http')}", "--model", model) == (0, "")


def test_wrong_answer_is_not(server):
    """A server that responds with the wrong class is not healthy."""
    code, message = check_health("--url", f"http://{url(server, 'http')}", "--image", str(CHELSEA))

    assert (code, message.startswith("'classify': expected the class 'espresso', got '")) == (1, True)


def test_refusal_is_on_stderr(server):
    """The message has the server's reason."""
    code, message = check_health("--url", f"http://{url(server, 'http')}", "--model", "nothing")

    assert (code, "unknown model: 'nothing'" in message) == (1, True)


def test_absent_server_is_not_healthy():
    """A refused connection fails the check."""
    code, message = check_health("--url", f"http://127.0.0.1:{free_ports(1)[0]}")

    assert (code, "refused" in message) == (1, True)


def test_response_without_a_class_is_not_healthy():
    """A 200 without a class is not healthy."""
    with listening() as (address, _):
        assert check_health("--url", address) == (1, "no class in the response: {}\n")


@pytest.fixture(scope="module")
def gateway(both_profiles, tmp_path_factory):
    """Compose's gateway, with the keys of .env.example; yields its port and the folder of the keys."""
    folder = tmp_path_factory.mktemp("gateway")
    places = {"triton:8001": url(both_profiles["cpu"], "grpc"), "/keys/": "keys/", "--port=8080": "--port=0"}
    words = " ".join(command_line("gateway"))
    for theirs, ours in places.items():
        assert theirs in words
        words = words.replace(theirs, ours)
    environment = os.environ | {
        "PATH": f"{Path(NEREID).parent}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(folder),
    }
    for line in re.findall(r"^# +(nereid .*)$", ENV_EXAMPLE.read_text(), re.M):
        subprocess.run(line, shell=True, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    process = subprocess.Popen(
        [NEREID, *words.split()], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        yield json.loads(process.stdout.readline())["http"], folder
    finally:
        process.terminate()
        process.communicate(timeout=WATCHDOG_S)


def test_page_is_checked_by_its_status(gateway):
    """Compose's check of the gateway, run on a gateway that listens on all addresses as in Compose."""
    port, _ = gateway
    _, _, script, *words = SERVICES["gateway"]["healthcheck"]["test"]
    assert script.endswith("/deploy/healthcheck.py")

    assert check_health(*[word.replace(":8080", f":{port}") for word in words]) == (0, "")
    code, message = check_health("--page", f"http://127.0.0.1:{port}/nothing")
    assert (code, " returned 404: " in message) == (1, True)


def test_load_page_is_checked_until_its_end(tmp_path):
    """Compose's Locust is reached from outside of its container, and ends without a traceback."""
    (web_port,) = free_ports(1)
    words = [word.replace("/workspace", str(ROOT)) for word in command_line("locust")]
    _, _, _, *check = SERVICES["locust"]["healthcheck"]["test"]
    # Another address of this machine, as the container's own address is for other machines.
    check = [word.replace("127.0.0.1:8089", f"127.0.0.2:{web_port}") for word in check]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [Path(NEREID).with_name(words[0]), *words[1:], f"--web-port={web_port}"],
            cwd=tmp_path,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: process.poll() is not None or check_health(*check)[0] == 0, "the page")
        process.terminate()
        code = process.wait(WATCHDOG_S)
    finally:
        process.kill()
        process.wait()

    assert (code, "Traceback" in log.read_text()) == (0, False), log.read_text()


@pytest.mark.parametrize(("key", "status"), [("keys/prometheus.key", 200), (None, 401)], ids=["key", "none"])
def test_gateway_shows_prometheus_its_metrics(gateway, key, status):
    """The gateway is scraped by its name in Compose's network, and only with the key."""
    port, folder = gateway
    headers = {"Host": "gateway:8080"}
    if key:
        headers["Authorization"] = f"Bearer {(folder / key).read_text().strip()}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WATCHDOG_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        page = answer.read().decode()

    assert (answer.status, "\nnereid_gateway_" in page) == (status, status == 200)
