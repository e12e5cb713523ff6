"""`nereid gateway` as a user runs it: a process, its ready line, keys, and its end."""

import http.client
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from tritonclient.grpc import InferenceServerClient
from typer.testing import CliRunner

from loadtest.attack.costly import COSTLY
from nereid.base.assets import COFFEE, PARCEL_LABEL
from nereid.cli.main import app
from nereid.gateway.settings import GatewaySettings
from nereid.server.ports import free_ports, is_listening
from tests.e2e.conftest import metric, url
from tests.readers import crowded_page
from tests.routes import wait_until
from tests.supervised import gateway
from tests.tables import cases, rows

WATCHDOG_S = 60
BURST = GatewaySettings().burst
# More than the 5 s of uvicorn.
UNUSED_S = 6.5


def post(
    address: str,
    key: str = "",
    image: bytes = COFFEE.read_bytes(),
    path: str = "/predict?variant=v1",
    timeout_s: int = 10,
) -> tuple[int, dict]:
    headers = {"Content-Type": "image/jpeg", "X-Request-Timeout-Ms": str(timeout_s * 1000)}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(address + path, image, headers)
    try:
        with urllib.request.urlopen(request, timeout=WATCHDOG_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=WATCHDOG_S) as page:
        return page.read().decode()


@pytest.fixture
def nereid_key(tmp_path):
    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["key", *words, "--keys", str(tmp_path / "keys.json")])
        assert done.exit_code == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.slow
def test_unused_connection_is_kept_for_a_load_balancer(tmp_path):
    with gateway(tmp_path / "log", "--url", "127.0.0.1:1") as (_, address):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=UNUSED_S)
        connection.request("GET", "/livez")
        assert connection.getresponse().read()
        with closing(connection.sock) as unused, pytest.raises(TimeoutError):
            unused.recv(1)


@pytest.mark.slow
@cases(
    images=("fused", "classify", "/predict", [*COSTLY.values()], COFFEE, 40),
    pages=("text_server", "read_text", "/v1/read", [crowded_page] * 4, PARCEL_LABEL, 8),
)
def test_costly_files_of_one_key_leave_the_others_in_service(
    server, model, path, costly, photo, count, request, tmp_path, nereid_key
):
    """Small files that take seconds on many connections: every request of another key is answered."""
    hostile, steady = (nereid_key("add", name, "--scope", "infer") for name in ("hostile", "steady"))
    serving, over = request.getfixturevalue(server), threading.Event()
    words = ["--url", url(serving, "http"), "--model", model, "--require-keys", "--access-log"]
    words += ["--keys", str(tmp_path / "keys.json")]

    files = [make() for make in costly]  # once: each takes a second, and 200 MB

    def flood(address: str, image: bytes) -> dict[int, float]:
        """Return the longest time of each status, in seconds."""
        longest_s: dict[int, float] = {}
        while not over.is_set():
            sent_at = time.monotonic()
            with suppress(OSError):  # the gateway may answer, and close, before it has the body
                status, _ = post(address, hostile, image, path)
                longest_s[status] = max(longest_s.get(status, 0.0), time.monotonic() - sent_at)
        return longest_s

    with gateway(tmp_path / "log", *words) as (_, address), ThreadPoolExecutor(48) as pool:
        # The label alone takes a second, so the default of 10 s is too little on a busy machine.
        answer = partial(post, address, steady, photo.read_bytes(), path, timeout_s=30)
        first = answer()
        flooding = [pool.submit(flood, address, image) for image in files for _ in range(12)]
        try:
            answers = [first, *(answer() for _ in range(count))]
        finally:
            over.set()
        longest_s = [future.result() for future in flooding]

    failed = [answer for status, answer in answers if status != 200]
    lines = [
        line
        for line in (tmp_path / "log").read_text().splitlines()
        if any(answer["request_id"] in line for answer in failed)
    ]
    assert failed == [], f"{lines}; costly files took {longest_s}"
    assert {answer["variant"] for _, answer in answers} <= {"v1", "v2"}
    assert set().union(*longest_s) <= {200, 400, 429, 504}


