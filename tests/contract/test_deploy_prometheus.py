"""Prometheus' configuration, rules and dashboard: valid for promtool, and about exported metrics only."""

import inspect
import re
import shutil
from collections.abc import Iterator

import pytest
import yaml

from nereid.base.errors import ServingError
from nereid.cli import main as commands
from nereid.gateway.failures import SERVER_FAULTS, STATUS_BY_CODE
from nereid.gateway.http.operations import OPERATIONS
from nereid.gateway.v2 import grpc_server, http_operations
from nereid.server.command_line import ServerOptions
from tests import monitoring
from tests.commands import captured
from tests.deployment import SERVICES
from tests.monitoring import PROMETHEUS, Query, exported, metrics_of, panels, read, rules
from tests.tables import cases

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    not PROMTOOL, reason="promtool is not installed; fix: apt-get install prometheus"
)
# Outcomes that are not the server's fault; see the comments in rules.yml.
INNOCENT = {"ok", "invalid_image", "invalid_request", "overloaded", "cancelled"}
FAULTY = SERVER_FAULTS | {"deadline_exceeded"}
ASKED = [*monitoring.asked(), *monitoring.alerting(), *monitoring.runbook_queries()]
ALL = [*(Query(name, expression) for name, expression in rules().items()), *ASKED]
GATEWAY_PORT = inspect.signature(commands.gateway.gateway).parameters["port"].default
IMAGE_ENDPOINTS = {operation.path for operation in OPERATIONS if operation.task and operation.is_limited}
INFERENCE = {*IMAGE_ENDPOINTS, http_operations.INFER.path, grpc_server.INFER_METHOD}
# A batch, and a page of text, may take longer than the objective.
LONG = {"/v1/classify", "/v1/read", "/v1/waybill"}
ENDPOINTS = {grpc_server.INFER_METHOD, *grpc_server.READ_METHODS}
ENDPOINTS |= {operation.path for operation in (*OPERATIONS, *http_operations.OPERATIONS)}


def promtool(*words: str) -> None:
    done = captured([str(PROMTOOL), *words])

    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


def subclasses(kind: type) -> Iterator[type]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from subclasses(subclass)


def selected(label: str, expression: str) -> list[tuple[str, set[str]]]:
    """Return how and by which values an expression selects a label's series."""
    return [
        (operator, set(values.split("|")))
        for operator, values in re.findall(rf'\b{label}(=~|!~|!=|=)"([^"]*)"', expression)
    ]


@needs_promtool
@pytest.mark.parametrize("name", ["prometheus.yml", "local.yml"])
def test_configuration_is_accepted(tmp_path, name):
    """The folder has the key that `init` makes."""
    folder = shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    (folder / "keys").mkdir()
    (folder / "keys" / "prometheus.key").write_text("a key\n")

    promtool("check", "config", "--lint-fatal", str(folder / name))


@needs_promtool
def test_rules_compute_the_expected_numbers():
    promtool("test", "rules", str(PROMETHEUS / "rules_test.yml"))


@needs_promtool
def test_queries_parse(tmp_path):
    group = [{"record": f"query:{index}", "expr": query.expression} for index, query in enumerate(ASKED)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": group}]}))

    promtool("check", "rules", "--lint-fatal", str(tmp_path / "rules.yml"))


def test_every_rule_is_tested():
    tests = read("prometheus/rules_test.yml")["tests"]
    expressions = [case["expr"] for test in tests for case in test["promql_expr_test"]]

    assert {name for text in expressions for name in metrics_of(text)} == set(rules())


def test_queries_use_exported_or_recorded_metrics():
    known = exported() | set(rules())

    unknown = {query.where: metrics_of(query.expression) - known for query in ALL}
    assert {where: names for where, names in unknown.items() if names} == {}
    assert [query.where for query in ALL if not metrics_of(query.expression)] == []


def test_selected_outcomes_and_operations_exist():
    outcomes = {"ok", "client_closed", *STATUS_BY_CODE} | {
        kind("").outcome for kind in subclasses(ServingError)
    }
    of_shadows = outcomes | {"agreed", "disagreed", "failed", "shed"}

    for query in ALL:
        is_shadow = "nereid_route_shadow_requests_total" in query.expression
        for _, values in selected("outcome", query.expression):
            assert values <= (of_shadows if is_shadow else outcomes), query.where
        for _, values in selected("endpoint", query.expression):
            chosen = {path for path in ENDPOINTS if any(re.fullmatch(value, path) for value in values)}
            assert chosen in (IMAGE_ENDPOINTS, INFERENCE, INFERENCE - LONG), query.where
            assert all(any(re.fullmatch(value, path) for path in chosen) for value in values), query.where


@cases(
    variants=("job_route_variant:nereid_route_errors_per_requests:ratio_rate1m", "!~", INNOCENT),
    routes=("job_route:nereid_route_requests_failed:rate5m", "!~", INNOCENT),
    endpoints=("job_endpoint:nereid_gateway_errors_per_requests:ratio_rate1m", "=~", FAULTY),
    gateways=("job:nereid_gateway_requests_failed:rate5m", "=~", FAULTY),
)
def test_errors_are_what_is_the_servers_fault(name, operator, outcomes):
    assert selected("outcome", rules()[name]) == [(operator, outcomes)]


def test_compose_mounts_what_grafana_names():
    (provider,) = read("grafana/provisioning/dashboards/nereid.yml")["providers"]
    (source,) = read("grafana/provisioning/datasources/prometheus.yml")["datasources"]

    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]
    assert source["url"] == "http://prometheus:9090"


def test_local_differs_only_in_its_targets():
    here, there = read("prometheus/local.yml"), read("prometheus/prometheus.yml")
    ports = {"server": ServerOptions().ports.metrics, "gateway": GATEWAY_PORT, "supervisor": 8003}

    expected = [
        {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        for name, port in ports.items()
    ]
    alertmanager = {"alertmanagers": [{"static_configs": [{"targets": ["127.0.0.1:9093"]}]}]}
    assert here == there | {"scrape_configs": expected, "alerting": alertmanager}


def test_dashboards_query_the_provisioned_source():
    (source,) = read("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    interval = read("prometheus/prometheus.yml")["global"]["scrape_interval"]

    assert source["jsonData"]["timeInterval"] == interval
    for panel in panels():
        assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}, panel["title"]
        assert not any("datasource" in target for target in panel["targets"]), panel["title"]
