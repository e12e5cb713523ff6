"""Runs of the network as the backend opens it on a GPU: in halves, as CUDA graphs, with TensorRT."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from loadtest.gpu_check import chain
from loadtest.gpu_check.sections import TENSORRT, Findings
from nereid.config.model_config import ModelConfig
from nereid.inference.session import Session
from nereid.inference.session_events import SessionEvents
from nereid.inference.session_options import CUDA_GRAPHS, BackendSettings
from nereid.inference.tensorrt import TENSORRT as PROVIDER
from nereid.serving_errors import ServingError

ROWS = 64
# The first limit that holds half a batch, but no whole one, is the one to test.
LIMITS_MIB = (160, 224, 320, 448, 640, 896, 1280)
SIZES = (1, 8, 1, 64, 8)
CUDA_NAME, TENSORRT_NAME = "cuda", "tensorrt"


def accelerated(config: ModelConfig, name: str, options: Mapping[str, str]) -> ModelConfig:
    """Return a config with one accelerator, and these options in place of its own."""
    entry = {"name": name, "parameters": dict(options)}
    accelerators = {"gpu_execution_accelerator": [entry]}
    document = {**config.document, "optimization": {"execution_accelerators": accelerators}}
    return replace(config, document=document).replacing({CUDA_GRAPHS: "false"})


def opened(config: ModelConfig, events: SessionEvents | None = None) -> Session:
    """Open a network as the backend does, without runs at load."""
    config = config.replacing({"nereid.warm_batch_sizes": ""})
    return Session.from_config(config, BackendSettings(profile=chain.PROFILE), 1, events)


def scores(session: Session, rows: np.ndarray) -> np.ndarray:
    """Return the scores of rows on the host."""
    (found,) = session.run({chain.INPUT: rows}, [chain.SCORES])
    return np.asarray(found.get() if session.is_on_gpu else found)


def halves(config: ModelConfig, rows: np.ndarray, expected: np.ndarray) -> Findings:
    """Lower the limit of memory until a batch is run in halves; returns the limit and the difference."""
    tried: dict[str, str] = {}
    for limit_mib in LIMITS_MIB:
        name = f"{limit_mib} MiB"
        try:
            found, count = limited(config, rows, limit_mib)
        except ServingError as error:
            tried[name] = f"{error}"[:200]
            continue
        tried[name] = f"{count} batch(es) in halves"
        if count:
            return {"halves": {"limits": tried, **difference(found, expected)}}
    return {"halves": {"limits": tried}}


def limited(config: ModelConfig, rows: np.ndarray, limit_mib: int) -> tuple[np.ndarray, int]:
    """Run a batch with a limit of memory; returns its scores, and how often it was run in halves.

    Raises:
        ServingError: the network cannot be opened, or half of the batch does not fit.
    """
    options = {
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "gpu_mem_limit": str(limit_mib * 2**20),
    }
    count: list[int] = []
    events = SessionEvents(halved=lambda: count.append(1))
    return scores(opened(accelerated(config, CUDA_NAME, options), events), rows), len(count)


def recorded(config: ModelConfig, rows: np.ndarray, expected: np.ndarray) -> Findings:
    """Run CUDA graphs of several sizes in turn; each run gets other rows."""
    options = {"cudnn_conv_algo_search": "HEURISTIC", "enable_cuda_graph": "1"}
    session = opened(accelerated(config, CUDA_NAME, options))
    return {"recorded": alternating(session, rows, expected)}


def alternating(session: Session, rows: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """Return the difference of runs of alternating sizes, whose first row is another one each time."""
    worst = 0.0
    for number, size in enumerate(SIZES):
        order = (np.arange(size) + number) % len(rows)
        worst = max(worst, difference(scores(session, rows[order]), expected[order])["max_difference"])
    return {"max_difference": worst}


def changing(config: ModelConfig, rows: np.ndarray) -> Findings:
    """Time runs of another size than the run before, with and without CUDA graphs: medians in ms."""
    options = {"cudnn_conv_algo_search": "HEURISTIC"}
    forms = {"without_graphs_ms": options, "with_graphs_ms": {**options, "enable_cuda_graph": "1"}}
    return {
        "changing": {
            name: changing_ms(opened(accelerated(config, CUDA_NAME, each)), rows)
            for name, each in forms.items()
        }
    }


def changing_ms(session: Session, rows: np.ndarray) -> float:
    """Return the median of runs of alternating sizes, each of which has run before, in ms."""
    spent: list[float] = []
    for size in (*SIZES, *SIZES):
        begin_s = time.perf_counter()
        scores(session, rows[:size])
        spent.append((time.perf_counter() - begin_s) * 1e3)
    return round(statistics.median(spent[len(SIZES) :]), 3)


def engines(config: ModelConfig, rows: np.ndarray, expected: np.ndarray) -> Findings:
    """Load a network with TensorRT twice; the second load must read the engine, which serves all sizes."""
    import onnxruntime

    if PROVIDER not in onnxruntime.get_available_providers():
        return {"engines": {"missing": f"{PROVIDER} in this onnxruntime"}}
    if not TENSORRT.is_installed:
        return {"engines": {"missing": str(TENSORRT)}}
    with TemporaryDirectory() as folder:
        copied = copy_of(config, Path(folder))
        loads = [timed_load(copied, rows, expected) for _ in range(2)]
        files = [each.pop("files") for each in loads]
    return {"engines": {"loads": loads, "are_reused": bool(files[0]) and files[0] == files[1]}}


def timed_load(config: ModelConfig, rows: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """Open a network with TensorRT; returns the seconds, the engines, and the difference of its scores."""
    begin_s = time.perf_counter()
    session = opened(accelerated(config, TENSORRT_NAME, {}))
    seconds = time.perf_counter() - begin_s
    found = alternating(session, rows, expected)
    place = config.folder.parent.parent
    files = {each.name: each.stat().st_mtime_ns for each in place.rglob("*.engine")}
    return {"seconds": round(seconds, 1), "engines": len(files), **found, "files": files}


def copy_of(config: ModelConfig, folder: Path) -> ModelConfig:
    """Copy the version of a config into a new repository, whose engines nobody has built."""
    target = folder / "repository" / config.name / str(config.version)
    target.mkdir(parents=True)
    source = config.folder / str(config.version)
    for each in source.iterdir():
        (target / each.name).write_bytes(each.read_bytes())
    return replace(config, folder=target.parent)


def difference(found: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Return the largest difference of scores."""
    return {"max_difference": round(float(np.abs(found - expected).max()), 6)}


def many(rows: np.ndarray, count: int = ROWS) -> np.ndarray:
    """Return a batch of different rows, made of a few."""
    shades = np.linspace(0.5, 1, count, dtype=np.float32).reshape(-1, 1, 1, 1)
    return np.asarray(np.resize(rows, (count, *rows.shape[1:])) * shades)


def on_host(rows: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """Return the scores of rows from the CPU path."""
    return scores(opened(cpu_config()), np.asarray(rows))


def cpu_config() -> ModelConfig:
    """Return the network's config in the profile `gpu`, for an instance on the CPU."""
    return replace(chain.gpu_config(chain.NETWORK), kind="CPU")
