"""Pages of the health port, with a fake clock."""

import http.client
import json
import socket
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial

import pytest

from nereid.base.errors import ServerError
from nereid.base.prometheus_text import MetricSamples, get
from nereid.server.supervision import health as pages
from nereid.server.supervision.health import ServerHealth
from tests.tables import cases

DEAD = "Stub process 'eyes_0_0' is not healthy."


@pytest.fixture
def health(clock):
    health = ServerHealth(clock, lambda: 1.5e9)
    health.enter(pages.RUNNING)
    health.record_round_start(None, ["eyes", "route"])
    for model in ("eyes", "route"):
        health.record_probe(model, None, clock.now_s)
    return health


def body(health: ServerHealth, path: str) -> tuple[int, dict]:
    status, content_type, text = pages.page(health, path)
    assert content_type == "application/json"
    return int(status), json.loads(text)


def serving(health: ServerHealth, port: int = 0) -> AbstractContextManager[int]:
    return pages.serve(partial(pages.page, health), "127.0.0.1", port, "health")


def test_page_agrees_with_its_status():
    times = iter([0.0, 0.0, 0.0, pages.MAX_OBSERVATION_AGE_S - 1, pages.MAX_OBSERVATION_AGE_S + 1])
    health = ServerHealth(lambda: next(times), lambda: 1.5e9)
    health.enter(pages.RUNNING)

    assert body(health, "/livez") == (200, {"live": True})


def fail_probe(health: ServerHealth) -> None:
    health.record_probe("eyes", DEAD, 1000.0)


PROCESS = {"eyes": "the process of 'eyes_0_0' is dead"}


@cases(
    probe=(fail_probe, {"models": {"eyes": DEAD}}, lambda health: health.record_probe("eyes", None, 1000.0)),
    unloaded=(fail_probe, {"models": {"eyes": DEAD}}, lambda health: health.record_round_start(None, [])),
    process=(
        lambda it: it.record_observation(PROCESS),
        {"models": PROCESS},
        lambda it: it.record_observation({}),
    ),
    server=(
        lambda health: health.record_round_start("400", []),
        {"server": "400"},
        lambda health: health.record_round_start(None, []),
    ),
)
def test_failure_is_named_until_it_is_over(fail, reasons, recover, health):
    fail(health)
    failed = body(health, "/readyz")
    recover(health)

    assert failed == (503, {"ready": False, **reasons})
    assert body(health, "/readyz") == (200, {"ready": True})


def test_outcome_of_an_older_probe_is_ignored(health, clock):
    """A probe that began before the repair and fails after it does not count against the new stub."""
    health.record_probe("eyes", None, clock.now_s + 2)
    health.record_probe("eyes", DEAD, clock.now_s + 1)

    assert body(health, "/readyz") == (200, {"ready": True})
    assert 'probe_failures_total{model="eyes"} 1' in health.metrics()


def test_old_responses_do_not_count(health, clock):
    clock.now_s += pages.MAX_ANSWER_AGE_S + 1
    status, reasons = body(health, "/readyz")
    assert (status, set(reasons["models"])) == (503, {"eyes", "route"})

    clock.now_s += pages.MAX_OBSERVATION_AGE_S
    assert body(health, "/livez") == (503, {"live": False})


def test_restarting_server_is_live_and_not_ready(health, clock):
    """In a restart, requests fail, but `nereid serve` must not be killed; nothing follows stopping."""
    health.enter(pages.RESTARTING, "status -9")
    clock.now_s += 1000

    assert body(health, "/readyz") == (503, {"ready": False, "server": "restarting: status -9"})
    assert body(health, "/livez") == (200, {"live": True})
    assert "server_up_since_seconds 0\n" in health.metrics()
    health.enter(pages.RUNNING)
    assert body(health, "/readyz") == (503, {"ready": False, "server": pages.NOT_PROBED})
    health.enter(pages.STOPPING)
    health.enter(pages.RUNNING)
    assert body(health, "/readyz") == (503, {"ready": False, "server": "stopping"})


def test_metrics_count_changes_and_have_the_present_instances(health):
    health.count("repairs_total", model="eyes", cause="pid")
    health.count("repairs_total", model='a"b\\', cause="probe")
    health.count("repair_failures_total", model="eyes")
    health.count("restarts_total")
    health.count("instance_changes_total", model="eyes", direction="up")
    health.count("instance_change_failures_total", model="eyes")
    health.record_instances({"eyes": 3})

    page = health.metrics()

    assert page.splitlines()[2:4] == [
        r'nereid_supervisor_repairs_total{model="a\"b\\",cause="probe"} 1',
        'nereid_supervisor_repairs_total{model="eyes",cause="pid"} 1',
    ]
    samples, eyes = MetricSamples.parse(page), {"model": "eyes"}
    for labels, values in (
        ({}, {"restarts_total": 1, "ready": 1, "server_up_since_seconds": 1.5e9}),
        (eyes, {"repair_failures_total": 1, "instances": 3, "instance_change_failures_total": 1}),
        (eyes | {"direction": "up"}, {"instance_changes_total": 1}),
    ):
        for name, value in values.items():
            assert samples.gauge(f"nereid_supervisor_{name}", labels) == value
    health.enter(pages.RESTARTING)
    assert "nereid_supervisor_instances{" not in health.metrics()


def test_every_metric_exists_from_the_start():
    page = ServerHealth().metrics()

    for name, spec in pages.METRICS.items():
        assert f"# TYPE {pages.PREFIX}{name} {spec.kind.lower()}\n" in page
    assert "nereid_supervisor_restarts_total 0\n" in page
    assert "nereid_supervisor_ready 0\n" in page


@cases(
    page=("GET", "/readyz?verbose", 200),
    unknown=("GET", "/", 404),
    POST=("POST", "/readyz", 405),
    HEAD=("HEAD", "/livez", 405),
)
def test_health_port_responds(method, path, status, health):
    with serving(health) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(method, path)
        response = connection.getresponse()
        response.read()
        connection.close()

    assert response.status == status


@cases(("limits", "left"), of_a_peer=({"MAX_OF_PEER": 5}, 5), of_all=({"MAX_CONNECTIONS": 4}, 4))
def test_idle_connections_delay_no_health_check(limits, left, health, monkeypatch):
    """A new connection closes the oldest; each one holds a thread."""
    for name, value in limits.items():
        monkeypatch.setattr(pages, name, value)
    with ExitStack() as stack:
        port = stack.enter_context(serving(health))
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(40)]
        assert get(f"127.0.0.1:{port}", "/readyz", 60)[0] == 200
        assert [connection.recv(1) for connection in idle[: 41 - left]] == [b""] * (41 - left)


def test_late_head_ends_its_connection(health, monkeypatch):
    """Each byte of the head is in time, and all together are late."""
    monkeypatch.setattr(pages, "CLIENT_TIMEOUT_S", 0.2)
    with (
        serving(health) as port,
        socket.create_connection(("127.0.0.1", port), 0.02) as connection,
        suppress(ConnectionError),
    ):
        for _ in range(500):
            with suppress(TimeoutError):
                connection.sendall(b"G")
                assert connection.recv(1) == b""
                return
        pytest.fail("the connection stays open")


def test_taken_port_is_an_error(health):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        message = f"health port {port} .* cannot be used: .*--health-port"
        with pytest.raises(ServerError, match=message), serving(health, port):
            pass