@rows(
    (["--host", "0.0.0.0"], 0, 2, "needs API keys; fix: nereid key add NAME --scope infer"),
    (["--require-keys"], 0, 2, "there are no API keys yet; fix: nereid key add NAME --scope infer"),
    (["--cors-origin", "*"], 0, 2, "CORS origin: expected one such as https://photos.example"),
    (["--url", "http://localhost:8001"], 0, 2, "url must be HOST:PORT"),
    (["--certificate-key", "key.pem"], 0, 2, "--certificate-key needs --certificate"),
    (["--host", "a..b"], 1, 1, "cannot listen on a..b port 0: unknown host name"),
    (["--certificate", "none.pem"], 1, 1, "cannot read 'none.pem'"),
    (["--certificate", __file__], 1, 1, "expected a certificate and its key (PEM, no password)"),
    (["--keys", "none.json"], 1, 1, "cannot read keys from 'none.json': No such file"),
)
def test_wrong_value_is_named(words, keys, code, text, tmp_path):
    """Wrong usage exits with code 2, an unusable value with code 1. The last line has the reason."""
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    for _ in range(keys):
        CliRunner().invoke(app, ["key", "add", "me", "--scope", "infer"], env=environment)

    done = CliRunner().invoke(app, ["gateway", "--port", "0", *words], env=environment)

    assert (done.exit_code, text in done.stderr.splitlines()[-1]) == (code, True), done.stderr
    assert code == 2 or done.stderr.count("\n") == 1


def test_second_signal_does_not_wait(tmp_path):
    with gateway(log := tmp_path / "log", "--url", "127.0.0.1:1", "--access-log") as (process, address):
        urllib.request.urlopen(f"{address}/healthz", timeout=WATCHDOG_S).close()
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), WATCHDOG_S) as slow:
            slow.sendall(
                b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
                b"Expect: 100-continue\r\n\r\n"
            )
            assert slow.recv(100).startswith(b"HTTP/1.1 100")
            process.send_signal(signal.SIGINT)
            wait_until(lambda: not is_listening(process.pid, port), "the end of listening")

            process.send_signal(signal.SIGINT)

            assert process.wait(WATCHDOG_S) == -signal.SIGINT
        (line,) = log.read_text().splitlines()
    assert json.loads(line)["path"] == "/healthz"


def workers_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def connections_of(pid: int, port: int) -> int:
    links = psutil.Process(pid).net_connections("tcp")
    return sum(link.laddr.port == port and link.status == psutil.CONN_ESTABLISHED for link in links)


def requests_of(port: int) -> float:
    return metric(f"127.0.0.1:{port}", "nereid_gateway_requests_total", endpoint="/predict")


def test_workers_are_one_gateway(fused, tmp_path, nereid_key):
    limited = nereid_key("add", "limited", "--scope", "infer", "--rate", "0.001")
    words = ["--url", url(fused, "http"), "--keys", str(tmp_path / "keys.json")]
    (grpc,) = free_ports(1)
    words += ["--workers", "2", "--grpc-port", str(grpc)]
    with gateway(tmp_path / "log", *words) as (process, address), ThreadPoolExecutor(8) as pool:
        first, second = workers_of(process.pid)
        port = int(address.rpartition(":")[2])
        with ExitStack() as held:
            for _ in range(40):
                connection = held.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port)))
                connection.request("GET", "/healthz")
                assert connection.getresponse().read()
            assert all(connections_of(pid, port) for pid in (first, second))

        # Each request has a connection of its own, so both workers get some.
        statuses = [status for status, _ in pool.map(lambda _: post(address), range(40))]
        limited_statuses = Counter(
            status for status, _ in pool.map(lambda _: post(address, limited), range(40))
        )

        assert statuses == [200] * 40
        with InferenceServerClient(f"127.0.0.1:{grpc}") as client:
            assert client.is_server_live()
        assert limited_statuses == {200: BURST, 429: 40 - BURST}
        wait_until(lambda: requests_of(port) == 80)
        wait_until(lambda: json.loads(fetch(f"{address}/v1/live"))["outcomes"].get("ok") == 40 + BURST)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len({*workers_of(process.pid)} - {first}) == 2)
        wait_until(lambda: all(status == 200 for status, _ in pool.map(lambda _: post(address), range(20))))
        assert second in workers_of(process.pid)
        assert "exited with status -9; restarting in 0.1 s" in (tmp_path / "log").read_text()
        wait_until(lambda: requests_of(port) >= 100)

        process.send_signal(signal.SIGTERM)

        assert process.wait(WATCHDOG_S) == 0
