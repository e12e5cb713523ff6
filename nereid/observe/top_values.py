"""The values of `nereid top`.

Shares are 0 to 1, times are in milliseconds, rates per second, and None is an unknown value. The names of the
fields are the keys of `nereid top --json`, which scripts depend on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TopServer:
    """The server; `not_ready` has the reasons by part, and `trouble` why it does not respond."""

    pid: int
    host: str
    ports: Mapping[str, int]
    profile: str
    uptime_s: float | None
    ready: bool | None
    not_ready: Mapping[str, str]
    trouble: str


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
    """The machine: the busy share of each core, and the limits of the server's control groups."""

    cores_busy: Sequence[float]
    load: Sequence[float]
    memory_total_bytes: int
    memory_available_bytes: int
    limit_cores: float | None
    limit_memory_bytes: int | None
    gpus: Sequence[TopGpu]


@dataclass(frozen=True, slots=True)
class TopVariant:
    """One variant of a route.

    `weight` is the one of the route file, `expected_share` its part of all weights. `requests_per_s` counts
    each attempt on the variant, and `share` is its part of all attempts.
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
class TopRollout:
    """An active rollout of a route."""

    candidate: str
    phase: str
    step: str
    share: float


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
