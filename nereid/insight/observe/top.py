"""Readings of a running server, and the values of `nereid top` between two of them.

Shares are 0 to 1, times are in milliseconds, rates per second, and None is an unknown value. The names of the
fields of `Top` and its parts are the keys of `nereid top --json`, which scripts depend on.
"""

import contextlib
import http.client
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

from nereid.backends.routing.assignment import Route, Shadow, shares
from nereid.backends.triton import stub_processes
from nereid.backends.triton.metrics import ROUTE_PREFIX
from nereid.backends.triton.stub_processes import PROC
from nereid.base import prometheus_text
from nereid.base.control_groups import OWN, ControlGroups
from nereid.base.errors import OperationFailed
from nereid.base.prometheus_text import ANY, LabelMatchers, MetricSamples
from nereid.insight.observe.contention import read_cores
from nereid.models.rollout.measurement import DURATIONS, REQUESTS, SHADOWS, VARIANT_FAULTS
from nereid.models.rollout.rollout_journal import active_rollouts
from nereid.models.routes.change import BREAKER_STATES
from nereid.models.routes.location import readable_routes
from nereid.server import run_dir
from nereid.server.run_dir import GatewayInfo, ServerInfo
from nereid.server.supervision import process_usage
from nereid.server.supervision.process_usage import GATEWAY, Usage

TIMEOUT_S = 2.0
NEEDS_KEY = "its metrics need a key"
KEY_NEEDED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
GATEWAY_PREFIX = "nereid_gateway_"
SHED = ("overloaded", "rate_limited")
OK = "ok"
# Requests such as health checks and metrics pages have no model.
MODELLESS = {"model": ""}
NO_SAMPLES = MetricSamples({})


@dataclass(frozen=True, slots=True)
class TopServer:
    """The server; `not_ready` gives the reasons by part, and `trouble` why it does not respond."""

    pid: int
    host: str
    ports: Mapping[str, int]
    profile: str
    uptime_s: float | None
    ready: bool | None
    not_ready: Mapping[str, str]
    trouble: str


@dataclass(frozen=True, slots=True)
class TopRollout:
    """An active rollout of a route."""

    candidate: str
    phase: str
    step: str
    share: float


@dataclass(frozen=True, slots=True)
class TopGpu:
    """One GPU, as Triton reports it."""

    uuid: str
    busy: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    power_w: float | None


@dataclass(frozen=True, slots=True)
class TopMachine:
    """The machine: the busy fraction of each core, and the limits of the server's control groups.

    A reading has no `cores_busy` yet, which `measure` adds.
    """

    cores_busy: Sequence[float]
    load: Sequence[float]
    memory_total_bytes: int
    memory_available_bytes: int
    limit_cores: float | None
    limit_memory_bytes: int | None
    gpus: Sequence[TopGpu]


@dataclass(frozen=True, slots=True)
class GatewayReading:
    """A gateway of the repository: its samples, or why they cannot be read, and its processes."""

    read_at: float
    info: GatewayInfo
    samples: MetricSamples | None
    problem: str
    usage: Sequence[Usage]


@dataclass(frozen=True, slots=True)
class ServerReading:
    """The state of a server at one moment.

    Args:
        read_at: when its samples were read, in monotonic seconds.
        samples: Triton's metrics; None if the server does not respond.
        usage: of its processes; empty for a server named on the command line.
        cores: ticks of each core since the start, by its number: busy, and in total.
    """

    read_at: float
    server: TopServer | None
    samples: MetricSamples | None
    usage: Sequence[Usage]
    machine: TopMachine | None
    cores: Mapping[int, tuple[int, int]]
    gateways: Sequence[GatewayReading]
    routes: Mapping[str, Route]
    rollouts: Mapping[str, TopRollout]


def read_server(run_root: Path, repository: Path, server_info: ServerInfo | None) -> ServerReading:
    """Return the state of the server of a repository now."""
    if server_info is None:
        return ServerReading(time.monotonic(), None, None, (), None, {}, (), {}, {})
    samples, problem = _read_samples(server_info.url("metrics"))
    read_at = time.monotonic()  # the health check may take a while
    usage, machine, gateways = list[Usage](), None, list[GatewayInfo]()
    if server_info.pid:  # it was not named on the command line
        if supervisor := process_usage.parent_of(server_info.pid):
            usage = process_usage.read(supervisor, Path(server_info.repository))
        machine = _read_machine(server_info.pid, samples or NO_SAMPLES)
        gateways = run_dir.find_gateways(run_root, repository)
    return ServerReading(
        read_at,
        _read_server(server_info, problem),
        samples,
        usage,
        machine,
        read_cores(),
        [_read_gateway(gateway) for gateway in gateways],
        readable_routes(repository),
        _read_rollouts(repository),
    )


