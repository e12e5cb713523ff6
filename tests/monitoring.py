"""Readers of the configuration of Prometheus, Grafana and the autoscalers, with every query and metric."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from nereid.base.prometheus_text import MetricSamples
from tests.conftest import ROOT
from tools.metrics_page import families

PROMETHEUS, GRAFANA = ROOT / "deploy" / "prometheus", ROOT / "deploy" / "grafana"
RUNBOOK, MONITORING = ROOT / "docs" / "runbook.md", ROOT / "docs" / "monitoring.md"
# A page of Triton's GPU metrics: names, labels and descriptions are those of 24.10, the values are made up.
GPU_PAGE = ROOT / "tests" / "contract" / "triton_gpu.metrics"
# Without what needs a cache or an option.
# Source: triton-inference-server/server, docs/user_guide/metrics.md.
COUNTS = ("request_success", "request_failure", "count", "exec_count", "pending_request_count")
TIMES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
TRITON = {f"nv_inference_{name}" for name in (*COUNTS, *(f"{part}_duration_us" for part in TIMES))}
OPERATORS = {"and", "or", "unless", "bool", "offset"}
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))


@dataclass(frozen=True, slots=True)
class Query:
    where: str
    expression: str


def read(relative: str) -> Any:
    return yaml.safe_load((ROOT / "deploy" / relative).read_text())


def rules() -> Mapping[str, str]:
    groups = read("prometheus/rules.yml")["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


def gpu_metrics() -> set[str]:
    return {*MetricSamples.parse(GPU_PAGE.read_text()).samples}


def exported() -> set[str]:
    """Return the names of all series: of our and Triton's metrics pages, and of Prometheus itself."""
    ours = set[str]().union(*(family.series() for family in families()))
    return ours | TRITON | gpu_metrics() | {"up", "ALERTS"}


def metrics_of(expression: str) -> set[str]:
    bare = re.sub(
        r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)',
        " ",
        expression,
    )
    bare = re.sub(r"\boffset \w+", " ", bare)
    return set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - OPERATORS


def alerts() -> list[dict[str, Any]]:
    return [rule for group in read("prometheus/alerts.yml")["groups"] for rule in group["rules"]]


def alerting() -> list[Query]:
    """Return the expressions of the alerts; of several with one name, each has its window."""
    names = [f"{alert['alert']} {alert['labels'].get('window', '')}".strip() for alert in alerts()]
    return [Query(name, alert["expr"]) for name, alert in zip(names, alerts(), strict=True)]


def runbook_queries() -> list[Query]:
    queries = re.findall(r"^promtool query instant \S+ '(.*)'$", RUNBOOK.read_text(), re.M)
    return [Query(f"runbook {query}", query) for query in dict.fromkeys(queries)]


def questions() -> list[Query]:
    table = MONITORING.read_text().split("## Questions")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| `(.+)` \|$", table, re.M)
    return [Query(question, query.replace("\\|", "|")) for question, query in rows]


def panels() -> Iterator[dict[str, Any]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] == "row":
                yield from panel["panels"]
            else:
                yield panel


def shown(rate_interval: str = "1m") -> list[Query]:
    targets = [(panel["title"], target) for panel in panels() for target in panel["targets"]]
    interval = "$__rate_interval", rate_interval
    return [Query(f"{title}, {item['refId']}", item["expr"].replace(*interval)) for title, item in targets]


def judging() -> list[Query]:
    """Return the queries for Argo Rollouts and Flagger, for the variants of the default route."""
    argo = read("kubernetes/rollouts/argo-analysis-template.yaml")
    texts = {metric["name"]: metric["provider"]["prometheus"]["query"] for metric in argo["spec"]["metrics"]}
    flagger = (ROOT / "deploy" / "kubernetes" / "rollouts" / "flagger-metric-templates.yaml").read_text()
    texts |= {metric["metadata"]["name"]: metric["spec"]["query"] for metric in yaml.safe_load_all(flagger)}
    values = {"args.route": "classify", "args.candidate": 'variant="v1"', "args.control": 'variant="v2"'}
    values |= {"namespace": "", "target": "", "interval": "1m"}
    queries = []
    for name, query in texts.items():
        filled = re.sub(r"\{\{ ?([a-z.]+) ?\}\}", lambda match: values[match[1]], query)
        queries.append(Query(name, re.sub(r'namespace="",pod=~"[^"]*",?', "", filled)))
    return queries


def scaling() -> list[Query]:
    adapter = read("kubernetes/scaling/hpa/prometheus-adapter-values.yaml")
    keda = read("kubernetes/scaling/keda/autoscaler.yaml")
    texts = {f"HPA {rule['name']['as']}": rule["metricsQuery"] for rule in adapter["rules"]["external"]}
    texts |= {
        f"KEDA {index}": entry["metadata"]["query"] for index, entry in enumerate(keda["spec"]["triggers"])
    }
    return [
        Query(where, re.sub(r'\{(<<\.LabelMatchers>>|namespace="\w+")\}', "", query))
        for where, query in texts.items()
    ]


def asked(rate_interval: str = "1m") -> list[Query]:
    """Return the queries of dashboards, autoscalers, judges of rollouts, and the table of questions."""
    return [*shown(rate_interval), *scaling(), *judging(), *questions()]
