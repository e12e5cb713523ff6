"""Readers of the configuration of Prometheus, Grafana and the autoscalers, with every query."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tests.conftest import ROOT

PROMETHEUS, GRAFANA = ROOT / "deploy" / "prometheus", ROOT / "deploy" / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))


@dataclass(frozen=True, slots=True)
class Query:
    """An expression and its place."""

    where: str
    expression: str


def read(relative: str) -> Any:
    """Return a YAML file of deploy/."""
    return yaml.safe_load((ROOT / "deploy" / relative).read_text())


def rules() -> Mapping[str, str]:
    """Return the expressions of the recording rules, by their names."""
    groups = read("prometheus/rules.yml")["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


def panels() -> Iterator[dict[str, Any]]:
    """Yield the panels of all dashboards."""
    for path in DASHBOARDS:
        yield from json.loads(path.read_text())["panels"]


def shown(rate_interval: str = "1m") -> list[Query]:
    """Return the queries of all dashboards as Grafana sends them.

    Args:
        rate_interval: what `$__rate_interval` stands for.
    """
    return [
        Query(
            f"{panel['title']}, {target['refId']}",
            target["expr"].replace("$__rate_interval", rate_interval),
        )
        for panel in panels()
        for target in panel["targets"]
    ]


def judging() -> list[Query]:
    """Return the queries for Argo Rollouts and Flagger, for the variants of the default route."""
    argo = read("kubernetes/rollouts/argo-analysis-template.yaml")
    found = {each["name"]: each["provider"]["prometheus"]["query"] for each in argo["spec"]["metrics"]}
    flagger = (ROOT / "deploy" / "kubernetes" / "rollouts" / "flagger-metric-templates.yaml").read_text()
    found |= {each["metadata"]["name"]: each["spec"]["query"] for each in yaml.safe_load_all(flagger)}
    values = {"args.route": "classify", "args.candidate": 'variant="v1"', "args.control": 'variant="v2"'}
    values |= {"namespace": "", "target": "", "interval": "1m"}
    queries = []
    for name, query in found.items():
        filled = re.sub(r"\{\{ ?([a-z.]+) ?\}\}", lambda match: values[match[1]], query)
        queries.append(Query(name, re.sub(r'namespace="",pod=~"[^"]*",?', "", filled)))
    return queries


def scaling() -> list[Query]:
    """Return the queries of the autoscalers, of all namespaces."""
    adapter = read("kubernetes/scaling/hpa/prometheus-adapter-values.yaml")
    keda = read("kubernetes/scaling/keda/autoscaler.yaml")
    found = {f"HPA {rule['name']['as']}": rule["metricsQuery"] for rule in adapter["rules"]["external"]}
    found |= {
        f"KEDA {place}": each["metadata"]["query"] for place, each in enumerate(keda["spec"]["triggers"])
    }
    return [
        Query(where, re.sub(r'\{(<<\.LabelMatchers>>|namespace="\w+")\}', "", query))
        for where, query in found.items()
    ]
