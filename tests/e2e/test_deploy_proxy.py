"""HAProxy in front of two real servers: one dies, both are restarted, and no client sees an error."""

import csv
import io
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from loadtest.attack.attacks import GRPC_ATTACKS, HTTP_ATTACKS, Front
from loadtest.torture.traffic import PROTOCOLS, Traffic, classifiers
from nereid.base.assets import COFFEE
from nereid.client.client_errors import RequestRefused
from nereid.gateway import key_changes
from nereid.server.ports import free_ports
from nereid.tasks.classify.client import Classifier
from nereid.tasks.classify.result import Prediction
from nereid.vision.imaging.decode import ImageLimits
from tests.commands import captured
from tests.conftest import ROOT
from tests.deployment import running as run_program
from tests.e2e.conftest import group_members
from tests.routes import WATCHDOG_S, wait_until
from tests.supervised import Served, serving, store_eyes

CONFIG = ROOT / "deploy" / "proxy" / "haproxy.cfg"
SERVERS = ("a", "b")
PORTS = ("http", "grpc", "metrics", "health")
# Of each protocol.
# So many requests per second of each caller that all are always in flight.
CONCURRENCY, PER_S = 16, 20.0
NUMBER = 10
# An image and the rest of its request.
MOST_BYTES = ImageLimits().max_image_bytes + 2**20
# The model of these tests decodes no image.
UNDECODED = ["30 MB of base64", "a 34-byte image of 64 megapixels"]
# Longer than two health checks of the proxy, which are half a second apart.
DRAIN_S = 3


@dataclass(frozen=True, slots=True)
class Proxy:
    ports: dict[str, int]

    def url(self, protocol: str) -> str:
        return f"127.0.0.1:{self.ports[protocol]}"

    def servers(self) -> dict[tuple[str, str], dict[str, str]]:
        page = httpx.get(f"http://{self.url('stats')}/stats;csv", timeout=WATCHDOG_S).text.removeprefix("# ")
        return {(row["pxname"], row["svname"]): row for row in csv.DictReader(io.StringIO(page))}

    def is_up(self, name: str) -> bool:
        rows = self.servers()
        return all(rows[f"{protocol}_servers", name]["status"] == "UP" for protocol in PROTOCOLS)

    def sent(self, name: str) -> list[int]:
        rows = self.servers()
        return [int(rows[f"{protocol}_servers", name]["stot"]) for protocol in PROTOCOLS]

    def wait_used(self, name: str) -> None:
        wait_until(lambda: self.is_up(name), f"{name} in rotation")
        before = self.sent(name)
        wait_until(lambda: all(now > then for now, then in zip(self.sent(name), before, strict=True)), "used")


class Pair:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The model sleeps, so that there are requests in flight.
        store_eyes(folder / "repository", "classify", NUMBER, sleep_s=0.05)
        free = iter(free_ports(len(SERVERS) * len(PORTS)))
        self.ports = {name: {port: next(free) for port in PORTS} for name in SERVERS}
        self._keys = folder / "keys.json"
        self.key = key_changes.add(self._keys, "caller", ["infer"], None)
        self._running: dict[str, tuple[Served, ExitStack]] = {}
        self._starts = itertools.count()

    def __getitem__(self, name: str) -> Served:
        return self._running[name][0]

    def start(self, name: str) -> None:
        words = [
            word for port, number in self.ports[name].items() for word in (f"--{port}-port", f"{number}")
        ]
        words += ["--drain-s", f"{DRAIN_S}", "--require-keys", "--keys", str(self._keys)]
        folder = self._folder / f"{name}{next(self._starts)}"
        with ExitStack() as stack:
            served = stack.enter_context(serving(self._folder / "repository", folder, *words))
            wait_until(served.is_ready, "ready")
            self._running[name] = served, stack.pop_all()

    def stop(self, name: str) -> int:
        served, stack = self._running.pop(name)
        with stack:
            served.process.send_signal(signal.SIGTERM)
            return served.process.wait(WATCHDOG_S)

    def kill(self, name: str) -> None:
        served, stack = self._running.pop(name)
        leader = served.server_info.pid
        stack.close()
        wait_until(lambda: not group_members(leader), "the server's end")

    def close(self) -> None:
        for name in list(self._running):
            self.kill(name)


def what_is_wrong(prediction: Prediction) -> str:
    score = prediction.labels[0].score
    return "" if score == NUMBER + 1 else f"expected {NUMBER + 1}, got {score}"


@pytest.fixture(scope="module")
def haproxy() -> str:
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if not program:
        pytest.skip("haproxy is not installed; fix: apt-get install haproxy")
    return program


