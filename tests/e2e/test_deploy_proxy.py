"""HAProxy in front of two real servers: one dies, both are restarted, and no client sees an error."""

import csv
import http.client
import io
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from loadtest.background_load import PROTOCOLS, BackgroundLoad
from nereid.assets import COFFEE
from nereid.client.batch_split import Outcome
from nereid.client.classifier import Classifier
from nereid.client.classifier_errors import RequestRefused
from nereid.client.prediction import Prediction
from nereid.client.request import ProtocolName, image_tensor
from nereid.contract import TOKEN_HEADER
from nereid.imaging.decode import Limits
from nereid.server.command_line import ADMIN_APIS, READABLE_ON_LOOPBACK
from nereid.server.ports import free_ports
from tests.conftest import ROOT
from tests.e2e.conftest import group_members
from tests.routes import WATCHDOG_S, wait_until
from tests.supervised import Served, serving, store_eyes

CONFIG = ROOT / "deploy" / "proxy" / "haproxy.cfg"
SERVERS = ("a", "b")
PORTS = ("http", "grpc", "metrics", "health")
# Of each protocol.
CONCURRENCY = 16
NUMBER = 10
INFER = "/v2/models/classify/infer"
GRPC_SERVICE = "/inference.GRPCInferenceService/"
SERVED_METHODS = {
    "ModelInfer",
    "ModelMetadata",
    "ModelReady",
    "ServerLive",
    "ServerMetadata",
    "ServerReady",
}
# An image and the rest of its request.
MOST_BYTES = Limits().max_image_bytes + 2**20
# Longer than two health checks of the proxy, which are half a second apart.
DRAIN_S = 3
# Frames of HTTP/2, and their flags.
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK, END_HEADERS = 1, 4
# Paths of the APIs that Triton can restrict.
PATHS = {
    "model-repository": (
        "/v2/repository/index",
        "/v2/repository/models/classify/load",
        "/v2/repository/models/classify/unload",
    ),
    "shared-memory": (
        "/v2/systemsharedmemory/status",
        "/v2/systemsharedmemory/region/mine/register",
        "/v2/cudasharedmemory/unregister",
    ),
    "trace": ("/v2/trace/setting", "/v2/models/classify/trace/setting"),
    "logging": ("/v2/logging",),
    "model-config": ("/v2/models/classify/config", "/v2/models/classify/versions/1/config"),
    "statistics": ("/v2/models/stats", "/v2/models/classify/stats", "/v2/models/classify/versions/1/stats"),
}


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running HAProxy, and where it listens."""

    ports: dict[str, int]

    def url(self, protocol: str) -> str:
        """Return HOST:PORT of a protocol."""
        return f"127.0.0.1:{self.ports[protocol]}"

    def servers(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return the proxy's statistics of each server, by backend and name."""
        address = f"http://{self.url('stats')}/stats;csv"
        with urllib.request.urlopen(address, timeout=WATCHDOG_S) as answer:
            page = answer.read().decode().removeprefix("# ")
        return {(row["pxname"], row["svname"]): row for row in csv.DictReader(io.StringIO(page))}

    def is_up(self, name: str) -> bool:
        """Return whether a server is in rotation for both protocols."""
        rows = self.servers()
        return all(rows[f"{protocol}_servers", name]["status"] == "UP" for protocol in PROTOCOLS)

    def sent(self, name: str) -> list[int]:
        """Return how many requests a server was given, by protocol."""
        rows = self.servers()
        return [int(rows[f"{protocol}_servers", name]["stot"]) for protocol in PROTOCOLS]

    def wait_used(self, name: str) -> None:
        """Wait until a server is in rotation, and is given requests over both protocols."""
        wait_until(lambda: self.is_up(name), f"{name} in rotation")
        before = self.sent(name)
        wait_until(lambda: all(now > then for now, then in zip(self.sent(name), before, strict=True)), "used")