def _read_server(server_info: ServerInfo, problem: str) -> TopServer:
    reasons = {"server": problem} if problem else _reasons(server_info)
    return TopServer(
        server_info.pid,
        server_info.host,
        {name: port for name, port in server_info.all_ports.items() if port},
        server_info.profile,
        stub_processes.uptime_s(server_info.pid),
        None if reasons is None else not reasons,
        reasons or {},
        problem,
    )


def _read_samples(url: str) -> tuple[MetricSamples | None, str]:
    try:
        return MetricSamples.parse(prometheus_text.fetch(url, TIMEOUT_S)), ""
    except (OSError, http.client.HTTPException) as error:
        return None, f"no metrics from {url}: {error}"


def _reasons(server_info: ServerInfo) -> dict[str, str] | None:
    """Return why a server is not ready, from its supervisor if that has a port, else from Triton itself."""
    try:
        if server_info.health_port:
            status, text = prometheus_text.get(server_info.health_url, "/readyz", TIMEOUT_S)
            return {} if status == HTTPStatus.OK else _flat(json.loads(text))
        if server_info.sockets or server_info.ports.http:
            status, _ = prometheus_text.get(server_info.url("http"), "/v2/health/ready", TIMEOUT_S)
            return {} if status == HTTPStatus.OK else {"server": f"Triton responds with status {status}"}
    except (OSError, http.client.HTTPException, ValueError) as error:
        return {"server": str(error)}
    return None


def _flat(document: Mapping[str, object]) -> dict[str, str]:
    """Return the reasons of `/readyz`, for models by their names."""
    reasons: dict[str, str] = {}
    for part, reason in document.items():
        if isinstance(reason, Mapping):
            reasons |= {str(name): str(text) for name, text in reason.items()}
        elif part != "ready":
            reasons[part] = str(reason)
    return reasons


def _read_machine(pid: int, samples: MetricSamples) -> TopMachine:
    lines = [line.split() for line in (PROC / "meminfo").read_text().splitlines()]
    memory_bytes = {name: int(size) * 1024 for name, size, *_ in lines}
    membership = PROC / str(pid) / "cgroup"
    groups = ControlGroups(membership=membership) if membership.exists() else OWN  # the process has ended
    cores, limit = groups.cores(), groups.memory_limit()
    return TopMachine(
        (),
        os.getloadavg(),
        memory_bytes["MemTotal:"],
        memory_bytes["MemAvailable:"],
        None if math.isinf(cores) else cores,
        None if math.isinf(limit) else int(limit),
        read_gpus(samples),
    )


def read_gpus(samples: MetricSamples) -> list[TopGpu]:
    """Return the GPUs of a metrics page."""
    names = [f"nv_gpu_{name}" for name in ("utilization", "memory_used_bytes", "memory_total_bytes")]
    names.append("nv_gpu_power_usage")
    uuids = sorted({uuid for name in names for (uuid,) in samples.sums(name, "gpu_uuid")})
    return [TopGpu(uuid, *(samples.gauge(name, {"gpu_uuid": uuid}) for name in names)) for uuid in uuids]


def _read_gateway(info: GatewayInfo) -> GatewayReading:
    samples, problem = None, ""
    try:
        status, text = prometheus_text.get(info.url, "/metrics", TIMEOUT_S)
        if status == HTTPStatus.OK:
            samples = MetricSamples.parse(text)
        else:
            problem = NEEDS_KEY if status in KEY_NEEDED else f"its metrics have status {status}"
    except (OSError, http.client.HTTPException) as error:
        problem = f"no metrics: {error}"
    read_at = time.monotonic()
    return GatewayReading(read_at, info, samples, problem, process_usage.read_tree(info.pid, GATEWAY))


def _read_rollouts(repository: Path) -> dict[str, TopRollout]:
    with contextlib.suppress(OperationFailed, OSError):  # `nereid rollout status` gives the reason
        return {
            route: TopRollout(state.plan.candidate, state.phase, state.step_name, state.share)
            for route, state in active_rollouts(repository).items()
        }
    return {}


@dataclass(frozen=True, slots=True)
class TopVariant:
    """One variant of a route.

    `weight` is from the route file, `expected_share` its fraction of all weights. `requests_per_s` counts
    each attempt on the variant, and `share` is its fraction of all attempts.
    """

    name: str
    model: str | None
    version: int | None
    weight: float | None
    expected_share: float | None
    share: float | None
    requests_per_s: float
    errors_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    breaker: str | None


