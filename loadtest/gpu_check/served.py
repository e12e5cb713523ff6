"""Load on the server with the profile `gpu`, on a service by hand, and on the profile `cpu`."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loadtest import servers
from loadtest.gpu_check import by_hand
from loadtest.gpu_check.processes import Context
from loadtest.gpu_check.speed import PHOTO_WH
from nereid.base.processes import available_cores
from nereid.insight.tune import load_generator, photos
from nereid.insight.tune.load_generator import HOST, LoadResult
from nereid.insight.tune.trial import TO_IMAGES
from nereid.server.embedded_server import EmbeddedServer, infer_path

MODEL = "classify_v1"
CONCURRENCIES, BY_HAND_CONCURRENCIES = (1, 8, 32, 64, 128), (1, 8, 64)
LOAD_S, BY_HAND_S, CPU_S = 2.0, 1.5, 1.0
# A Python that has PyTorch, torchvision, timm and Starlette.
BY_HAND_PYTHON = "BY_HAND_PYTHON"
# One client process could limit the rate of a fast GPU.
MAX_CLIENTS = 4
# Time that the end of the server needs.
STOP_S = 8.0

Rows = list[dict[str, Any]]


def measure(context: Context) -> Iterator[dict[str, Any]]:
    """Yield rates and latencies of the server, of the service by hand, and of the profile `cpu`."""
    photo = photos.jpeg(PHOTO_WH)
    for rows in served(context, "gpu", photo, LOAD_S):
        yield {"gpu": rows, "alone_p50_ms": rows[0]["p50_ms"], "best_per_s": best(rows)}
    python = context.environment.get(BY_HAND_PYTHON, sys.executable)
    if not subprocess.run([python, "-c", f"import {', '.join(by_hand.PACKAGES)}"], check=False).returncode:
        with servers.by_hand(by_hand.__name__, context.environment, python) as (_, port):
            request = load_generator.post_request(HOST, port, by_hand.PATH, photo, {})
            for rows in loads(port, request, BY_HAND_S, context.remaining_s, BY_HAND_CONCURRENCIES):
                yield {"by_hand": {"torch": rows}, "best_by_hand_per_s": best(rows)}
    for rows in served(context, "cpu", photo, CPU_S):
        yield {"cpu": rows, "best_cpu_per_s": best(rows)}


def served(context: Context, profile: str, photo: bytes, seconds: float) -> Iterator[Rows]:
    """Load a server of the default repository."""
    with running(context, profile) as server:
        port = server.options.ports.http
        request = load_generator.post_request(HOST, port, infer_path(MODEL), photo, TO_IMAGES)
        yield from loads(port, request, seconds, context.remaining_s)


@contextmanager
def running(context: Context, profile: str) -> Iterator[EmbeddedServer]:
    """Start a server of the default repository in a profile, and wait until it is ready."""
    with TemporaryDirectory() as folder, servers.served(Path(folder), context.environment, profile) as server:
        yield server


def loads(
    port: int,
    request: bytes,
    seconds: float,
    remaining_s: Callable[[], float],
    concurrencies: Sequence[int] = CONCURRENCIES,
) -> Iterator[Rows]:
    """Yield the rows so far after each number of requests in flight, as long as time is left."""
    rows: Rows = []
    with TemporaryDirectory() as folder:
        file = Path(folder) / "request"
        file.write_bytes(request)
        for concurrency in concurrencies:
            if remaining_s() < seconds + STOP_S:
                return
            clients = max(1, min(MAX_CLIENTS, concurrency // 4, available_cores() // 2))
            load = _load(port, file, concurrency // clients, clients, seconds)
            rows.append(
                {
                    "in_flight": concurrency,
                    "client_processes": clients,
                    "per_s": round(load.rate, 1),
                    "p50_ms": round(load.p50_ms, 3),
                    "p99_ms": round(load.p99_ms, 3),
                    "failed": load.failed,
                }
            )
            yield rows


def best(rows: Rows) -> float:
    """Return the highest rate without failed requests; 0 if there is none."""
    return max((row["per_s"] for row in rows if not row["failed"]), default=0.0)


def _load(port: int, request: Path, concurrency: int, clients: int, seconds: float) -> LoadResult:
    def one(_: int) -> LoadResult:
        return load_generator.run(port, [request], [concurrency], seconds)[concurrency]

    try:
        with ThreadPoolExecutor(clients) as pool:
            return together(list(pool.map(one, range(clients))))
    except subprocess.SubprocessError as error:
        raise RuntimeError(f"{concurrency} requests in flight from {clients} processes: {error}") from None


def together(parts: Sequence[LoadResult]) -> LoadResult:
    """Join the loads of several client processes: rates add up, and the worst percentile counts."""
    totals = {name: sum(getattr(part, name) for part in parts) for name in ("rate", "answered", "failed")}
    worst = {name: max(getattr(part, name) for part in parts) for name in ("p50_ms", "p90_ms", "p99_ms")}
    return replace(parts[0], **totals, **worst)
