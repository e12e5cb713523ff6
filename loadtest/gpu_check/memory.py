"""Memory of the GPU per instance, after an unload, and after the memory was full."""

import time
from collections.abc import Iterator
from pathlib import Path

from loadtest.gpu_check import chain, network_runs, precisions, served
from loadtest.gpu_check.full_gpu import full_gpu
from loadtest.gpu_check.machine import memory_used_mib, process_memory_mib
from loadtest.gpu_check.sections import Context, Findings
from loadtest.gpu_check.server import REHEARSED
from nereid.assets import COFFEE
from nereid.client.classifier import Classifier
from nereid.server.command_line import GPU_POOLS
from nereid.server.control import Control
from nereid.server.embedded_server import EmbeddedServer
from nereid.tune import photos

REQUESTS, CLASSES = 8, {"espresso"}
# A CUDA context that ends gives its memory back within this time.
SETTLE_S = 10.0


def measure(context: Context) -> Iterator[Findings]:
    """Yield the memory at each stage, and the outcomes of requests while the GPU is full."""
    before = memory_used_mib()
    yield {"before_mib": before, "pool_flag": GPU_POOLS[0]}
    with served.running(context, chain.PROFILE) as server:
        ready = memory_used_mib()
        yield {"ready_mib": ready - before, "per_process_mib": by_command(process_memory_mib())}
        loaded = _after_requests(server) - before
        yield {"after_requests_mib": loaded}
        yield unload_and_load(server, before)
        yield when_full(server)
        yield {"at_the_end_mib": memory_used_mib() - before}
    settled = wait_below(before + 1, SETTLE_S)
    yield {"after_stop_mib": settled - before}
    # Last, because this process keeps its CUDA context.
    rows = network_runs.many(precisions.inputs())
    yield network_runs.halves(chain.gpu_config(chain.NETWORK), rows, network_runs.on_host(rows))


def rehearse(context: Context) -> Iterator[Findings]:
    """Yield the outcomes of requests after an unload and a load, of models on the CPU."""
    with served.running(context, REHEARSED) as server:
        unload(server)
        yield {"pool_flag": GPU_POOLS[0], "after_unload": outcome(server, COFFEE.read_bytes())}
        load(server)
        yield {"after_load": outcome(server, COFFEE.read_bytes())}


def by_command(processes: dict[int, int]) -> dict[str, int]:
    """Name processes by their command lines, for a record."""
    return {f"{pid} {command(pid)}": size for pid, size in processes.items()}


def command(pid: int) -> str:
    """Return the end of a process's command line; empty if the process is of another container."""
    path = Path(f"/proc/{pid}/cmdline")
    words = path.read_bytes().split(b"\0") if path.exists() else []
    names = [Path(word.decode(errors="replace")).name for word in words if word]
    return " ".join(names)[:120]


def unload_and_load(server: EmbeddedServer, before: int) -> Findings:
    """Unload all models, and load them again; returns the memory after each step."""
    unload(server)
    unloaded = wait_below(before + 1, SETTLE_S) - before
    load(server)
    return {"after_unload_mib": unloaded, "after_load_mib": _after_requests(server) - before}


def unload(server: EmbeddedServer) -> None:
    """Unload all models, the ensembles first, and wait until they are gone."""
    control = Control(server.record())
    models = [
        each
        for each in (*sorted(server.models), chain.NETWORK, chain.PREPROCESS)
        if not control.is_gone(each)
    ]
    for model in models:
        control.unload(model)
    deadline_s = time.monotonic() + SETTLE_S
    while not all(map(control.is_gone, models)) and time.monotonic() < deadline_s:
        time.sleep(0.1)


def load(server: EmbeddedServer) -> None:
    """Load the models that the server had at its start."""
    control = Control(server.record())
    for model in server.models:
        control.load(model)


def when_full(server: EmbeddedServer) -> Findings:
    """Fill the GPU and send requests, free it and send again; the server is not restarted."""
    photo = photos.jpeg(photos.SIZES_WH["1920x1080"])
    with full_gpu() as taken:
        during = [outcome(server, photo) for _ in range(REQUESTS)]
    after = [outcome(server, COFFEE.read_bytes()) for _ in range(REQUESTS)]
    return {
        "taken_bytes": taken,
        "while_full": during,
        "after_full": after,
        "is_right_after_full": set(after) == CLASSES,
        "server_runs": server.poll() is None,
    }


def outcome(server: EmbeddedServer, photo: bytes) -> str:
    """Return the class of a photo, or the name of the error."""
    with Classifier(f"127.0.0.1:{server.options.ports.http}", "http", timeout_s=5) as classifier:
        try:
            return classifier.classify(photo).labels[0].name
        except Exception as error:  # any error is an outcome
            return f"{type(error).__name__}: {error}"[:200]


def wait_below(limit_mib: int, seconds: float) -> int:
    """Wait until the used memory is below a limit; returns the last value."""
    deadline_s = time.monotonic() + seconds
    while (used := memory_used_mib()) >= limit_mib and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return used


def _after_requests(server: EmbeddedServer) -> int:
    for _ in range(REQUESTS):
        outcome(server, COFFEE.read_bytes())
    return memory_used_mib()