class Pair:
    """Two supervised servers of one repository, which keep their ports when they are started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The model sleeps, so that there are requests in flight.
        store_eyes(folder / "repository", "classify", NUMBER, sleep_s=0.05)
        free = iter(free_ports(len(SERVERS) * len(PORTS)))
        self.ports = {name: {port: next(free) for port in PORTS} for name in SERVERS}
        self._running: dict[str, tuple[Served, ExitStack]] = {}
        self._starts = itertools.count()

    def __getitem__(self, name: str) -> Served:
        return self._running[name][0]

    def start(self, name: str) -> None:
        """Start a server, and wait until it is ready."""
        words = [
            word for port, number in self.ports[name].items() for word in (f"--{port}-port", f"{number}")
        ]
        folder = self._folder / f"{name}{next(self._starts)}"
        with ExitStack() as stack:
            served = stack.enter_context(
                serving(self._folder / "repository", folder, *words, "--drain-s", f"{DRAIN_S}")
            )
            wait_until(served.is_ready, "ready")
            self._running[name] = served, stack.pop_all()

    def stop(self, name: str) -> int:
        """Stop a server and wait for its end; returns its exit status."""
        served, stack = self._running.pop(name)
        with stack:
            served.process.send_signal(signal.SIGTERM)
            return served.process.wait(WATCHDOG_S)

    def kill(self, name: str) -> None:
        """Kill `nereid serve`, which takes the server along."""
        served, stack = self._running.pop(name)
        leader = served.record.pid
        stack.close()
        wait_until(lambda: not group_members(leader), "the server's end")

    def close(self) -> None:
        """End what still runs."""
        for name in list(self._running):
            self.kill(name)


class Crowd:
    """Keeps requests in flight over both protocols, those of one through one classifier."""

    def __init__(self, proxy: Proxy) -> None:
        self.outcomes: list[Outcome] = []
        self._proxy = proxy
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=[protocol]) for protocol in PROTOCOLS]

    def __enter__(self) -> "Crowd":
        for thread in self._threads:
            thread.start()
        wait_until(lambda: len(self.outcomes) > 4 * CONCURRENCY, "traffic")
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def failures(self) -> list[str]:
        """Return the outcomes that are not the right response."""
        return [wrong for each in self.outcomes if (wrong := what_is_wrong(each))]

    def repeats(self) -> int:
        """Return how often a request was sent again."""
        return sum(each.timings.attempts - 1 for each in self.outcomes if isinstance(each, Prediction))

    def _send(self, protocol: ProtocolName) -> None:
        photos = itertools.takewhile(lambda _: not self._is_over.is_set(), itertools.repeat(COFFEE))
        with Classifier(self._proxy.url(protocol), protocol, concurrency=CONCURRENCY) as classifier:
            self.outcomes.extend(classifier.classify_many(photos))


def what_is_wrong(outcome: Outcome) -> str:
    """Describe the mistake of a response; empty if it is right."""
    if not isinstance(outcome, Prediction):
        return f"{type(outcome).__name__}: {outcome}"
    score = outcome.labels[0].score
    return "" if score == NUMBER + 1 else f"expected {NUMBER + 1}, got {score}"


@pytest.fixture(scope="module")
def haproxy() -> str:
    """The program."""
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if not found:
        pytest.skip("haproxy is not installed; fix: apt-get install haproxy")
    return found


@contextmanager
def running(haproxy: str, servers: dict[str, dict[str, int]], folder: Path) -> Iterator[Proxy]:
    """Run the proxy as it is deployed, in front of servers of these ports."""
    ports = dict(zip(("http", "grpc", "stats"), free_ports(3), strict=True))
    environment = {f"NEREID_PROXY_{name.upper()}": f"127.0.0.1:{port}" for name, port in ports.items()}
    for name, own in servers.items():
        prefix = f"NEREID_{name.upper()}"
        environment[f"{prefix}_HTTP"] = f"127.0.0.1:{own['http']}"
        environment[f"{prefix}_GRPC"] = f"127.0.0.1:{own['grpc']}"
        environment[f"{prefix}_READY_PORT"] = str(own["health"])
    log = folder / "haproxy.log"
    with log.open("w") as written:
        process = subprocess.Popen(
            [haproxy, "-db", "-f", CONFIG],
            env=os.environ | environment,
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: process.poll() is not None or listens(ports["stats"]), "the proxy")
        assert process.poll() is None, log.read_text()
        yield Proxy(ports)
    finally:
        process.kill()
        process.wait()


def listens(port: int) -> bool:
    """Return whether a process listens on the port."""
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def guard(haproxy, tmp_path_factory):
    """The proxy without a server: requests that it forwards end in 503."""
    free = iter(free_ports(len(SERVERS) * len(PORTS)))
    nobody = {name: {port: next(free) for port in PORTS} for name in SERVERS}
    with running(haproxy, nobody, tmp_path_factory.mktemp("guard")) as proxy:
        wait_until(lambda: not any(map(proxy.is_up, SERVERS)), "no server")
        yield proxy


@pytest.fixture(scope="module")
def pair(haproxy, tmp_path_factory):
    """Both servers, running."""
    with closing(Pair(tmp_path_factory.mktemp("pair"))) as servers:
        for name in SERVERS:
            servers.start(name)
        yield servers


@pytest.fixture(scope="module")
def proxy(haproxy, pair, tmp_path_factory):
    """The proxy in front of them."""
    with running(haproxy, pair.ports, tmp_path_factory.mktemp("proxy")) as proxy:
        yield proxy


def status(proxy: Proxy, head: str) -> int:
    """Send a raw request; returns the status of the response."""
    with socket.create_connection(("127.0.0.1", proxy.ports["http"]), WATCHDOG_S) as speaking:
        speaking.sendall(head.replace("\n", "\r\n").encode())
        answer = http.client.HTTPResponse(speaking)
        answer.begin()
        return answer.status


def code(proxy: Proxy, path: str, body: bytes = b"", **metadata: str) -> str:
    """Call a method over gRPC; returns the name of the answer's status."""
    with grpc.insecure_channel(proxy.url("grpc")) as channel:
        try:
            channel.unary_unary(path)(body, timeout=WATCHDOG_S, metadata=list(metadata.items()))
        except grpc.RpcError as failed:
            return failed.code().name
        return "OK"


