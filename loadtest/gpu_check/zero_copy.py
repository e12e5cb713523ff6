"""A trace of CUDA: batches from JPEG to scores without copies to the host."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from typing import Any

from loadtest.gpu_check import chain
from loadtest.gpu_check.chain import Job, run_all
from loadtest.gpu_check.processes import Context
from nereid.backends.triton.batch_pipeline import SLOTS, BatchPipeline
from nereid.insight.tune import photos

ROWS, BATCHES = 32, 20
# Bytes of the scores of all batches.
SCORES_BYTES = BATCHES * ROWS * 1000 * 4
# CUpti_ActivityMemcpyKind. Source: the CUPTI manual.
TO_DEVICE, TO_HOST = "host to device", "device to host"
KINDS = {1: TO_DEVICE, 2: TO_HOST, 8: "device to device", 9: "host to host", 10: "peer to peer"}
BUFFER_BYTES = 8 * 2**20
_RECORDS: list[tuple[int, int]] = []

# Number and bytes of the copies by direction.
Copies = dict[str, dict[str, int]]


def measure(context: Context) -> Iterator[dict[str, Any]]:
    """Yield the traced copies of both ways to run the network."""
    images = [photos.jpeg(photos.SIZES_WH["640x427"])] * ROWS
    with closing(BatchPipeline(partial(chain.open_bound, ROWS, SLOTS), lambda reason: None)) as pipeline:
        run_all(pipeline, [Job(images) for _ in range(chain.WARM_UP_CALLS)])
        copies = trace(lambda: run_all(pipeline, [Job(images) for _ in range(BATCHES)]))
        to_host = copies.get(TO_HOST, {"bytes": 0})
        yield {"bound_copies": copies, "bound_bytes_to_host_but_scores": to_host["bytes"] - SCORES_BYTES}
    work = chain.Chain(ROWS)
    for _ in range(chain.WARM_UP_CALLS):
        work.run(images)
    copies = trace(lambda: run(work, images))
    yield {"unbound_copies": copies, "unbound_copies_to_host": copies.get(TO_HOST, {"count": 0})["count"]}


def run(work: chain.Chain, images: Sequence[bytes]) -> None:
    """Run the batches, whose scores stay on the GPU, and wait for it."""
    import cupy

    for _ in range(BATCHES):
        work.run(images)
    cupy.cuda.Device(0).synchronize()


def trace(work: Callable[[], Any]) -> Copies:
    """Trace the copies of `work` with CUPTI, but not memory of the host that a kernel itself writes.

    Raises:
        RuntimeError: the trace is empty.
    """
    cupti = _registered()
    cupti.activity_enable(cupti.ActivityKind.MEMCPY)
    try:
        work()
        cupti.activity_flush_all(1)
    finally:
        cupti.activity_disable(cupti.ActivityKind.MEMCPY)
    copies: Copies = {}
    for kind, size in _RECORDS:
        entry = copies.setdefault(KINDS.get(kind, f"kind {kind}"), {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += size
    _RECORDS.clear()
    if TO_DEVICE not in copies:
        raise RuntimeError(f"the trace lacks even the copies of the images to the device: {copies}")
    return copies


@cache
def _registered() -> Any:
    from cupti import cupti

    memcpy = cupti.ActivityKind.MEMCPY

    def completed(activities: list[Any]) -> None:
        _RECORDS.extend((int(copy.copy_kind), int(copy.bytes)) for copy in activities if copy.kind == memcpy)

    cupti.activity_register_callbacks(lambda: (BUFFER_BYTES, 0), completed)
    return cupti
