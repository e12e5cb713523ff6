"""The values of `nereid top` from two readings of a server. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from nereid.observe.machine import MachineReading
from nereid.observe.metric_growth import Growth, MetricsPage
from nereid.observe.top_reading import GatewayReading, Reading
from nereid.observe.top_values import (
    Top,
    TopGateway,
    TopGpu,
    TopMachine,
    TopModel,
    TopProcess,
    TopRollout,
    TopRoute,
    TopServer,
    TopShadow,
    TopVariant,
)
from nereid.rollout.counts import FAULTS
from nereid.rollout.rollout_journal import Rollout
from nereid.routes.served import BREAKER_STATES
from nereid.routing.assignment import Route, Shadow, shares
from nereid.server.supervision.process_usage import GATEWAY, Usage
from nereid.triton.metrics import ROUTE_PREFIX

GATEWAY_PREFIX = "nereid_gateway_"
SHED = ("overloaded", "rate_limited")
OK = "ok"
# Requests such as health checks and metrics pages have no model.
MODELLESS = {"model": ""}


def measure(before: Reading, after: Reading) -> Top:
    """Return the values between two readings; without two pages of the server, there are no rates."""
    assert after.record, "a server runs"
    is_restarted = _pid(before) != _pid(after)
    growth = None
    # The counts of a server that started in between are all from this time.
    if before.page and after.page:
        growth = Growth(before.page, after.page, is_restarted)
    seconds = after.read_s - before.read_s
    processes = Cpu(before.usage, after.usage, seconds)
    return Top(
        growth.seconds if growth else None,
        _server(after),
        _machine(before.machine, after.machine, after.page) if after.machine else None,
        [_route(name, after, growth) for name in _route_names(after)] if growth else [],
        _models(after.page, growth, processes) if growth and after.page else [],
        processes.by_name(),
        [_gateway(each, before.gateways, seconds) for each in after.gateways],
        [f"tritonserver restarted: pid {_pid(before)} became {_pid(after)}"]
        if is_restarted and before.record
        else [],
    )


class Cpu:
    """The use of processes between two readings; the time of a new process counts from its start."""

    def __init__(self, before: Iterable[Usage], after: Sequence[Usage], seconds: float) -> None:
        self._earlier_s = {each.process: each.cpu_s for each in before}
        self._after, self._seconds = after, seconds

    def by_name(self) -> list[TopProcess]:
        """Return the use of each name."""
        return [self.of(name) for name in dict.fromkeys(each.name for each in self._after)]

    def of(self, name: str, version: int | None = None) -> TopProcess:
        """Return the use of the processes of a name, or of one version of a model."""
        found = [each for each in self._after if each.name == name and version in (None, each.version)]
        spent_s = sum(each.cpu_s - self._earlier_s.get(each.process, 0.0) for each in found)
        percent = 100 * spent_s / self._seconds
        return TopProcess(name, len(found), percent, sum(each.memory_bytes for each in found))

    @property
    def is_known(self) -> bool:
        """Whether the processes are on this machine."""
        return bool(self._after)


def _pid(reading: Reading) -> int:
    return reading.record.pid if reading.record else 0


def _server(after: Reading) -> TopServer:
    assert after.record
    record = after.record
    ports = {name: port for name in ("http", "grpc", "metrics") if (port := getattr(record.ports, name))}
    if record.health_port:
        ports["health"] = record.health_port
    is_ready = None if after.reasons is None else not after.reasons
    reasons = after.reasons or {}
    return TopServer(
        record.pid, record.host, ports, record.profile, after.uptime_s, is_ready, reasons, after.trouble
    )


def _machine(before: MachineReading | None, after: MachineReading, page: MetricsPage | None) -> TopMachine:
    busy = []
    for core, (worked, total) in after.cores.items():
        worked_before, total_before = before.cores.get(core, (0, 0)) if before else (0, 0)
        passed = total - total_before
        busy.append(min(1.0, max(0.0, (worked - worked_before) / passed)) if passed > 0 else 0.0)
    return TopMachine(
        busy,
        after.load,
        after.memory_bytes,
        after.available_bytes,
        after.limit_cores,
        after.limit_bytes,
        _gpus(page) if page else [],
    )


def _gpus(page: MetricsPage) -> list[TopGpu]:
    names = ("utilization", "memory_used_bytes", "memory_total_bytes", "power_usage")
    uuids = sorted({uuid for name in names for uuid in page.values(f"nv_gpu_{name}", "gpu_uuid")})
    return [
        TopGpu(uuid, *(page.total(f"nv_gpu_{name}", {"gpu_uuid": uuid}) for name in names)) for uuid in uuids
    ]


def _route_names(after: Reading) -> list[str]:
    served = after.page.values(f"{ROUTE_PREFIX}generation", "route") if after.page else set()
    return sorted(served)


def _route(name: str, after: Reading, growth: Growth) -> TopRoute:
    file, rollout = after.routes.get(name), after.rollouts.get(name)
    requests = f"{ROUTE_PREFIX}requests_total"
    names = [each.name for each in file.variants] if file else []
    names += sorted(growth.after.values(requests, "variant", {"route": name}) - {*names})
    return TopRoute(
        name,
        _rollout(rollout) if rollout else None,
        [_variant(name, each, file, growth) for each in names],
        [_shadow(name, each, growth) for each in (file.shadows if file else ())],
    )


def _rollout(state: Rollout) -> TopRollout:
    return TopRollout(state.plan.candidate, state.phase, state.step_name, state.share)


def _variant(route: str, name: str, file: Route | None, growth: Growth) -> TopVariant:
    requests, labels = f"{ROUTE_PREFIX}requests_total", {"route": route, "variant": name}
    variant = next((each for each in file.variants if each.name == name), None) if file else None
    own, all_of_route = growth.total(requests, labels), growth.total(requests, {"route": route})
    duration = f"{ROUTE_PREFIX}request_duration_seconds"
    p50, p99 = (_ms(growth.quantile(share, duration, {"outcome": OK, **labels})) for share in (0.5, 0.99))
    return TopVariant(
        name,
        variant.model if variant else None,
        variant.version if variant else None,
        variant.weight if variant else None,
        shares(file).get(name) if file else None,
        own / all_of_route if all_of_route else None,
        own / growth.seconds,
        sum(growth.rate(requests, {"outcome": outcome, **labels}) for outcome in FAULTS),
        p50,
        p99,
        _breaker(growth.after, labels),
    )


def _breaker(page: MetricsPage, labels: Mapping[str, str]) -> str | None:
    """Return the most open state of the instances; None if the variant has had no request."""
    states = [int(value) for _, value in page.select(f"{ROUTE_PREFIX}breaker_state", labels)]
    return BREAKER_STATES.get(max(states), str(max(states))) if states else None


def _shadow(route: str, shadow: Shadow, growth: Growth) -> TopShadow:
    name, labels = f"{ROUTE_PREFIX}shadow_requests_total", {"route": route, "shadow": shadow.name}
    counts = {
        outcome: growth.after.total(name, {"outcome": outcome, **labels}) or 0.0
        for outcome in ("agreed", "disagreed", "failed")
    }
    compared = sum(counts.values())
    return TopShadow(
        shadow.name,
        shadow.model,
        shadow.version,
        float(shadow.percent),
        growth.rate(name, labels, without={"outcome": "shed"}),
        counts["agreed"] / compared if compared else None,
    )


def _models(page: MetricsPage, growth: Growth, processes: Cpu) -> list[TopModel]:
    loaded = {
        (labels["model"], int(labels["version"])) for labels, _ in page.select("nv_inference_request_success")
    }
    return [_model(name, version, growth, processes) for name, version in sorted(loaded)]


def _model(name: str, version: int, growth: Growth, processes: Cpu) -> TopModel:
    labels = {"model": name, "version": str(version)}

    def grown(metric: str) -> float:
        return growth.total(f"nv_inference_{metric}", labels)

    def mean(total: float, count: float) -> float | None:
        return total / count if count else None

    succeeded = grown("request_success")
    compute_us = sum(grown(f"compute_{part}_duration_us") for part in ("input", "infer", "output"))
    own = processes.of(name, version)
    is_known = processes.is_known and own.count > 0
    return TopModel(
        name,
        version,
        own.count if is_known else None,
        (succeeded + grown("request_failure")) / growth.seconds,
        mean(grown("queue_duration_us") / 1e3, succeeded),
        mean(compute_us / 1e3, succeeded),
        mean(grown("count"), grown("exec_count")),
        growth.after.total("nv_inference_pending_request_count", labels),
        own.cpu_percent if is_known else None,
        own.memory_bytes if is_known else None,
    )


def _gateway(after: GatewayReading, earlier: Sequence[GatewayReading], seconds: float) -> TopGateway:
    before = next((each for each in earlier if each.record == after.record), None)
    spent = Cpu(before.usage if before else (), after.usage, seconds).of(GATEWAY)
    known = Growth(before.page, after.page) if before and before.page and after.page else None
    record, page = after.record, after.page
    return TopGateway(
        record.host,
        record.port,
        record.pid,
        after.trouble,
        known.rate(f"{GATEWAY_PREFIX}requests_total", without=MODELLESS) if known else None,
        _gateway_p99_ms(known) if known else None,
        page.total(f"{GATEWAY_PREFIX}in_flight") if page else None,
        page.total(f"{GATEWAY_PREFIX}waiting") if page else None,
        page.total(f"{GATEWAY_PREFIX}limit") if page else None,
        _shed_per_s(known) if known else None,
        spent.cpu_percent,
        spent.memory_bytes,
    )


def _gateway_p99_ms(growth: Growth) -> float | None:
    total = {"stage": "total", "outcome": OK}
    return _ms(growth.quantile(0.99, f"{GATEWAY_PREFIX}stage_seconds", total, MODELLESS))


def _shed_per_s(growth: Growth) -> float:
    return sum(growth.rate(f"{GATEWAY_PREFIX}requests_total", {"outcome": outcome}) for outcome in SHED)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
