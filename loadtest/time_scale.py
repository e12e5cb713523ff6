"""The committed rules and alerts with all durations divided by one factor; thresholds stay."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
RULES, ALERTS = (DEPLOY / "prometheus" / name for name in ("rules.yml", "alerts.yml"))
# An hour passes in a minute.
FACTOR = 60
SCRAPE_S, EVALUATION_S = 2, 1
# `rate` needs two samples, and one missed scrape must not fire an alert: Grafana uses four intervals.
MIN_RANGE_S = 4 * SCRAPE_S
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = r"(\d+)([smhd])\b"
# Numbers in expressions that are seconds: an interval of the sums, an hour, a day.
SECONDS = re.compile(r"\b(60(?= \* sum_over_time)|3600|86400)\b")


def seconds(duration: str) -> float:
    """Return a duration of Prometheus, such as 5m, in scaled seconds.

    Raises:
        ValueError: it has more than one unit, or another one.
    """
    found = re.fullmatch(DURATION, duration)
    if not found:
        raise ValueError(f"expected a duration such as 5m, got '{duration}'")
    return int(found[1]) * UNITS_S[found[2]] / FACTOR


def expression(text: str) -> str:
    """Divide ranges, offsets and seconds of a query; a range has at least four scrapes."""
    text = re.sub(r"\[(\w+)\]", lambda found: f"[{_whole(found[1], MIN_RANGE_S)}]", text)
    text = re.sub(r"\boffset (\w+)", lambda found: f"offset {_whole(found[1], EVALUATION_S)}", text)
    return SECONDS.sub(lambda found: f"{int(found[1]) / FACTOR:g}", text)


def _whole(duration: str, least_s: int) -> str:
    return f"{max(least_s, round(seconds(duration)))}s"


def rules(path: Path) -> dict[str, Any]:
    """Return a file of rules with scaled expressions, intervals and `for`, at least four scrapes."""
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    for group in document["groups"]:
        if "interval" in group:
            group["interval"] = _whole(group["interval"], EVALUATION_S)
        for rule in group["rules"]:
            rule["expr"] = expression(rule["expr"])
            if "for" in rule:
                rule["for"] = _whole(rule["for"], MIN_RANGE_S)
    return document


def scrapes(addresses: Mapping[str, str]) -> dict[str, Any]:
    """Return Prometheus' configuration of local.yml with other addresses, by job, and short intervals."""
    document: dict[str, Any] = yaml.safe_load((RULES.parent / "local.yml").read_text())
    document["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{EVALUATION_S}s"}
    document.pop("alerting", None)
    for job in document["scrape_configs"]:
        job["static_configs"] = [{"targets": [addresses[job["job_name"]]]}]
    return document