def spellings(path: str) -> list[str]:
    """Return spellings that a server could accept for a path."""
    first, last = path[:4] + f"%{ord(path[4]):02x}" + path[5:], path.rsplit("/", 1)
    return [
        path,
        path + "/",
        path + "?",
        path.upper(),
        path.title(),
        first,
        "%2fv2" + path[3:],
        "%2f".join(last),
        "//".join(last),
        "/" + path,
        "/./".join(last),
        "/v2/models/../" + path[4:],
        "/v2/health/ready/../../" + path[4:],
        "/v2/models/classify%2f..%2f.." + path[3:],
        "/v2;/" + path[4:],
        path + "%00",
        path + "%0a",
    ]


def test_config_is_valid(haproxy):
    """The configuration has neither an error nor a warning with the defaults."""
    done = subprocess.run([haproxy, "-c", "-f", CONFIG], capture_output=True, text=True, timeout=WATCHDOG_S)

    said = done.stdout + done.stderr
    assert (done.returncode, "WARNING" in said) == (0, False), said


def test_config_agrees_with_the_server():
    """The size limit is that of the server, and the token is removed from requests."""
    config = CONFIG.read_text()

    assert {int(number) for number in re.findall(r"\b\d{8,}\b", config)} == {MOST_BYTES}
    assert config.count(f"http-request del-header {TOKEN_HEADER}\n") == len(PROTOCOLS)


def test_paths_are_those_that_triton_may_restrict():
    """The table of paths covers every API that `nereid serve` guards."""
    assert PATHS.keys() == {*ADMIN_APIS, *READABLE_ON_LOOPBACK}


@pytest.mark.parametrize("path", [path for paths in PATHS.values() for path in paths])
def test_management_over_http_is_refused(guard, path):
    """Every spelling of a management path is refused, and every method."""
    spelt = {spelling: status(guard, f"GET {spelling} HTTP/1.1\nHost: a\n\n") for spelling in spellings(path)}
    done = {
        method: status(guard, f"{method} {path} HTTP/1.1\nHost: a\nContent-Length: 2\n\n{{}}")
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH")
    }

    assert {spelling: told for spelling, told in spelt.items() if told not in (400, 403)} == {}
    assert done == dict.fromkeys(done, 403)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GET /metrics HTTP/1.1", 403),
        ("GET /readyz HTTP/1.1", 403),
        ("GET / HTTP/1.1", 403),
        ("DELETE /v2/models/classify HTTP/1.1", 403),
        ("POST /v2/models/classify/generate HTTP/1.1", 403),
        ("GET http://a/v2/repository/index HTTP/1.1", 403),
        ("GET /v2/repository/index HTTP/1.0", 403),
        ("GET /v2 HTTP/1.1", 503),
        (f"GET {INFER} HTTP/1.1", 503),
    ],
    ids=lambda word: word if isinstance(word, str) else "",
)
def test_only_what_clients_need_is_passed_on(guard, line, expected):
    """Other requests are refused; these find no server, because none runs here."""
    assert status(guard, f"{line}\nHost: a\n\n") == expected


