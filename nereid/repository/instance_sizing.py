"""The number of instances of each model whose config sets none, fitted to the machine's cores and memory.

Only models of our backends on a CPU are fitted. A config with a `count` keeps it.
"""

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from nereid.backends.routing import route_file
from nereid.backends.routing.assignment import Route, parse_route, shares
from nereid.backends.routing.route_file import path_of
from nereid.base.config.instance_bounds import BOUNDS
from nereid.base.config.model_config import ModelConfig, read_config, with_instances
from nereid.base.errors import InvalidConfig
from nereid.base.processes import available_bytes, available_cores
from nereid.base.task_registry import TASK_BY_BACKEND
from nereid.repository.repository_index import (
    PARTS_BY_BACKEND,
    ROUTE,
    Documents,
    backend_of,
    parameters_of,
    readable_configs,
    served_steps,
    unused_models,
)

BACKENDS = frozenset({"onnxruntime", "preprocess", ROUTE, *PARTS_BY_BACKEND, *TASK_BY_BACKEND})
# Instances of all models together, per core: while one model is idle, the others use all cores.
PER_CORE = 2
# Python's lock limits an instance of a route to about 1,000 requests per second.
CORES_PER_ROUTE = 8
# One process of a network with shared weights. Part of the available memory for all instances: requests,
# the page cache and other programs need the rest.
INSTANCE_BYTES, INSTANCES_MEMORY_FRACTION = 70_000_000, 0.5
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores and the memory for the instances of all models."""

    cores: int
    memory_bytes: int

    @classmethod
    def detect(cls) -> "Machine":
        """Return the cores and the memory that this process may use now."""
        return cls(available_cores(), available_bytes())


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """The instances of each model whose config leaves the choice open, and what decided them."""

    machine: Machine
    counts: Mapping[str, int]
    is_short_of_memory: bool

    def __str__(self) -> str:
        gb = self.machine.memory_bytes / 1e9
        memory = f" and limited by {gb:.1f} GB of free memory" if self.is_short_of_memory else ""
        models = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        return f"instances fitted to {self.machine.cores} core(s){memory}: {models or 'none'}"


def plan_instances(
    repository: Path, profile: str, machine: Machine, backends: Collection[str] = BACKENDS
) -> InstancePlan:
    """Return the instances of every model of `profile` whose config leaves the choice open.

    Args:
        backends: the backends of the models whose instances are fitted.
    """
    documents, hidden = readable_configs(repository, profile), unused_models(repository, profile)
    served = {name: document for name, document in documents.items() if name not in hidden}
    routes = {name: _route(repository / name, document) for name, document in served.items()}
    model_shares = traffic_shares(served, {name: route for name, route in routes.items() if route})
    is_open = [name for name, document in served.items() if _is_open(repository / name, document, backends)]
    open_routes = [name for name in is_open if served[name].get("backend") == ROUTE]
    plan = allocate_instances(
        {name: model_shares[name] for name in is_open if name not in open_routes},
        machine,
        {name: _instance_bytes(document) for name, document in served.items()},
    )
    if (instances := machine.cores // CORES_PER_ROUTE) > 1:
        plan = replace(plan, counts={**plan.counts, **dict.fromkeys(open_routes, instances)})
    return plan


def traffic_shares(documents: Documents, routes: Mapping[str, Route]) -> dict[str, float]:
    """Return the fraction of all requests that each model must be able to answer, between 0 and 1.

    Models that no other model uses get equal fractions. A route divides half of its fraction among its
    variants by weight, and half evenly, because weights change while the server runs.
    """
    parts = {name: _parts(document, routes.get(name)) for name, document in documents.items()}
    inner = {name for models in parts.values() for name in models}
    outer = [name for name in documents if name not in inner] or [*documents]
    fractions = dict.fromkeys(documents, 0.0)

    def add(name: str, share: float, above: frozenset[str]) -> None:
        if name not in fractions or name in above:
            return
        fractions[name] += share
        for part, fraction in parts[name].items():
            add(part, share * fraction, above | {name})

    for name in outer:
        add(name, 1 / len(outer), frozenset())
    return fractions


def allocate_instances(
    model_shares: Mapping[str, float], machine: Machine, instance_bytes: Mapping[str, int] | None = None
) -> InstancePlan:
    """Return the instances of each model, from the fraction of requests that it must be able to answer.

    Args:
        instance_bytes: memory of a process of each model; by default, `INSTANCE_BYTES`.
    """
    cores = machine.cores
    counts = {
        name: max(1, min(cores, ceil(PER_CORE * cores * share))) for name, share in model_shares.items()
    }
    allowed = machine.memory_bytes * INSTANCES_MEMORY_FRACTION
    needed = sum(count * (instance_bytes or {}).get(name, INSTANCE_BYTES) for name, count in counts.items())
    if is_short := needed > allowed:
        counts = {name: max(1, int(count * allowed / needed)) for name, count in counts.items()}
    return InstancePlan(machine, counts, is_short)


def fitted_config(
    repository: Path,
    profile: str,
    model: str,
    machine: Machine,
    backends: Collection[str],
    instance_count: int = 0,
) -> str | None:
    """Return a model's config with its instances as JSON; None if it has a count of its own.

    Args:
        instance_count: the number to keep; 0 for the number that fits now.
    """
    if count := plan_instances(repository, profile, machine, backends).counts.get(model):
        return json.dumps(with_instances(read_config(repository / model, profile), instance_count or count))
    return None


def _instance_bytes(document: Mapping[str, Any]) -> int:
    task = TASK_BY_BACKEND.get(document.get("backend", ""))
    task_bytes = task.backend.instance_bytes if task and task.backend and not served_steps(document) else 0
    return task_bytes or INSTANCE_BYTES


def _is_open(folder: Path, document: Mapping[str, Any], backends: Collection[str]) -> bool:
    groups = document.get("instance_group", ())
    if backend_of(folder, document) not in backends or len(groups) > 1:
        return False
    if BOUNDS in parameters_of(document):  # the load decides while the server runs
        return False
    # Without a kind, Triton chooses a GPU if there is one.
    is_on_cpu = groups[0].get("kind") == "KIND_CPU" if groups else not DRIVER.exists()
    return is_on_cpu and not any(group.get("count") for group in groups)


def _parts(document: Mapping[str, Any], route: Route | None) -> dict[str, float]:
    if not route:
        return {name: 1.0 for name, _ in served_steps(document)}
    weights, fractions = shares(route), dict[str, float]()
    for variant in route.variants:
        part = (weights[variant.name] + 1 / len(route.variants)) / 2
        fractions[variant.model] = min(1.0, fractions.get(variant.model, 0.0) + part)
    for shadow in route.shadows:
        fractions[shadow.model] = min(1.0, fractions.get(shadow.model, 0.0) + shadow.percent / 100)
    return fractions


def _route(folder: Path, document: Mapping[str, Any]) -> Route | None:
    if document.get("backend") != ROUTE:
        return None
    with contextlib.suppress(InvalidConfig, OSError):
        return parse_route(route_file.read(path_of(ModelConfig.from_document(document, folder, 1)))[0])
    return None
