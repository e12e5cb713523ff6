"""From a JPEG of 1080p to scores, in one process, through the server, and by hand."""

import statistics
from collections.abc import Iterator
from typing import Any

from loadtest.gpu_check import by_hand, chain, served
from loadtest.gpu_check.sections import TORCH, Context, Findings
from nereid.server.ports import free_ports
from nereid.tune import photos

PHOTO_WH = photos.SIZES_WH["1920x1080"]
BATCH_SIZES = (1, 4, 8, 32)
ALONE_S, STEP_S, LOAD_S, BY_HAND_S = 1.0, 0.5, 2.0, 1.5
BY_HAND_CONCURRENCIES = (1, 8, 64)


def measure(context: Context) -> Iterator[Findings]:
    """Yield latencies, rates of the steps, rates of the server, and their ratios."""
    photo = photos.jpeg(PHOTO_WH)
    rows: list[dict[str, Any]] = []
    for batch_size in BATCH_SIZES:
        rows.append(in_process(photo, batch_size))
        yield {"photo": "x".join(map(str, PHOTO_WH)), "photo_bytes": len(photo), "in_process": rows}
    loads: list[dict[str, Any]] = []
    with served.running(context, chain.PROFILE) as server:
        for row in served.loads(server, photo, LOAD_S, context.left_s):
            loads.append(row)
            yield {"served": loads, **ratios(rows, loads)}
    written: dict[str, list[dict[str, Any]]] = {}
    for kind in installed_kinds():
        (port,) = free_ports(1)
        with by_hand.start(kind, port, environment=context.environment):
            written[kind] = []
            for row in by_hand.loads(port, photo, BY_HAND_S, context.left_s, BY_HAND_CONCURRENCIES):
                written[kind].append(row)
                yield {"by_hand": written, **to_by_hand(loads, written)}


def rehearse(context: Context) -> Iterator[Findings]:
    """Yield the photo and the plan of the loads."""
    photo = photos.jpeg(PHOTO_WH)
    yield {"photo_bytes": len(photo), "batch_sizes": BATCH_SIZES, "in_flight": served.CONCURRENCIES}


def installed_kinds() -> list[str]:
    """Return the kinds of the service by hand whose packages are installed."""
    return ["onnxruntime", *["torch"] * TORCH.is_installed]


def to_by_hand(loads: list[dict[str, Any]], written: dict[str, list[dict[str, Any]]]) -> Findings:
    """Compare the best rate of the server with that of the services by hand."""
    best = max(map(served.best, written.values()))
    return {"served_to_by_hand": round(served.best(loads) / best, 2)} if best else {}


def in_process(photo: bytes, batch_size: int) -> dict[str, Any]:
    """Time a batch: its steps apart, and all of it from bytes to scores on the host."""
    work = chain.Chain(batch_size)
    images = [photo] * batch_size
    whole = chain.timed_ms(lambda: work.run(images).get(), ALONE_S if batch_size == 1 else STEP_S)
    steps = chain.steps_ms(work.preprocessor, images, STEP_S)
    network = statistics.median(chain.timed_ms(lambda: work.network(batch_size), STEP_S))
    per_s = {
        "decode_per_s": batch_size / steps["decode_ms"] * 1e3,
        "network_per_s": batch_size / network * 1e3,
        "whole_per_s": batch_size / statistics.median(whole) * 1e3,
    }
    return {
        "batch_size": batch_size,
        **chain.summary(whole),
        **steps,
        "network_ms": round(network, 4),
        **{name: round(value, 1) for name, value in per_s.items()},
        "fallbacks": work.preprocessor.fallbacks,
    }


def ratios(rows: list[dict[str, Any]], loads: list[dict[str, Any]]) -> Findings:
    """Compare the rates of the server and of one process with the slower of decoder and network."""
    limit = min(max(row[f"{step}_per_s"] for row in rows) for step in ("decode", "network"))
    whole = max(row["whole_per_s"] for row in rows)
    return {
        "slower_step_per_s": limit,
        "served_to_slower_step": round(served.best(loads) / limit, 3),
        "in_process_to_slower_step": round(whole / limit, 3),
    }
