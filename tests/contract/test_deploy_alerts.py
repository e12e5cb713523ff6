"""Alerts, their runbook and Alertmanager: complete, tested, and routed."""

import re

import pytest
import yaml

from tests.conftest import ROOT
from tests.contract.test_deploy_prometheus import needs_promtool, promtool
from tests.deployment import SERVICES
from tests.monitoring import PROMETHEUS, RUNBOOK, alerting, alerts, metrics_of, read, rules

ALERTMANAGER = ROOT / "deploy" / "alertmanager" / "alertmanager.yml"
# By objective: level of the sums, bad and all requests, allowed share.
OBJECTIVES = {
    "RouteErrors": ("job_route", "nereid_route_requests_failed", "nereid_route_requests", "0.001"),
    "RouteSlow": ("job_route", "nereid_route_requests_slow", "nereid_route_requests_ok", "0.01"),
    "GatewayErrors": ("job", "nereid_gateway_requests_failed", "nereid_gateway_requests", "0.001"),
    "GatewaySlow": ("job", "nereid_gateway_requests_slow", "nereid_gateway_requests_ok", "0.01"),
}
# Long window, short window, multiple of the allowed share, severity.
# Source: Google, The Site Reliability Workbook, table 5-8.
WINDOWS = (
    ("1h", "5m", "14.4", "page"),
    ("6h", "30m", "6", "page"),
    ("1d", "2h", "3", "ticket"),
    ("3d", "6h", "1", "ticket"),
)
DEAD_SERVER = {"TargetDown", "TargetMissing", "ServerNotReady"}


def expected_alerts() -> list[tuple[str, list[dict[str, str]]]]:
    """Return the checks of `alerts_test.yml`: an alert, and the labels with which it fires."""
    return [
        (check["alertname"], [fired["exp_labels"] for fired in check["exp_alerts"]])
        for case in read("prometheus/alerts_test.yml")["tests"]
        for check in case["alert_rule_test"]
    ]


def bare(expression: str) -> str:
    return re.sub(r"\s+", "", expression)


@needs_promtool
def test_alerts_fire_and_stay_silent_as_expected():
    promtool("test", "rules", str(PROMETHEUS / "alerts_test.yml"))


def test_every_alert_is_tested_to_fire_and_to_stay_silent():
    fired = {(name, labels.get("window")) for name, sets in expected_alerts() for labels in sets}

    assert fired == {(alert["alert"], alert["labels"].get("window")) for alert in alerts()}
    assert {name for name, sets in expected_alerts() if not sets} == {alert["alert"] for alert in alerts()}


def test_every_alert_has_severity_texts_and_runbook():
    for alert in alerts():
        texts = alert["annotations"]
        assert alert["labels"]["severity"] in ("page", "ticket"), alert["alert"]
        assert texts["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert {*texts} == {"summary", "description", "runbook_url"}
    sections = re.findall(r"^### (\w+)$", RUNBOOK.read_text(), flags=re.M)
    assert sections == [*dict.fromkeys(alert["alert"] for alert in alerts())]


@pytest.mark.parametrize(("name", "about"), OBJECTIVES.items(), ids=OBJECTIVES)
def test_burn_rates_are_those_of_the_workbook(name, about):
    level, bad, requests, allowed = about

    def share(window: str) -> str:
        return "/".join(f"sum_over_time({level}:{metric}:rate5m[{window}])" for metric in (bad, requests))

    expected = [
        (
            bare(
                f"({share(long)} > {multiple} * {allowed}) and ({share(short)} > {multiple} * {allowed})"
                f" and 60 * sum_over_time({level}:{bad}:rate5m[{long}]) >= 10"
            ),
            {"severity": severity, "window": long, "follows": "dead_server"},
        )
        for long, short, multiple, severity in WINDOWS
    ]
    assert [(bare(rule["expr"]), rule["labels"]) for rule in alerts() if rule["alert"] == name] == expected


def test_sums_of_objectives_are_a_minute_apart():
    """The alerts multiply sums by 60 to get requests."""
    files = [read(f"prometheus/{name}.yml") for name in ("rules", "alerts")]
    groups = {group["name"]: group for file in files for group in file["groups"]}

    used = set().union(*(metrics_of(query.expression) for query in alerting())) & set(rules())
    minutely = {rule["record"] for rule in groups["objectives"]["rules"]}
    assert (groups["objectives"]["interval"], groups["error_budgets"]["interval"]) == ("1m", "1m")
    assert minutely == {name for name in used if name.endswith("rate5m")}


def test_dead_server_silences_its_followers():
    dead, same = yaml.safe_load(ALERTMANAGER.read_text())["inhibit_rules"]

    (names,) = re.findall(r'alertname=~"([^"]+)"', dead["source_matchers"][1])
    assert {*names.split("|")} == DEAD_SERVER
    assert dead["target_matchers"] == ['follows="dead_server"']
    assert "equal" not in dead
    assert same["equal"] == ["alertname", "job", "route"]
    for alert in alerts():
        is_source = alert["alert"] in DEAD_SERVER
        assert not (is_source and "follows" in alert["labels"]), alert["alert"]
        assert is_source or alert["labels"]["severity"] == "ticket" or "follows" in alert["labels"]


def test_compose_runs_alertmanager():
    about = SERVICES["alertmanager"]
    (alertmanager,) = read("prometheus/prometheus.yml")["alerting"]["alertmanagers"]

    assert alertmanager["static_configs"] == [{"targets": ["alertmanager:9093"]}]
    assert f"./deploy/{ALERTMANAGER.parent.name}:/etc/alertmanager:ro" in about["volumes"]
    assert f"--config.file=/etc/alertmanager/{ALERTMANAGER.name}" in about["command"]
    assert "--log.level=debug" in about["command"], "the receiver `log` only logs at this level"
