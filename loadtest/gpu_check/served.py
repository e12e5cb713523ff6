"""Load on a running server, the same for the profiles `gpu` and `cpu`."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loadtest.gpu_check.sections import Context
from nereid.processes import available_cores
from nereid.server.command_line import ServerOptions
from nereid.server.embedded_server import EmbeddedServer, infer_path
from nereid.server.ports import Ports, free_ports
from nereid.tune import load_generator
from nereid.tune.load_generator import HOST, Load
from nereid.tune.trial import TO_IMAGES

MODEL = "classify_v1"
CONCURRENCIES = (1, 8, 32, 64, 128)
# One client process could limit the rate of a fast GPU.
MAX_CLIENTS = 4
# Time that the end of the server needs.
STOP_S = 8.0


@contextmanager
def running(
    context: Context, profile: str, log: Callable[[str], None] = lambda line: None
) -> Iterator[EmbeddedServer]:
    """Start a server of the default repository in a profile, and wait until it is ready."""
    options = ServerOptions(profile=profile, ports=Ports(*free_ports(3)))
    with (
        TemporaryDirectory() as folder,
        EmbeddedServer(options, Path(folder), context.environment, log) as server,
    ):
        yield server


def loads(
    server: EmbeddedServer, photo: bytes, seconds: float, left_s: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """Return the rows of `loads_of_request` for a server of the default repository."""
    port = server.options.ports.http
    request = load_generator.post_request(HOST, port, infer_path(MODEL), photo, TO_IMAGES)
    return loads_of_request(port, request, seconds, left_s)


def loads_of_request(
    port: int,
    request: bytes,
    seconds: float,
    left_s: Callable[[], float],
    concurrencies: Sequence[int] = CONCURRENCIES,
) -> Iterator[dict[str, Any]]:
    """Yield rate and latencies of each number of requests in flight, as long as time is left."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "request"
        file.write_bytes(request)
        for concurrency in concurrencies:
            if left_s() < seconds + STOP_S:
                return
            clients = max(1, min(MAX_CLIENTS, concurrency // 4, available_cores() // 2))
            load = _load(port, file, concurrency // clients, clients, seconds)
            yield {
                "in_flight": concurrency,
                "client_processes": clients,
                "per_s": round(load.rate, 1),
                "p50_ms": round(load.p50_ms, 3),
                "p99_ms": round(load.p99_ms, 3),
                "failed": load.failed,
            }


def best(rows: Sequence[dict[str, Any]]) -> float:
    """Return the highest rate without failed requests; 0 if there is none."""
    return max((row["per_s"] for row in rows if not row["failed"]), default=0.0)


def _load(port: int, request: Path, concurrency: int, clients: int, seconds: float) -> Load:
    def one(_: int) -> Load:
        return load_generator.run(port, [request], [concurrency], seconds)[concurrency]

    try:
        with ThreadPoolExecutor(clients) as pool:
            return together(list(pool.map(one, range(clients))))
    except subprocess.SubprocessError as error:
        raise RuntimeError(f"{concurrency} requests in flight from {clients} processes: {error}") from None


def together(parts: Sequence[Load]) -> Load:
    """Join the loads of several client processes: rates add up, and the worst percentile counts."""
    return replace(
        parts[0],
        rate=sum(each.rate for each in parts),
        p50_ms=max(each.p50_ms for each in parts),
        p90_ms=max(each.p90_ms for each in parts),
        p99_ms=max(each.p99_ms for each in parts),
        answered=sum(each.answered for each in parts),
        failed=sum(each.failed for each in parts),
    )
