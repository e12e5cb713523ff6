"""The cost of the classifiers: images per second of each transport, compared with plain tritonclient.

Every round measures a classifier and tritonclient in turn on the same transport, with the same number of
requests in flight and the same outputs. Server and client share the cores.

    python -m loadtest.clients [--rounds 5] [--seconds 3] [--record clients]
"""

import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import serialize_byte_tensor, shared_memory

from loadtest import record
from nereid.client.async_classifier import AsyncClassifier
from nereid.client.classifier import Classifier
from nereid.client.request import CHANNEL, ProtocolName
from nereid.client.shared_regions import Kind
from nereid.contract import REASON, SCORES, VARIANT, VERSION
from nereid.server.command_line import DEFAULT_PROFILE, ServerOptions
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.ports import Ports, free_ports
from nereid.tune import photos
from nereid.tune.load_generator import Send, send_repeatedly

MODEL = "classify"
CONCURRENCY = 8
TOP_K = 5
OUTPUTS = (SCORES, VARIANT, VERSION, REASON)
TARGET = 0.97
LIBRARIES: dict[ProtocolName, Any] = {"http": tritonclient.http, "grpc": tritonclient.grpc}
# Rates are images per second; CPU is the time of the calling process, in ms per image.
HEADINGS = ("photo", "transport", "classifier", "CPU", "tritonclient", "CPU", "ratio")
COLUMNS = (
    *("photo", "transport", "classifier", "classifier_cpu_ms"),
    *("tritonclient", "tritonclient_cpu_ms", "ratio"),
)

Opened = contextlib.AbstractContextManager[Callable[[], object]]
OpenedAsync = contextlib.AbstractAsyncContextManager[Callable[[], Awaitable[object]]]