@contextmanager
def running(haproxy: str, servers: dict[str, dict[str, int]], folder: Path) -> Iterator[Proxy]:
    ports = dict(zip(("http", "grpc", "stats"), free_ports(3), strict=True))
    environment = {f"NEREID_PROXY_{name.upper()}": f"127.0.0.1:{port}" for name, port in ports.items()}
    for name, server_ports in servers.items():
        prefix = f"NEREID_{name.upper()}"
        environment[f"{prefix}_HTTP"] = f"127.0.0.1:{server_ports['http']}"
        environment[f"{prefix}_GRPC"] = f"127.0.0.1:{server_ports['grpc']}"
        environment[f"{prefix}_READY_PORT"] = str(server_ports["health"])
    words, page = [haproxy, "-db", "-f", str(CONFIG)], f"http://127.0.0.1:{ports['stats']}/stats"
    with run_program(words, folder / "haproxy.log", page, env=os.environ | environment):
        yield Proxy(ports)


@pytest.fixture(scope="module")
def pair(haproxy, tmp_path_factory):
    with closing(Pair(tmp_path_factory.mktemp("pair"))) as servers:
        for name in SERVERS:
            servers.start(name)
        yield servers


@pytest.fixture(scope="module")
def proxy(haproxy, pair, tmp_path_factory):
    with running(haproxy, pair.ports, tmp_path_factory.mktemp("proxy")) as proxy:
        yield proxy


def test_config_is_valid(haproxy):
    done = captured([haproxy, "-c", "-f", CONFIG], timeout=WATCHDOG_S)

    said = done.stdout + done.stderr
    assert (done.returncode, "WARNING" in said) == (0, False), said


@pytest.mark.nightly(minutes=1)
def test_servers_limits_and_keys_hold_through_the_proxy(pair, proxy, protocol):
    """The proxy reaches the servers on loopback, where keys may be optional."""
    with Classifier(proxy.url(protocol), protocol, api_key=pair.key) as classifier:
        # 27 MB are far more than the proxy's buffers.
        assert what_is_wrong(classifier.classify(np.zeros((3000, 3000, 3), np.uint8))) == ""
        # The refusal comes while the client is still sending.
        with pytest.raises(RequestRefused):
            classifier.classify(bytes(MOST_BYTES))
    with (
        Classifier(proxy.url(protocol), protocol) as classifier,
        pytest.raises(RequestRefused, match="an API key is required"),
    ):
        classifier.classify(COFFEE)


@pytest.mark.nightly(minutes=1)
def test_every_attack_is_rejected(pair, proxy):
    before = [pair[name].server_info.pid for name in SERVERS]
    front = Front(proxy.ports["http"], proxy.ports["grpc"], pair.key)

    attacks = *HTTP_ATTACKS, *GRPC_ATTACKS
    answered = [attack.name for attack in attacks if attack.send(front) in ("200", "OK")]

    assert answered == UNDECODED
    assert [pair[name].server_info.pid for name in SERVERS] == before


@pytest.mark.nightly(minutes=1)
def test_failed_connection_is_tried_at_the_other_server(haproxy, pair, tmp_path, protocol):
    deaf = pair.ports["a"] | dict(zip(PROTOCOLS, free_ports(2), strict=True))
    with (
        running(haproxy, pair.ports | {"a": deaf}, tmp_path) as proxy,
        Classifier(proxy.url(protocol), protocol, api_key=pair.key) as classifier,
    ):
        predictions = [classifier.classify(COFFEE) for _ in range(8)]
        tried = int(proxy.servers()[f"{protocol}_servers", "a"]["wredis"])

    assert [prediction.timings.attempts for prediction in predictions] == [1] * 8
    assert tried, "it got no request"


@contextmanager
def callers(pair: Pair, proxy: Proxy) -> Iterator[list[int]]:
    """Keep requests in flight over both protocols; all must have the right answer. Gives their attempts."""
    attempts: list[int] = []

    def check(prediction: Prediction) -> str:
        attempts.append(prediction.timings.attempts)
        return what_is_wrong(prediction)

    kinds = classifiers(proxy.url, "classify", 2 * CONCURRENCY, PER_S, check=check, api_key=pair.key)
    with Traffic(kinds) as traffic:
        wait_until(lambda: len(attempts) > 4 * CONCURRENCY, "traffic")
        yield attempts
    assert traffic.faults() == []


@pytest.mark.nightly(minutes=1)
def test_deaths_of_a_server_and_its_supervisor_are_not_noticed(pair, proxy):
    """`kill -9` under load: each lost request is sent again, and the server that replaces it is used."""
    with callers(pair, proxy) as attempts:
        os.kill(pair["a"].server_info.pid, signal.SIGKILL)
        wait_until(lambda: not proxy.is_up("a"), "out of rotation")
        # `nereid serve` has started another one, on the same ports.
        proxy.wait_used("a")
        assert max(attempts) > 1, "the server got no request while it was lost"

        pair.kill("a")
        wait_until(lambda: not proxy.is_up("a"), "out of rotation")
        pair.start("a")
        proxy.wait_used("a")


@pytest.mark.nightly(minutes=1)
def test_rolling_restart_is_not_noticed(pair, proxy):
    """Each in turn leaves the rotation, ends and comes back: nothing fails, nor has to be sent again."""
    with callers(pair, proxy) as attempts:
        for name in SERVERS:
            assert pair.stop(name) == 0
            assert not proxy.is_up(name)
            pair.start(name)
            proxy.wait_used(name)

    assert set(attempts) == {1}