@dataclass(frozen=True, slots=True)
class TopShadow:
    """One shadow of a route; `agreement` is the share of equal results since the server's start."""

    name: str
    model: str
    version: int
    percent: float
    requests_per_s: float
    agreement: float | None


@dataclass(frozen=True, slots=True)
class TopRoute:
    """One route."""

    name: str
    rollout: TopRollout | None
    variants: Sequence[TopVariant]
    shadows: Sequence[TopShadow]


@dataclass(frozen=True, slots=True)
class TopModel:
    """One loaded version of a model; `cpu_percent` is 100 for one busy core."""

    name: str
    version: int
    instances: int | None
    requests_per_s: float
    queue_ms: float | None
    compute_ms: float | None
    batch_size: float | None
    pending: float | None
    cpu_percent: float | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class TopProcess:
    """All processes of one name: `tritonserver`, `supervisor`, `gateway`, or a model."""

    name: str
    count: int
    cpu_percent: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class TopGateway:
    """One gateway of the repository; `trouble` says why its values are unknown."""

    host: str
    port: int
    pid: int
    trouble: str
    requests_per_s: float | None
    p99_ms: float | None
    in_flight: float | None
    waiting: float | None
    limit: float | None
    shed_per_s: float | None
    cpu_percent: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Top:
    """All values; `seconds` is the time between the two readings of the server's metrics."""

    seconds: float | None
    server: TopServer
    machine: TopMachine | None
    routes: Sequence[TopRoute]
    models: Sequence[TopModel]
    processes: Sequence[TopProcess]
    gateways: Sequence[TopGateway]
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Interval:
    """Samples, and the increase of their counters over `seconds`."""

    samples: MetricSamples
    increase: MetricSamples
    seconds: float

    def rate(self, name: str, labels: LabelMatchers = ANY, excluding: LabelMatchers = ANY) -> float:
        """Return the increase of the selected series per second."""
        return self.increase.total(name, labels, excluding) / self.seconds


def measure(before: ServerReading, after: ServerReading) -> Top:
    """Return the values between two readings; without two pages of the server, there are no rates."""
    assert after.server, "a server runs"
    is_restarted = not before.server or before.server.pid != after.server.pid
    seconds, interval, notes = after.read_at - before.read_at, None, []
    if before.server and is_restarted:
        notes = [f"tritonserver restarted: pid {before.server.pid} became {after.server.pid}"]
    if before.samples and after.samples:
        # All counts of a server that started in between belong to this interval.
        increase = after.samples if is_restarted else after.samples - before.samples
        interval = Interval(after.samples, increase, seconds)
    names = dict.fromkeys(usage.name for usage in after.usage)
    return Top(
        seconds if interval else None,
        after.server,
        replace(after.machine, cores_busy=_busy(before.cores, after.cores)) if after.machine else None,
        _routes(after, interval) if interval else [],
        _models(interval, before.usage, after.usage) if interval else [],
        [_process(name, before.usage, after.usage, seconds) for name in names],
        [_gateway(gateway, before.gateways, seconds) for gateway in after.gateways],
        notes,
    )


def _process(
    name: str, before: Iterable[Usage], after: Iterable[Usage], seconds: float, version: int | None = None
) -> TopProcess:
    """Return the usage of the processes of a name, or of one version of a model.

    The time of a new process counts from its start.
    """
    earlier_s = {usage.process: usage.cpu_s for usage in before}
    usages = [usage for usage in after if usage.name == name and version in (None, usage.version)]
    spent_s = sum(usage.cpu_s - earlier_s.get(usage.process, 0.0) for usage in usages)
    memory_bytes = sum(usage.memory_bytes for usage in usages)
    return TopProcess(name, len(usages), 100 * spent_s / seconds, memory_bytes)


def _busy(before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]) -> list[float]:
    """Return the busy fraction of each core between two readings."""
    busy = []
    for core, (worked, total) in after.items():
        worked_before, total_before = before.get(core, (0, 0))
        passed = total - total_before
        busy.append(min(1.0, max(0.0, (worked - worked_before) / passed)) if passed > 0 else 0.0)
    return busy


def _routes(after: ServerReading, interval: Interval) -> list[TopRoute]:
    routes = []
    for (name,) in sorted(interval.samples.sums(f"{ROUTE_PREFIX}generation", "route")):
        file, labels = after.routes.get(name), {"route": name}
        names = [variant.name for variant in file.variants] if file else []
        counted = sorted(interval.samples.sums(REQUESTS, "variant", labels=labels))
        names += [variant for (variant,) in counted if variant not in names]
        variants = [_variant(name, variant, file, interval) for variant in names]
        shadows = [_shadow(name, shadow, interval) for shadow in (file.shadows if file else ())]
        routes.append(TopRoute(name, after.rollouts.get(name), variants, shadows))
    return routes