@dataclass(frozen=True, slots=True)
class Transport:
    """A transport to the server, used from asyncio or from threads."""

    name: str
    protocol: ProtocolName
    is_async: bool = False
    memory: Kind | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests per second, and milliseconds of CPU of this process per request."""

    rate: float
    cpu_ms: float


TRANSPORTS = (
    Transport("HTTP", "http"),
    Transport("gRPC", "grpc"),
    Transport("gRPC, shared memory", "grpc", memory="system"),
    Transport("HTTP, asyncio", "http", is_async=True),
    Transport("gRPC, asyncio", "grpc", is_async=True),
    Transport("gRPC, shared memory, asyncio", "grpc", is_async=True, memory="system"),
)


@contextlib.contextmanager
def _classifier(url: str, way: Transport, photo: bytes) -> Iterator[Callable[[], object]]:
    with Classifier(url, way.protocol, MODEL, shared_memory=way.memory) as classifier:
        yield lambda: classifier.classify(photo, top_k=TOP_K)
        _check_memory(classifier.shared_memory_refusal)


@contextlib.asynccontextmanager
async def _async_classifier(
    url: str, way: Transport, photo: bytes
) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    async with AsyncClassifier(url, way.protocol, MODEL, shared_memory=way.memory) as classifier:
        yield lambda: classifier.classify(photo, top_k=TOP_K)
        _check_memory(classifier.shared_memory_refusal)


def _check_memory(refusal: str) -> None:
    """Fail instead of a measurement of bytes under the name of shared memory."""
    if refusal:
        raise RuntimeError(refusal)


@contextlib.contextmanager
def _plain(url: str, way: Transport, photo: bytes) -> Iterator[Callable[[], object]]:
    """Give each thread its own tensor, and over HTTP its own client, as tritonclient requires."""
    own, library = threading.local(), LIBRARIES[way.protocol]
    options = {"channel_args": CHANNEL} if way.protocol == "grpc" else {}
    with contextlib.ExitStack() as held:
        shared = library.InferenceServerClient(url, **options)
        regions = held.enter_context(_regions(url, way, photo))

        def infer() -> object:
            if not hasattr(own, "client"):
                own.client = shared if way.protocol == "grpc" else library.InferenceServerClient(url)
                own.region = next(regions)
            result = own.client.infer(MODEL, [_tensor(way, photo, own.region)], outputs=_outputs(way))
            return [result.as_numpy(name) for name in OUTPUTS]

        yield infer
        shared.close()


@contextlib.asynccontextmanager
async def _async_plain(
    url: str, way: Transport, photo: bytes
) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    if way.protocol == "grpc":
        client = tritonclient.grpc.aio.InferenceServerClient(url, channel_args=CHANNEL)
    else:
        client = tritonclient.http.aio.InferenceServerClient(url)
    with _regions(url, way, photo) as regions:
        idle = [next(regions) for _ in range(CONCURRENCY)]

        async def infer() -> object:
            region = idle.pop()
            result = await client.infer(MODEL, [_tensor(way, photo, region)], outputs=_outputs(way))
            idle.append(region)
            return [result.as_numpy(name) for name in OUTPUTS]

        yield infer
        await client.close()


@contextlib.contextmanager
def _regions(url: str, way: Transport, photo: bytes) -> Iterator[Iterator[Any]]:
    """Give a registered region for each request in flight; None if photos are sent."""
    if way.memory is None:
        yield itertools.repeat(None)
        return
    names = [f"loadtest-{os.getpid()}-{number}" for number in range(CONCURRENCY)]
    size = len(photo) + 4
    with contextlib.ExitStack() as held:
        client = held.enter_context(tritonclient.grpc.InferenceServerClient(url))
        regions = []
        for name in names:
            regions.append(shared_memory.create_shared_memory_region(name, name, size))
            held.callback(shared_memory.destroy_shared_memory_region, regions[-1])
            client.register_system_shared_memory(name, name, size)
            held.callback(client.unregister_system_shared_memory, name)
        yield itertools.cycle(zip(names, regions, strict=True))


def _tensor(way: Transport, photo: bytes, region: Any) -> Any:
    tensor = LIBRARIES[way.protocol].InferInput("image", [1, 1], "BYTES")
    array = np.array([[photo]], dtype=object)
    if region is None:
        tensor.set_data_from_numpy(array)
    else:
        shared_memory.set_shared_memory_region(region[1], [serialize_byte_tensor(array)])
        tensor.set_shared_memory(region[0], len(photo) + 4)
    return tensor


def _outputs(way: Transport) -> list[Any]:
    requested = LIBRARIES[way.protocol].InferRequestedOutput
    return [requested(name, class_count=TOP_K if name == SCORES else 0) for name in OUTPUTS]


def sample(opened: Opened, seconds: float) -> Sample:
    """Send requests from CONCURRENCY threads."""
    counts = [0] * CONCURRENCY
    with opened as infer:
        start = threading.Barrier(CONCURRENCY + 1)

        def loop(number: int) -> None:
            infer()
            start.wait()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                infer()
                counts[number] += 1

        threads = [threading.Thread(target=loop, args=[number]) for number in range(CONCURRENCY)]
        for thread in threads:
            thread.start()
        start.wait()
        begin, cpu = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.join()
        return _sample(sum(counts), begin, cpu)


async def async_sample(opened: OpenedAsync, seconds: float) -> Sample:
    """Send requests from CONCURRENCY tasks."""
    done: list[None] = []
    async with opened as infer:

        @contextlib.asynccontextmanager
        async def shared() -> AsyncIterator[Send[None]]:
            async def send() -> tuple[None, bool]:
                await infer()
                return None, True

            yield send

        await asyncio.gather(*(infer() for _ in range(CONCURRENCY)))
        begin, cpu = time.perf_counter(), time.process_time()
        loops = (
            send_repeatedly(
                shared, lambda: time.perf_counter() >= begin + seconds, lambda *response: done.append(None)
            )
            for _ in range(CONCURRENCY)
        )
        await asyncio.gather(*loops)
        return _sample(len(done), begin, cpu)


def _sample(count: int, begin: float, cpu: float) -> Sample:
    return Sample(count / (time.perf_counter() - begin), (time.process_time() - cpu) * 1e3 / count)


def measure(ports: Ports, way: Transport, photo: bytes, seconds: float, number: int) -> list[Sample]:
    """Return the samples of the classifier and of tritonclient; odd rounds begin with the second."""
    url = f"127.0.0.1:{getattr(ports, way.protocol)}"
    order = record.turns((0, 1), number)
    if way.is_async:
        ways = (_async_classifier, _async_plain)
        done = {i: asyncio.run(async_sample(ways[i](url, way, photo), seconds)) for i in order}
    else:
        blocking = (_classifier, _plain)
        done = {i: sample(blocking[i](url, way, photo), seconds) for i in order}
    return [done[0], done[1]]


def summarise(found: dict[tuple[str, str], list[list[Sample]]]) -> list[record.Row]:
    """Return medians, and the median and range of the rounds' ratios, per photo and transport."""
    rows = []
    for (photo, name), pairs in found.items():
        row: record.Row = {"photo": photo, "transport": name}
        for library, samples in zip(("classifier", "tritonclient"), zip(*pairs, strict=True), strict=True):
            row[library] = round(statistics.median(each.rate for each in samples), 1)
            row[f"{library}_cpu_ms"] = round(statistics.median(each.cpu_ms for each in samples), 2)
        ratios = record.spread(ours.rate / plain.rate for ours, plain in pairs)
        rows.append(row | {"ratio": ratios["median"], "min": ratios["min"], "max": ratios["max"]})
    return rows


def markdown(rows: list[record.Row]) -> str:
    """Render a record's rows as the table of docs/clients.md."""
    return record.markdown(HEADINGS, ([row[name] for name in COLUMNS] for row in rows))


def main() -> int:
    """Measure, print and record; exit status 1 if a target is missed."""
    args = record.parsed(record.parser(__doc__, rounds=5, seconds=3.0))
    found: dict[tuple[str, str], list[list[Sample]]] = defaultdict(list)
    options = ServerOptions(profile=DEFAULT_PROFILE, ports=Ports(*free_ports(3)), allow_shm=True)
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(options, Path(folder), os.environ):
        for number in range(args.rounds):
            for name, size_wh in photos.SIZES_WH.items():
                photo = photos.jpeg(size_wh)
                for way in TRANSPORTS:
                    samples = measure(options.ports, way, photo, args.seconds, number)
                    found[name, way.name].append(samples)
    rows = summarise(found)
    print(markdown(rows))
    result = {"concurrency": CONCURRENCY, "rounds": args.rounds, "rows": rows}
    missed = [f"{row['photo']}, {row['transport']}: {row['ratio']}" for row in rows if row["ratio"] < TARGET]
    return record.finish(args.record, result, missed)


if __name__ == "__main__":
    record.end(main)
