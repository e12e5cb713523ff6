"""The embedded server with instances on the GPU."""

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput

from loadtest.gpu_check import chain, gpu_tests, served
from loadtest.gpu_check.sections import TESTS, Context, Findings
from nereid.assets import COFFEE
from nereid.client.classifier import Classifier
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.installation import find_installation
from nereid.triton import stub_processes

TEST_FILES = ("test_onnxruntime.py", "test_server_on_gpu.py", "test_cuda_shared_memory.py")
REQUESTS = 20
RUNS, FROM_HOST = "nereid_onnxruntime_run_seconds_count", "nereid_onnxruntime_host_inputs_total"
# The backend passes its metrics on twice a second.
METRICS_S = 10.0
LOG_LINES = 15
# The profile whose models are those of `gpu_ensemble`, but on the CPU.
REHEARSED = "ensemble"
# A Python backend that can share memory of CUDA between processes contains these names.
CUDA_NAMES = (b"cudaIpcMemHandle", b"FORCE_CPU_ONLY_INPUT_TENSORS", b"libcuda.so")


def measure(context: Context) -> Iterator[Findings]:
    """Yield what the server does with instances on the GPU, and the outcomes of the tests."""
    yield cuda_support(context)
    lines: list[str] = []
    with served.running(context, chain.ENSEMBLE, lines.append) as server:
        yield {"instances": {name: kinds(server, name) for name in (chain.PREPROCESS, chain.NETWORK)}}
        yield {"processes": processes(server)}
        yield {
            "log": [line for line in lines if "GPU" in line.upper() or "CUDA" in line.upper()][-LOG_LINES:]
        }
        yield classify(server)
        yield from_host(server)
    for file in TEST_FILES if TESTS.is_installed else ():
        yield {f"tests of {file}": gpu_tests.run([file], context.left_s())}


def rehearse(context: Context) -> Iterator[Findings]:
    """Yield whether the installed Python backend is built with CUDA, and what a server on the CPU answers."""
    yield cuda_support(context)
    with served.running(context, REHEARSED) as server:
        yield {"instances": {name: kinds(server, name) for name in (chain.PREPROCESS, chain.NETWORK)}}
        yield {"processes": processes(server)}
        yield classify(server)
        yield from_host(server)


def cuda_support(context: Context) -> Findings:
    """Return the Python backend's CUDA support, as its file shows it."""
    backends = find_installation(context.environment).backends
    library = next(Path(backends).rglob("libtriton_python.so"))
    content = library.read_bytes()
    names = {name.decode(): name in content for name in CUDA_NAMES}
    return {"python_backend_has_cuda_code": all(names.values()), "names_in_python_backend": names}


def kinds(server: EmbeddedServer, model: str) -> list[str]:
    """Return the kinds of a model's instance groups, as the server reports them."""
    port = server.options.ports.http
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{model}/config", timeout=5) as answer:
        return [group["kind"] for group in json.load(answer)["instance_group"]]


def processes(server: EmbeddedServer) -> dict[str, int]:
    """Return the number of processes of each step and version."""
    stubs = stub_processes.find(server.pid, server.options.repository)
    return {
        f"{model}:{version}": sum((stub.model, stub.version) == (model, version) for stub in stubs)
        for model, version in sorted({(stub.model, stub.version) for stub in stubs})
        if model in (chain.PREPROCESS, chain.NETWORK)
    }


def classify(server: EmbeddedServer) -> Findings:
    """Classify the coffee photo; returns the classes, and the tensors that came through the host."""
    before = total(server, RUNS)
    with Classifier(f"127.0.0.1:{server.options.ports.http}", "http") as classifier:
        answers = [classifier.classify(COFFEE).labels[0] for _ in range(REQUESTS)]
    runs, through_host = wait_for_runs(server, before + REQUESTS), total(server, FROM_HOST)
    return {
        "classes": sorted({answer.name for answer in answers}),
        "scores": sorted({round(answer.score, 6) for answer in answers}),
        "runs_of_networks": runs - before,
        "inputs_through_host": through_host,
    }


def from_host(server: EmbeddedServer) -> Findings:
    """Send a tensor to the network: on a GPU, it must count as an input through the host."""
    before, row = total(server, FROM_HOST), np.zeros((1, *chain.transform().shape), np.float32)
    with InferenceServerClient(f"127.0.0.1:{server.options.ports.http}") as client:
        tensor = InferInput(chain.INPUT, list(row.shape), "FP32")
        tensor.set_data_from_numpy(row)
        runs = total(server, RUNS)
        client.infer(chain.NETWORK, [tensor], model_version="1")
        wait_for_runs(server, runs + 1)
    return {"counted_of_one_tensor_sent": total(server, FROM_HOST) - before}


def total(server: EmbeddedServer, name: str) -> float:
    """Return the sum of a metric's series; 0 if it has none."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{server.options.ports.metrics}/metrics", timeout=5
    ) as page:
        return sum_of(page.read().decode(), name)


def sum_of(page: str, name: str) -> float:
    """Add the series of a metric on a page of Prometheus."""
    return sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", page, re.MULTILINE)))


def wait_for_runs(server: EmbeddedServer, count: float) -> float:
    """Wait until the page of metrics has this number of runs of networks; returns the last number."""
    deadline_s = time.monotonic() + METRICS_S
    while (found := total(server, RUNS)) < count and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return found