def test_only_what_clients_need_is_passed_on_over_grpc(guard):
    """Only the served methods pass, in every spelling."""
    (service,) = service_pb2.DESCRIPTOR.services_by_name.values()
    methods = {method.name: GRPC_SERVICE + method.name for method in service.methods}
    assert methods.keys() > SERVED_METHODS

    told = {name: code(guard, path, **{TOKEN_HEADER: "any"}) for name, path in methods.items()}
    spelt = {
        path: code(guard, path)
        for path in (
            "/" + methods["RepositoryIndex"],
            methods["RepositoryIndex"].upper(),
            methods["RepositoryIndex"].replace("R", "%52"),
            methods["ModelInfer"] + "/../RepositoryIndex",
        )
    }

    assert told == {
        name: "UNAVAILABLE" if name in SERVED_METHODS else "PERMISSION_DENIED" for name in methods
    }
    assert spelt == dict.fromkeys(spelt, "PERMISSION_DENIED")


@pytest.mark.parametrize(
    ("fields", "body", "expected"),
    [
        ("Content-Length: 1", "x", 503),
        ("", "", 411),
        ("Transfer-Encoding: chunked", "1\nx\n0\n\n", 411),
        ("Transfer-Encoding: chunked\nContent-Length: 1", "1\nx\n0\n\n", 411),
        ("Content-Length: 1\nTransfer-Encoding:\tchunked", "1\nx\n0\n\n", 411),
        ("Transfer-Encoding: identity, chunked", "1\nx\n0\n\n", 422),
        ("Transfer-Encoding: xchunked\nContent-Length: 1", "x", 400),
        ("Transfer-Encoding : chunked\nContent-Length: 1", "x", 400),
        ("Content-Length: 1\nContent-Length: 2", "xx", 400),
        ("Content-Length: 1, 2", "xx", 400),
        ("Content-Length: +1", "x", 400),
        (f"Content-Length: {MOST_BYTES + 1}", "", 413),
        (f"Content-Length: {MOST_BYTES + 1}\nExpect: 100-continue", "", 413),
        ("Content-Length: 1\nContent-Encoding: gzip", "x", 415),
    ],
    ids=lambda word: repr(word) if isinstance(word, str) else "",
)
def test_dangerous_bodies_are_refused(guard, fields, body, expected):
    """Bodies in chunks, of ambiguous or unknown length, too large, or compressed are refused."""
    assert status(guard, f"POST {INFER} HTTP/1.1\nHost: a\n{fields}{fields and chr(10)}\n{body}") == expected


def test_http2_is_not_spoken_where_http_is(guard):
    """HTTP/2 on the port of HTTP is refused: its bodies need no length."""
    with socket.create_connection(("127.0.0.1", guard.ports["http"]), WATCHDOG_S) as speaking:
        speaking.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")

        assert speaking.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_oversize_message_is_refused(guard):
    """A message is refused by the size in its first five bytes, while it is still being sent."""
    with (
        closing(tritonclient.grpc.InferenceServerClient(guard.url("grpc"))) as client,
        pytest.raises(InferenceServerException, match="status: 413"),
    ):
        client.infer("classify", [image_tensor("grpc", [bytes(MOST_BYTES)])])


def test_message_that_comes_later_is_checked(guard):
    """A request is not forwarded before the size of its message is known."""
    head = {
        ":method": "POST",
        ":scheme": "http",
        ":path": GRPC_SERVICE + "ModelInfer",
        ":authority": "a",
        "content-type": "application/grpc",
    }
    with socket.create_connection(("127.0.0.1", guard.ports["grpc"]), WATCHDOG_S) as speaking:
        speaking.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, b""))
        # Literal fields with new names. Source: RFC 7541, 6.2.2.
        fields = (
            bytes([0, len(name)]) + name.encode() + bytes([len(text)]) + text.encode()
            for name, text in head.items()
        )
        speaking.sendall(frame(HEADERS, END_HEADERS, b"".join(fields), 1) + frame(PING, 0, bytes(8)))
        said = b""
        while frame(PING, ACK, bytes(8)) not in said:
            said += speaking.recv(4096)
        speaking.sendall(frame(DATA, 0, b"\0" + (MOST_BYTES + 1).to_bytes(4, "big"), 1))
        while b"error" not in said and (came := speaking.recv(4096)):
            said += came

    assert f"a message may have {MOST_BYTES} bytes".encode() in said


