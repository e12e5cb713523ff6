"""Debian's Prometheus with a real server and gateway under traffic: every rule and query has data."""

import base64
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from nereid.assets import COFFEE, REPOSITORY
from nereid.cli.main import app
from nereid.server.ports import free_ports
from tests.monitoring import PROMETHEUS, Query, judging, read, rules, scaling, shown
from tests.routes import WATCHDOG_S, wait_until
from tests.supervised import Served, gateway, serving

FOUND = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOUND, reason="prometheus is not installed; fix: apt-get install prometheus"),
]
INTERVAL_S = 1
# Four times scrape_interval: the shortest that Grafana fills in.
RATE_INTERVAL = f"{4 * INTERVAL_S}s"
# Of each kind of question; the machine is not to be filled.
PAUSE_S = 0.2
PHOTO = COFFEE.read_bytes()
DAMAGED = PHOTO[: len(PHOTO) // 20]
JOBS = [job["job_name"] for job in read("prometheus/prometheus.yml")["scrape_configs"]]
QUERIES = [*(Query(name, name) for name in rules()), *shown(RATE_INTERVAL), *scaling(), *judging()]
# Nothing has to fail, wait, or be under way just now; of all else, 0 would be a wrong selection.
MAY_BE_0 = re.compile(r"route_errors|pending|waiting|in_flight|breaker|or vector\(0\)")


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus, by its address."""

    address: str

    def get(self, path: str, **parameters: str) -> Any:
        """Send a request to Prometheus' API."""
        answer = httpx.get(f"{self.address}/api/v1/{path}", params=parameters)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def values(self, expression: str) -> list[float]:
        """Return the current value of each series of an expression, without NaN."""
        found = [float(series["value"][1]) for series in self.get("query", query=expression)["result"]]
        return list(filter(math.isfinite, found))


def configuration(ports: dict[str, int]) -> dict[str, Any]:
    """Return the committed configuration with other targets and intervals."""
    config = read("prometheus/prometheus.yml")
    config["global"] = dict.fromkeys(config["global"], f"{INTERVAL_S}s")
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"]}]
    return config


@contextmanager
def prometheus(folder: Path, ports: dict[str, int], key: str) -> Iterator[Prometheus]:
    """Run Prometheus with the committed rules and a key for the gateway."""
    shutil.copytree(PROMETHEUS, folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(ports)))
    (folder / "keys").mkdir()
    (folder / "keys" / "prometheus.key").write_text(key)
    (port,) = free_ports(1)
    address, log = f"127.0.0.1:{port}", folder / "log"
    words = [
        str(FOUND),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"http://{address}/-/ready").is_success
        except httpx.TransportError:
            return False

    try:
        wait_until(is_ready, "Prometheus")
        yield Prometheus(f"http://{address}")
    finally:
        process.kill()
        process.wait()


@contextmanager
def traffic(server: Served, address: str, key: str) -> Iterator[None]:
    """Send good and bad requests to the gateway and Triton until the context ends."""
    triton = f"http://127.0.0.1:{server.ports['http']}/v2/models/classify/infer"
    binary, jpeg = {"inference-header-content-length": "0"}, {"content-type": "image/jpeg"}
    own, late = {"authorization": f"Bearer {key}"}, {"x-request-timeout-ms": "1"}
    images = [{"image": base64.b64encode(PHOTO).decode()}, {"image": base64.b64encode(DAMAGED).decode()}]
    kinds: list[Callable[[httpx.Client], httpx.Response]] = [
        lambda client: client.post(f"{address}/predict", content=PHOTO, headers=jpeg | own),
        lambda client: client.post(f"{address}/predict", content=DAMAGED, headers=jpeg | own),
        lambda client: client.post(f"{address}/predict", content=PHOTO, headers=jpeg | own | late),
        lambda client: client.post(f"{address}/predict", content=PHOTO, headers=jpeg),
        lambda client: client.post(f"{address}/v1/classify", json={"images": images}, headers=own),
        lambda client: client.post(triton, content=PHOTO, headers=binary),
        lambda client: client.post(triton, content=b"no image", headers=binary),
    ]
    is_over = threading.Event()

    def ask(kind: Callable[[httpx.Client], httpx.Response]) -> None:
        with httpx.Client(timeout=WATCHDOG_S) as client:
            while not is_over.wait(PAUSE_S):
                kind(client)

    with ThreadPoolExecutor(len(kinds)) as pool:
        asking = [pool.submit(ask, kind) for kind in kinds]
        try:
            yield
        finally:
            is_over.set()
        for each in asking:
            each.result()


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A supervised server, a gateway that needs keys, and Prometheus, under traffic."""
    base = tmp_path_factory.mktemp("prometheus")
    made = CliRunner().invoke(
        app, ["key", "add", "me", "--scope", "infer", "--keys", str(base / "keys.json")]
    )
    assert made.exit_code == 0, made.stderr
    key = made.stdout.strip()
    with serving(REPOSITORY, base / "run") as server:
        words = ["--url", f"127.0.0.1:{server.ports['http']}", "--keys", str(base / "keys.json")]
        with gateway(base / "gateway.log", *words, "--require-keys") as (_, address):
            ports = {
                "server": server.ports["metrics"],
                "gateway": httpx.URL(address).port,
                "supervisor": server.ports["health"],
            }
            with prometheus(base / "prometheus", ports, key) as observer, traffic(server, address, key):
                yield observer


def test_every_target_is_read(watched):
    """Prometheus scrapes server, gateway and supervisor without an error."""

    def targets() -> dict[str, tuple[str, str]]:
        active = watched.get("targets")["activeTargets"]
        return {
            each["labels"]["job"]: (each["health"], each["lastError"])
            for each in active
            if each["health"] != "unknown"
        }

    wait_until(lambda: len(targets()) == len(JOBS), "first look")

    assert targets() == dict.fromkeys(JOBS, ("up", ""))


def test_every_rule_is_evaluated(watched):
    """No rule fails on real series, for example because two series get the same labels."""

    def errors() -> dict[str, str]:
        found = [rule for group in watched.get("rules")["groups"] for rule in group["rules"]]
        return {rule["name"]: rule.get("lastError", "") for rule in found}

    wait_until(lambda: any(errors().values()) or all(watched.values(name) for name in rules()), "data")

    assert errors() == dict.fromkeys(rules(), "")


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_every_query_has_data(watched, query):
    """Every query has numbers, and numbers above 0 where there is traffic."""

    def has_data() -> bool:
        values = watched.values(query.expression)
        return bool(values) if MAY_BE_0.search(query.expression) else max(values, default=0) > 0

    wait_until(has_data, query.where)


@pytest.mark.parametrize(
    ("family", "outcome"),
    [
        ("nereid_route_requests_total", "ok"),
        ("nereid_route_requests_total", "invalid_image"),
        ("nereid_gateway_requests_total", "ok"),
        ("nereid_gateway_requests_total", "invalid_image"),
        ("nereid_gateway_requests_total", "deadline_exceeded"),
        ("nereid_gateway_requests_total", "unauthenticated"),
    ],
)
def test_outcomes_are_told_apart(watched, family, outcome):
    """Good and bad requests are counted by their outcome."""
    query = f'sum(rate({family}{{outcome="{outcome}"}}[1m])) > 0'

    wait_until(lambda: watched.values(query), outcome)
