"""Generator of docs/metrics.md, run by `make docs`: every metric of ours, from the code that exports it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nereid.backends.triton import metrics
from nereid.base.assets import CHECKOUT
from nereid.base.prometheus_text import MetricSpec
from nereid.base.tracing import collector
from nereid.gateway.admission import Admission
from nereid.gateway.gateway_metrics import Metrics
from nereid.insight.drift import monitor
from nereid.models.rollout import service
from nereid.server.supervision import health, process_usage
from nereid.tasks.read.stages import METRICS as READER

TARGET = CHECKOUT / "docs" / "metrics.md"
HEAD = """# Metrics

`make docs` generates this page from the code. [Monitoring](monitoring.md) explains how to collect the metrics
and has queries for common questions. [Triton's own metrics](monitoring.md#jobs) have names that begin with
`nv_`.

A histogram has three series: `NAME_bucket` with the label `le`, `NAME_sum` and `NAME_count`. The gateway also
exports `NAME_created`, the Unix time of the first event. Prometheus adds the labels `job` and `instance`.
"""
# By the ending of a name without `_total`; the first that fits. Other counters count events.
UNITS = {"_seconds": "seconds", "_bytes": "bytes", "_us": "µs", "_state": "state"}


@dataclass(frozen=True, slots=True)
class Family:
    """One metric as the reference shows it; `name` is without `_bucket` and the like."""

    name: str
    kind: str
    labels: tuple[str, ...]
    description: str
    buckets: tuple[float, ...] = ()

    @property
    def unit(self) -> str:
        """The unit, from the ending of the name."""
        stem = self.name.removesuffix("_total")
        unit = next((unit for ending, unit in UNITS.items() if stem.endswith(ending)), "")
        return unit or ("count" if self.kind == "counter" else "")

    def series(self) -> set[str]:
        """Return the names of its series."""
        if self.kind != "histogram":
            return {self.name}
        return {f"{self.name}_{part}" for part in ("bucket", "sum", "count")}


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics of one part: its heading, where it is explained, and the job that Prometheus reads."""

    title: str
    link: str
    job: str
    families: tuple[Family, ...]


def of_page(prefix: str, common: tuple[str, ...], kinds: Mapping[str, MetricSpec]) -> tuple[Family, ...]:
    """Return the families of a backend on Triton's page, or of a page of the supervisor."""
    return tuple(
        Family(
            prefix + name,
            "histogram" if about.buckets else about.kind.lower(),
            (*common, *about.labels),
            about.description.removesuffix("."),
            about.buckets,
        )
        for name, about in kinds.items()
    )


def of_gateway() -> Iterator[Family]:
    """Yield the families of the gateway; labels are those of samples, so each method is called once.

    Raises:
        ValueError: a family has no samples, because no method that counts it is called here.
    """
    page = Metrics(Admission(1))
    page.count("requests", "", "", "", "", {"": 0.0})
    page.count("images", "", "", "", "", {})
    page.count_feedback("", "", is_correct=True)
    for family in page.registry.collect():
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        if not samples:
            raise ValueError(f"{family.name}: no samples; fix: call its method in tools/metrics_page.py")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = tuple(label for label in samples[0].labels if label != "le")
        bounds = [float(sample.labels["le"]) for sample in samples if "le" in sample.labels]
        yield Family(name, family.type, labels, family.documentation, tuple(bounds[:-1]))


def groups() -> tuple[Group, ...]:
    """Return all metrics of ours; new metrics are added here."""
    return (
        Group(
            "Routes",
            "routing.md#metrics",
            "server",
            of_page(metrics.ROUTE_PREFIX, metrics.ROUTE_LABELS, metrics.ROUTE_METRICS),
        ),
        Group(
            "Quality of responses",
            "drift.md#signals",
            "server",
            of_page(metrics.ROUTE_PREFIX, metrics.ROUTE_LABELS, metrics.ROUTE_QUALITY_METRICS),
        ),
        Group(
            "Images",
            "drift.md#signals",
            "server",
            of_page(metrics.IMAGE_PREFIX, metrics.IMAGE_LABELS, metrics.IMAGE_METRICS),
        ),
        Group(
            "ONNX backend",
            "backends.md#metrics-of-onnx-runtime",
            "server",
            of_page(metrics.SESSION_PREFIX, metrics.SESSION_LABELS, metrics.SESSION_METRICS),
        ),
        Group(
            "Reading of text",
            "reading_reference.md#reader-metrics",
            "server",
            of_page(*READER),
        ),
        Group("Gateway", "gateway.md#metrics", "gateway", tuple(of_gateway())),
        Group(
            "Supervisor",
            "server.md#health-port",
            "supervisor",
            of_page(health.PREFIX, (), health.METRICS),
        ),
        Group(
            "Rollouts",
            "rollouts.md#metrics",
            "supervisor",
            of_page(service.PREFIX, service.LABELS, service.METRICS),
        ),
        Group(
            "Drift",
            "drift.md#metrics-of-the-monitor",
            "supervisor",
            of_page(monitor.PREFIX, monitor.LABELS, monitor.METRICS),
        ),
        Group(
            "Traces",
            "slow_requests.md#which-traces-are-kept",
            "supervisor",
            of_page(collector.PREFIX, (), collector.METRICS),
        ),
        Group(
            "Processes",
            "server.md#health-port",
            "supervisor",
            of_page(process_usage.PREFIX, process_usage.LABELS, process_usage.METRICS),
        ),
    )


def families() -> list[Family]:
    """Return the metrics of all groups."""
    return [family for group in groups() for family in group.families]


def render() -> str:
    """Return the page: one table for each group."""
    return HEAD + "".join(_section(group) for group in groups())


def _section(group: Group) -> str:
    rows = "\n".join(_row(family) for family in group.families)
    page = group.link.partition("#")[0]
    return (
        f"\n## {group.title}\n\nJob `{group.job}`. Details: [{page}]({group.link}).\n\n"
        f"| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n{rows}\n"
    )


def _row(family: Family) -> str:
    kind = family.kind
    if family.buckets:
        kind += f", {len(family.buckets)} bounds from {family.buckets[0]:g} to {family.buckets[-1]:g}"
    labels = ", ".join(f"`{label}`" for label in family.labels)
    cells = (f"`{family.name}`", kind, family.unit, labels, family.description)
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


if __name__ == "__main__":
    TARGET.write_text(render())
