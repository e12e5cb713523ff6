"""Latency, memory and range of a network, compared with the current version and with this machine."""

import gc
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime

from nereid.base.config.model_config import ModelConfig
from nereid.base.processes import return_memory
from nereid.base.serving_errors import ServingError
from nereid.models.publish.examination.examine import Rejected
from nereid.models.publish.examination.samples import Arrays, Sample

WARM_RUNS, TIMED_RUNS = 3, 15
MIN_DURATION_S, MAX_DURATION_S = 0.1, 5.0
# A smaller difference comes from the timer and other processes, not from the network.
LATENCY_SLACK_MS = 0.2
MEMORY_SLACK_BYTES = 64 * 2**20
HEADROOM = 1.2
# A larger ModelProto can neither be inferred nor opened from memory.
MAX_BYTES = 2**31 - 1
LARGEST = float(np.finfo(np.float16).max)


class Network:
    """The network in a version folder, opened like the backend does, for runs on one thread of the CPU.

    Args:
        label: its name in messages.
        config: the config of its model.
        folder: the version folder, with or without a number as its name.

    Raises:
        InvalidConfig: it cannot be opened, or does not fit its config; with Triton's texts.
    """

    def __init__(self, label: str, config: ModelConfig, folder: Path) -> None:
        from nereid.vision.inference.session import Session

        # Only the folder's name is used, so that it need not be a number.
        self.config = replace(config, folder=folder.parent, version=cast(int, folder.name))
        self.label, self._session = label, Session.from_config(self.config, instances=1)
        self._outputs = [tensor.name for tensor in config.outputs]

    def run(self, sample: Sample) -> Arrays:
        """Return the outputs by name.

        Raises:
            Rejected: ONNX Runtime reports an error.
        """
        outcome = self._session.run_requests([sample.inputs], [self._outputs])[0]
        if isinstance(outcome, ServingError):
            raise Rejected(f"{self.label} failed on {sample.name}: {outcome}")
        return outcome


def measure_memory(label: str, config: ModelConfig, folder: Path, sample: Sample) -> tuple[Network, int]:
    """Open a network and run it once; return it, and the growth of this process in bytes.

    Raises:
        InvalidConfig, Rejected: it cannot be opened or run.
    """
    _settle()
    before = _resident_bytes()
    network = Network(label, config, folder)
    network.run(sample)
    return network, max(0, _resident_bytes() - before)


def _settle() -> None:
    gc.collect()
    # Otherwise the next network uses free heap memory of the last one, which is not counted.
    return_memory()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_latency(
    network: Network, current: Network | None, sample: Sample, max_slowdown: float
) -> tuple[float, float | None]:
    """Compare the latency with the current version; return the median in ms, and the ratio.

    Raises:
        Rejected: it is slower than allowed.
    """
    networks = [network, current] if current else [network]
    after, *rest = _measure_latency(networks, sample)
    if not rest:
        return after, None
    before = rest[0]
    if is_slower(after, before, max_slowdown):  # once more, as other processes may have slowed it
        after, before = _measure_latency(networks, sample)
    if is_slower(after, before, max_slowdown):
        raise Rejected(
            f"the network is too slow: expected at most {max_slowdown:g} times the current version's "
            f"{before:.3g} ms for one row, got {after:.3g} ms ({after / before:.2f} times); "
            "fix: allow it with --max-slowdown"
        )
    return after, after / before


def _measure_latency(networks: Sequence[Network], sample: Sample) -> list[float]:
    """Return each network's median time in ms; runs alternate, so that a busy machine slows all equally."""
    for network in networks:
        for _ in range(WARM_RUNS):
            network.run(sample)
    times: list[list[float]] = [[] for _ in networks]
    start = time.perf_counter()
    while True:
        for network, taken in zip(networks, times, strict=True):
            begin = time.perf_counter()
            network.run(sample)
            taken.append((time.perf_counter() - begin) * 1e3)
        elapsed_s = time.perf_counter() - start
        is_enough = len(times[0]) >= TIMED_RUNS and elapsed_s > MIN_DURATION_S
        if is_enough or elapsed_s > MAX_DURATION_S:
            return [statistics.median(taken) for taken in times]


def is_slower(after_ms: float, before_ms: float, max_slowdown: float) -> bool:
    """Return whether a median exceeds the limit, and by more than the noise of the measurement."""
    return after_ms > before_ms * max_slowdown and after_ms - before_ms > LATENCY_SLACK_MS


def check_memory(after: int, before: int, max_memory_ratio: float) -> float | None:
    """Compare the bytes of two networks; return their ratio, None if the current one uses none.

    Raises:
        Rejected: the network uses more than allowed, and by more than the noise.
    """
    if after > before * max_memory_ratio + MEMORY_SLACK_BYTES:
        raise Rejected(
            f"the network uses too much memory: expected at most {max_memory_ratio:g} times the current "
            f"version's {before / 2**20:,.0f} MB and {MEMORY_SLACK_BYTES / 2**20:.0f} MB more, "
            f"got {after / 2**20:,.0f} MB; fix: allow it with --max-memory"
        )
    return after / before if before else None


def check_headroom(memory_bytes: int, instances: int, available: int) -> None:
    """Check that this machine has free memory for all instances.

    Raises:
        Rejected: it does not.
    """
    needed = HEADROOM * memory_bytes * instances
    if needed > available:
        mb = 2**20
        raise Rejected(
            f"not enough memory: expected {needed / mb:,.0f} MB ({instances} instances of "
            f"{memory_bytes / mb:,.0f} MB, and {HEADROOM - 1:.0%} more), got {available / mb:,.0f} MB; "
            "fix: fewer instances in config.pbtxt, or a larger machine"
        )


def check_half_range(path: Path, samples: Sequence[Sample]) -> None:
    """Reject a network with an FP16 tensor that overflows on a sample; minus infinity may be a mask.

    On a CPU, ONNX Runtime computes an FP16 network in FP32 and removes the conversions between its operators,
    so its outputs do not show that a number in between exceeds FP16. A tensor that is an output is really
    converted.

    Raises:
        Rejected: with the tensor and the sample.
    """
    import onnx

    half, model = onnx.TensorProto.FLOAT16, onnx.load(path)
    if model.ByteSize() > MAX_BYTES:
        return
    for each in (*model.graph.value_info, *model.graph.output):
        if each.type.HasField("tensor_type"):  # a wrong shape ends the inference, and only types are needed
            each.type.tensor_type.ClearField("shape")
    try:
        names = _returned(onnx.shape_inference.infer_shapes(model), half)
    except Exception as error:  # its own class
        raise Rejected(f"ONNX cannot infer its datatypes: {' '.join(str(error).split())}") from None
    if not names:
        return
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, half, None) for name in names)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for sample in samples:
        for name, array in zip(names, session.run(names, dict(sample.inputs)), strict=True):
            if np.isnan(array).any() or np.isposinf(array).any():
                raise Rejected(
                    f"tensor '{name}' exceeds FP16 on {sample.name}: expected numbers up to {LARGEST:,.0f}; "
                    "fix: publish the network in FP32, or allow it with --accept-change"
                )


def _returned(inferred: Any, element: int) -> list[str]:
    """Return the names of the tensors of a datatype that operators of the main graph return."""
    returned = {name for node in inferred.graph.node for name in node.output}
    outputs = {each.name for each in inferred.graph.output}
    found = {each.name for each in inferred.graph.value_info if each.type.tensor_type.elem_type == element}
    return sorted((found & returned) - outputs)