def frame(kind: int, flags: int, payload: bytes, stream: int = 0) -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def test_compressed_message_is_refused(guard):
    """A compressed message is refused, because its real size is unknown."""
    tensor = image_tensor("grpc", [COFFEE.read_bytes()])
    with (
        closing(tritonclient.grpc.InferenceServerClient(guard.url("grpc"))) as client,
        pytest.raises(InferenceServerException, match="status: 415"),
    ):
        client.infer("classify", [tensor], compression_algorithm="gzip")


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_oversize_image_is_the_callers_fault(proxy, protocol):
    """A classifier gets the refusal while it is still sending, and does not retry."""
    with Classifier(proxy.url(protocol), protocol) as classifier, pytest.raises(RequestRefused):
        classifier.classify(bytes(MOST_BYTES))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_images_pass(proxy, protocol):
    """27 MB are far more than the proxy's buffers."""
    with Classifier(proxy.url(protocol), protocol) as classifier:
        prediction = classifier.classify(np.zeros((3000, 3000, 3), np.uint8))

    assert what_is_wrong(prediction) == ""


@pytest.mark.slow
def test_health_and_metadata_are_served(proxy):
    """Health and metadata requests of KServe clients succeed over both protocols."""
    paths = ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/classify", "/v2/models/classify/ready")

    over_http = [status(proxy, f"GET {path} HTTP/1.1\nHost: a\n\n") for path in paths]
    with closing(tritonclient.grpc.InferenceServerClient(proxy.url("grpc"))) as client:
        over_grpc = [client.is_server_live(), client.is_server_ready(), client.is_model_ready("classify")]
        names = [client.get_server_metadata().name, client.get_model_metadata("classify").name]

    assert over_http == [200] * len(paths)
    assert (over_grpc, names) == ([True] * 3, ["triton", "classify"])
    assert code(proxy, "/grpc.health.v1.Health/Check") == "OK"


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_failed_connection_is_tried_at_the_other_server(haproxy, pair, tmp_path, protocol):
    """If a ready server accepts no connection, no request is lost and no client retries."""
    deaf = pair.ports["a"] | dict(zip(PROTOCOLS, free_ports(2), strict=True))
    with (
        running(haproxy, pair.ports | {"a": deaf}, tmp_path) as proxy,
        Classifier(proxy.url(protocol), protocol) as classifier,
    ):
        predictions = [classifier.classify(COFFEE) for _ in range(8)]
        tried = int(proxy.servers()[f"{protocol}_servers", "a"]["wredis"])

    assert [each.timings.attempts for each in predictions] == [1] * 8
    assert tried, "it got no request"


@pytest.mark.slow
def test_death_of_a_server_is_not_noticed(pair, proxy):
    """`kill -9` under load: each lost request is sent again; then the server that replaces it is used."""
    with Crowd(proxy) as crowd:
        os.kill(pair["a"].record.pid, signal.SIGKILL)
        wait_until(lambda: not proxy.is_up("a"), "out of rotation")
        # `nereid serve` has started another one, on the same ports.
        proxy.wait_used("a")

    assert crowd.failures() == []
    assert crowd.repeats(), "the server got no request while it was lost"


@pytest.mark.slow
def test_death_of_a_supervisor_is_not_noticed(pair, proxy):
    """`kill -9` of `nereid serve` takes its server along, under load; it is used when it is started again."""
    with Crowd(proxy) as crowd:
        pair.kill("a")
        wait_until(lambda: not proxy.is_up("a"), "out of rotation")
        pair.start("a")
        proxy.wait_used("a")

    assert crowd.failures() == []


@pytest.mark.slow
def test_rolling_restart_is_not_noticed(pair, proxy):
    """Each in turn leaves the rotation, ends and comes back: nothing fails, nor has to be sent again."""
    attempts = []

    def check(prediction: Prediction) -> str:
        attempts.append(prediction.timings.attempts)
        return what_is_wrong(prediction)

    with BackgroundLoad(proxy, "classify", 2 * CONCURRENCY, check=check) as callers:
        wait_until(lambda: len(attempts) > 4 * CONCURRENCY, "traffic")
        for name in SERVERS:
            assert pair.stop(name) == 0
            assert not proxy.is_up(name)
            pair.start(name)
            proxy.wait_used(name)

    assert [each.failure for each in callers.requests if each.failure] == []
    assert set(attempts) == {1}
