"""Section 6: from a JPEG of 1080p to scores, in one process and through the server."""

import statistics
from collections.abc import Iterator
from typing import Any

from loadtest.gpu_check import chain, served
from loadtest.gpu_check.sections import Context, Findings
from nereid.tune import photos

PHOTO_WH = photos.SIZES_WH["1920x1080"]
BATCH_SIZES = (1, 4, 8, 32)
ALONE_S, STEP_S, LOAD_S, ENSEMBLE_LOAD_S = 3.0, 0.5, 3.0, 1.5


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
    in_steps: list[dict[str, Any]] = []
    with served.running(context, chain.ENSEMBLE) as server:
        for row in served.loads(server, photo, ENSEMBLE_LOAD_S, context.left_s):
            in_steps.append(row)
            yield {"served_as_ensemble": in_steps, "best_as_ensemble_per_s": served.best(in_steps)}


def rehearse(context: Context) -> Iterator[Findings]:
    """Yield the photo and the plan of the loads."""
    photo = photos.jpeg(PHOTO_WH)
    yield {"photo_bytes": len(photo), "batch_sizes": BATCH_SIZES, "in_flight": served.CONCURRENCIES}


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