def _variant(route: str, name: str, file: Route | None, interval: Interval) -> TopVariant:
    labels, increase = {"route": route, "variant": name}, interval.increase
    variant = next((entry for entry in file.variants if entry.name == name), None) if file else None
    requests, all_of_route = increase.total(REQUESTS, labels), increase.total(REQUESTS, {"route": route})
    p50, p99 = (_ms(increase.quantile(share, DURATIONS, {**labels, "outcome": OK})) for share in (0.5, 0.99))
    # The most open state of the instances; none if the variant has had no request.
    states = interval.samples.sums(f"{ROUTE_PREFIX}breaker_state", "version", "model_instance", labels=labels)
    breaker = int(max(states.values(), default=-1))
    return TopVariant(
        name,
        variant.model if variant else None,
        variant.version if variant else None,
        variant.weight if variant else None,
        shares(file).get(name) if file else None,
        requests / all_of_route if all_of_route else None,
        requests / interval.seconds,
        interval.rate(REQUESTS, {**labels, "outcome": VARIANT_FAULTS}),
        p50,
        p99,
        BREAKER_STATES.get(breaker, str(breaker)) if states else None,
    )


def _shadow(route: str, shadow: Shadow, interval: Interval) -> TopShadow:
    labels = {"route": route, "shadow": shadow.name}
    agreed = interval.samples.total(SHADOWS, {**labels, "outcome": "agreed"})
    compared = interval.samples.total(SHADOWS, labels, excluding={"outcome": "shed"})
    return TopShadow(
        shadow.name,
        shadow.model,
        shadow.version,
        float(shadow.percent),
        interval.rate(SHADOWS, labels, excluding={"outcome": "shed"}),
        agreed / compared if compared else None,
    )


def _models(interval: Interval, before: Iterable[Usage], after: Iterable[Usage]) -> list[TopModel]:
    models = []
    loaded = interval.samples.sums("nv_inference_request_success", "model", "version")
    for name, version in sorted((name, int(version)) for name, version in loaded):
        usage = _process(name, before, after, interval.seconds, version)
        models.append(_model(name, version, interval, usage))
    return models


def _model(name: str, version: int, interval: Interval, usage: TopProcess) -> TopModel:
    labels = {"model": name, "version": str(version)}

    def increase_of(metric: str) -> float:
        return interval.increase.total(f"nv_inference_{metric}", labels)

    def mean(total: float, count: float) -> float | None:
        return total / count if count else None

    succeeded = increase_of("request_success")
    compute_us = sum(increase_of(f"compute_{part}_duration_us") for part in ("input", "infer", "output"))
    return TopModel(
        name,
        version,
        usage.count or None,
        (succeeded + increase_of("request_failure")) / interval.seconds,
        mean(increase_of("queue_duration_us") / 1e3, succeeded),
        mean(compute_us / 1e3, succeeded),
        mean(increase_of("count"), increase_of("exec_count")),
        interval.samples.gauge("nv_inference_pending_request_count", labels),
        usage.cpu_percent if usage.count else None,
        usage.memory_bytes if usage.count else None,
    )


def _gateway(after: GatewayReading, earlier: Sequence[GatewayReading], seconds: float) -> TopGateway:
    before = next((reading for reading in earlier if reading.info == after.info), None)
    spent = _process(GATEWAY, before.usage if before else (), after.usage, seconds)
    requests_per_s = p99_ms = shed_per_s = None
    info, samples = after.info, after.samples or NO_SAMPLES
    if before and before.samples and after.samples:
        interval = Interval(samples, samples - before.samples, after.read_at - before.read_at)
        requests, total = f"{GATEWAY_PREFIX}requests_total", {"stage": "total", "outcome": OK}
        requests_per_s = interval.rate(requests, excluding=MODELLESS)
        p99_ms = _ms(interval.increase.quantile(0.99, f"{GATEWAY_PREFIX}stage_seconds", total, MODELLESS))
        shed_per_s = interval.rate(requests, {"outcome": SHED})
    return TopGateway(
        info.host,
        info.port,
        info.pid,
        after.problem,
        requests_per_s,
        p99_ms,
        samples.gauge(f"{GATEWAY_PREFIX}in_flight"),
        samples.gauge(f"{GATEWAY_PREFIX}waiting"),
        samples.gauge(f"{GATEWAY_PREFIX}limit"),
        shed_per_s,
        spent.cpu_percent,
        spent.memory_bytes,
    )


def _ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds * 1e3
