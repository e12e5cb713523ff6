"""Debian's Prometheus with a real server and gateway under traffic: every rule and query has data.

Queries about GPUs are exceptions: promtool tests them with Triton's names.
"""

import base64
import itertools
import math
import re
import shutil
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

from nereid.base.assets import CHELSEA, REPOSITORY
from nereid.gateway import key_changes
from nereid.server.ports import free_ports
from tests.deployment import running as run_program
from tests.monitoring import PROMETHEUS, Query, alerts, asked, gpu_metrics, metrics_of, read, rules
from tests.routes import WATCHDOG_S, wait_until
from tests.supervised import Served, gateway, serving
from tools.metrics_page import families

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
# Not the photo of the health checks, which is not measured.
PHOTO = CHELSEA.read_bytes()
DAMAGED = PHOTO[: len(PHOTO) // 20]
# A CPU has no metrics of a GPU, drift needs a reference (tests/e2e/test_drift.py), and fallbacks a failure
# (tests/e2e/test_supervision.py).
OTHERS = ("nereid_drift_", "nereid_route_predicted_total", "nereid_route_fallbacks_total")
ABSENT = gpu_metrics() | {
    series for family in families() if family.name.startswith(OTHERS) for series in family.series()
}
RECORDED = [name for name, expression in rules().items() if not metrics_of(expression) & ABSENT]
ASKED = asked(RATE_INTERVAL)
QUERIES = [
    *(Query(name, name) for name in RECORDED),
    *(query for query in ASKED if not metrics_of(query.expression) & (ABSENT | ({*rules()} - {*RECORDED}))),
]
# Nothing has to fail, wait, or be under way just now; of all else, 0 would be a wrong selection.
MAY_BE_0 = re.compile(
    r"traces_dropped|route_errors|route_requests_failed|requests_slow|"
    r"pending|waiting|in_flight|breaker|or vector\(0\)"
)


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus, by its address, and the server that it scrapes."""

    address: str
    server: Served

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.address}/api/v1/{path}", params=parameters)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def values(self, expression: str) -> list[float]:
        values = [float(series["value"][1]) for series in self.get("query", query=expression)["result"]]
        return list(filter(math.isfinite, values))


def configuration(ports: dict[str, int]) -> dict[str, Any]:
    config = read("prometheus/prometheus.yml")
    config["global"] = dict.fromkeys(config["global"], f"{INTERVAL_S}s")
    del config["alerting"]
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"]}]
    return config


@contextmanager
def prometheus(folder: Path, ports: dict[str, int], key: str, server: Served) -> Iterator[Prometheus]:
    shutil.copytree(PROMETHEUS, folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(ports)))
    for path in folder.glob("*.yml"):
        path.write_text(path.read_text().replace("interval: 1m\n", f"interval: {INTERVAL_S}s\n"))
    (folder / "keys").mkdir()
    (folder / "keys" / "prometheus.key").write_text(key)
    (port,) = free_ports(1)
    address, log = f"127.0.0.1:{port}", folder / "log"
    words = [str(FOUND), f"--config.file={folder / 'prometheus.yml'}"]
    words += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    words += ["--log.level=warn"]
    with run_program(words, log, f"http://{address}/-/ready"):
        yield Prometheus(f"http://{address}", server)


@contextmanager
def traffic(observer: Prometheus, address: str, key: str, limited: str) -> Iterator[None]:
    """Send good and bad requests to the gateway and Triton, also with a key whose quota is too small."""
    triton = f"http://127.0.0.1:{observer.server.ports['http']}/v2/models/classify/infer"
    binary, jpeg = {"inference-header-content-length": "0"}, {"content-type": "image/jpeg"}
    authorized, poor = ({"authorization": f"Bearer {token}"} for token in (key, limited))
    images = [{"image": base64.b64encode(photo).decode()} for photo in (PHOTO, DAMAGED)]
    is_over, labels = threading.Event(), itertools.cycle((1, 0))

    def predict(client: httpx.Client, image: bytes, headers: dict[str, str]) -> httpx.Response:
        return client.post(f"{address}/predict", content=image, headers=jpeg | headers)

    def with_feedback(client: httpx.Client) -> None:
        """Say that the first answer of a client is wrong, that the next is correct, and so on."""
        answer = predict(client, PHOTO, authorized).json()
        truth = {"request_id": answer["request_id"], "label": answer["predictions"][next(labels)]["label"]}
        client.post(f"{address}/v1/feedback", json=truth, headers=authorized)

    kinds: list[Callable[[httpx.Client], object]] = [
        with_feedback,
        lambda client: predict(client, DAMAGED, authorized),
        lambda client: predict(client, PHOTO, authorized | {"x-request-timeout-ms": "1"}),
        lambda client: predict(client, PHOTO, {}),
        lambda client: predict(client, DAMAGED, poor),
        lambda client: client.post(f"{address}/v1/classify", json={"images": images}, headers=authorized),
        lambda client: client.post(triton, content=PHOTO, headers=binary),
        lambda client: client.post(triton, content=b"no image", headers=binary),
    ]

    def ask(kind: Callable[[httpx.Client], object]) -> None:
        with httpx.Client(timeout=WATCHDOG_S) as client:
            while not is_over.wait(PAUSE_S):
                kind(client)

    with ThreadPoolExecutor(len(kinds)) as pool:
        asking = [pool.submit(ask, kind) for kind in kinds]
        try:
            yield
        finally:
            is_over.set()
        for future in asking:
            future.result()


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    base = tmp_path_factory.mktemp("prometheus")
    key = key_changes.add(base / "keys.json", "me", ["infer"], None)
    limited = key_changes.add(base / "keys.json", "limited", ["infer"], 0.5)
    with serving(REPOSITORY, base / "run") as server:
        words = ["--url", f"127.0.0.1:{server.ports['http']}", "--keys", str(base / "keys.json")]
        with gateway(base / "gateway.log", *words, "--require-keys") as (_, address):
            ports = {"server": server.ports["metrics"], "supervisor": server.ports["health"]}
            ports["gateway"] = httpx.URL(address).port
            observing = prometheus(base / "prometheus", ports, key, server)
            with observing as observer, traffic(observer, address, key, limited):
                yield observer


def test_every_rule_is_evaluated(watched):
    def errors() -> dict[str, str]:
        entries = [rule for group in watched.get("rules")["groups"] for rule in group["rules"]]
        return {rule["name"]: rule.get("lastError", "") for rule in entries}

    wait_until(lambda: any(errors().values()) or all(watched.values(name) for name in RECORDED), "data")

    assert errors() == dict.fromkeys([*rules(), *(alert["alert"] for alert in alerts())], "")


def test_only_alerts_with_a_reason_fire(watched):
    """Requests that miss their deadline burn the gateway's budget; no target and no process is in doubt."""
    names = {alert["alert"] for alert in alerts()}

    wait_until(lambda: watched.values('ALERTS{alertname="GatewayErrors",severity="page"}'), "the alert")
    firing = {
        item["labels"]["alertname"] for item in watched.get("alerts")["alerts"] if item["state"] == "firing"
    }
    assert "GatewayErrors" in firing <= names
    assert not firing & {"TargetDown", "TargetMissing", "ServerNotReady", "ServerRestarts", "RepairsRepeat"}


def test_reference_has_the_series_of_real_pages(watched):
    labels = {name: {*family.labels, "le"} for family in families() for name in family.series()}

    all_series = watched.get("series", **{"match[]": '{__name__=~"nereid_.+",__name__!~".+_created"}'})

    assert {series["__name__"] for series in all_series} - labels.keys() == set()
    more = {
        (series["__name__"], *({*series} - {"__name__", "job", "instance"} - labels[series["__name__"]]))
        for series in all_series
    }
    assert {entry for entry in more if len(entry) > 1} == set()
    assert {series["__name__"].split("_")[1] for series in all_series} >= {"route", "gateway", "supervisor"}


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_every_query_has_data(watched, query):
    def has_data() -> bool:
        values = watched.values(query.expression)
        return bool(values) if MAY_BE_0.search(query.expression) else max(values, default=0) > 0

    wait_until(has_data, query.where)
