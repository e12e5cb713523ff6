"""Memory of the GPU per process, after an unload, and after it was full.

As a program, it fills the memory of the first GPU until its input is closed.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loadtest.gpu_check import chain, served
from loadtest.gpu_check.processes import Context
from nereid.base.assets import COFFEE
from nereid.insight.tune import photos
from nereid.server import nvidia_smi
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.model_control import ModelControl
from nereid.tasks.classify.client import Classifier

Findings = dict[str, Any]

REQUESTS, CLASSES = 8, {"espresso"}
# A CUDA context that ends gives its memory back within this time.
SETTLE_S = 10.0
# Memory that the filled GPU has left, and the sizes of the pieces that fill it.
LEFT_BYTES, PIECE_BYTES, LARGEST_PIECE_BYTES = 16 * 2**20, 4 * 2**20, 2**30


def measure(context: Context) -> Iterator[Findings]:
    """Yield the memory at each stage, and the outcomes of requests while the GPU is full."""
    before = used_mib()
    with served.running(context, chain.PROFILE) as server:
        # Empty in a container that hides processes.
        used = {f"{owner.pid} {owner.name}": owner.memory_mib for owner in nvidia_smi.read_processes()}
        yield {"ready_mib": used_mib() - before, "per_process_mib": used}
        loaded = _after_requests(server) - before
        yield {"after_requests_mib": loaded}
        again = unload_and_load(server, before)
        yield {**again, "grown_mib": again["after_load_mib"] - loaded}
        yield when_full(server)
        yield {"at_the_end_mib": used_mib() - before}
    yield {"after_stop_mib": wait_below(before + 1) - before}


def used_mib() -> int:
    """Return the used memory of the first GPU, of all processes."""
    return int(nvidia_smi.read_gpus()[0].memory_used_mib or 0)


def unload_and_load(server: EmbeddedServer, before: int) -> Findings:
    """Unload all models, the ensembles first, and load them again; returns the memory after each step."""
    model_control = ModelControl(server.info())
    known = (*sorted(server.models), chain.NETWORK, chain.PREPROCESS)
    models = [model for model in known if not model_control.is_gone(model)]
    for model in models:
        model_control.unload(model)
    deadline = time.monotonic() + SETTLE_S
    while not all(map(model_control.is_gone, models)) and time.monotonic() < deadline:
        time.sleep(0.1)
    unloaded = wait_below(before + 1) - before
    for model in server.models:
        model_control.load(model)
    return {"after_unload_mib": unloaded, "after_load_mib": _after_requests(server) - before}


def when_full(server: EmbeddedServer) -> Findings:
    """Fill the GPU and send requests, free it and send again; the server is not restarted."""
    photo = photos.jpeg(photos.SIZES_WH["1920x1080"])
    with full_gpu() as occupied_bytes:
        during = [outcome(server, photo) for _ in range(REQUESTS)]
    after = [outcome(server, COFFEE.read_bytes()) for _ in range(REQUESTS)]
    return {
        "taken_bytes": occupied_bytes,
        "while_full": during,
        "after_full": after,
        "is_right_after_full": set(after) == CLASSES and server.poll() is None,
    }


def outcome(server: EmbeddedServer, photo: bytes) -> str:
    """Return the class of a photo, or the name of the error."""
    with Classifier(f"127.0.0.1:{server.options.ports.http}", "http", timeout_s=5) as classifier:
        try:
            return classifier.classify(photo).labels[0].name
        except Exception as error:  # any error is an outcome
            return f"{type(error).__name__}: {error}"[:200]


def wait_below(limit_mib: int) -> int:
    """Wait until the used memory is below a limit; returns the last value."""
    deadline = time.monotonic() + SETTLE_S
    while (used := used_mib()) >= limit_mib and time.monotonic() < deadline:
        time.sleep(0.5)
    return used


@contextmanager
def full_gpu() -> Iterator[int]:
    """Take the free memory of the first GPU but for `LEFT_BYTES`; gives the number of bytes.

    A process of its own does that, because a CUDA context takes memory, too.

    Raises:
        RuntimeError: the process failed; its output is in the log of the section.
    """
    words = [sys.executable, "-m", "loadtest.gpu_check.memory"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise RuntimeError("the process that fills the GPU failed")
        try:
            yield int(line)
        finally:
            process.stdin.close()
            process.wait()


def _after_requests(server: EmbeddedServer) -> int:
    for _ in range(REQUESTS):
        outcome(server, COFFEE.read_bytes())
    return used_mib()


def main() -> None:
    """Fill the GPU, print the number of bytes, and wait for the end of the input."""
    import cupy

    cupy.cuda.Device(0).synchronize()
    held, size = [], LARGEST_PIECE_BYTES
    while size >= PIECE_BYTES:
        if cupy.cuda.runtime.memGetInfo()[0] - size < LEFT_BYTES:
            size //= 2
            continue
        try:
            held.append(cupy.cuda.Memory(size))
        except (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError):
            size //= 2
    print(sum(piece.size for piece in held), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
