"""The examiner, in a child process: open a network, run it, measure it, and report the findings.

A check that fails raises `Rejected`, `InvalidOnnx` or `InvalidConfig` with the reason.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InvalidConfig, OperationFailed, ServingError
from nereid.base.processes import available_bytes, return_memory
from nereid.base.task_registry import DEFAULT_TASK, TASKS
from nereid.models.publish.examination import (
    Arrays,
    Examination,
    ExaminationLimits,
    ExaminationRequest,
    FirstRun,
    Measurements,
    NetworkInput,
    OutputChange,
    Rejected,
    Samples,
)
from nereid.models.publish.isolated_child import Write
from nereid.repository import onnx_file, onnx_graph
from nereid.repository.onnx_file import InvalidOnnx, OnnxFile, describe
from nereid.repository.repository_index import check_label_count
from nereid.vision.inference.signature import NetworkTensor, Signature

Progress = Callable[[str], None]
NAN_CHUNK = 2**22
# Leaves the cores to the server.
NICENESS = 19
UNEXPECTED = "the examination failed unexpectedly"
WARM_RUNS, TIMED_RUNS = 3, 15
MIN_DURATION_S, MAX_DURATION_S = 0.1, 5.0
# A smaller difference is due to the timer and other processes, not to the network.
LATENCY_SLACK_MS = 0.2
MEMORY_SLACK_BYTES = 64 * 2**20
HEADROOM = 1.2
LARGEST = float(np.finfo(np.float16).max)


def check_file(request: ExaminationRequest, progress: Progress) -> tuple[OnnxFile, int]:
    """Read and check the file without running it; return it, and the bytes of its external data."""
    progress("reading the file")
    file = onnx_file.read(onnx_file.network_path(request.version_folder, request.document))
    external_bytes = onnx_file.check_external_data(file)
    onnx_file.check_runtimes(file, onnx_file.supported_runtimes())
    progress("running the ONNX checker")
    onnx_file.check_with_onnx(file.path)
    progress("searching its weights for NaN")
    _check_weights(file)
    return file, external_bytes


def _check_weights(file: OnnxFile) -> None:
    """Reject weights that are NaN; infinities are allowed, as in a mask."""
    for tensor in onnx_graph.tensors(file.model):
        values = _floats(file, tensor)
        parts = (values[start : start + NAN_CHUNK] for start in range(0, len(values), NAN_CHUNK))
        if count := sum(int(np.isnan(part).sum()) for part in parts):
            name = tensor.name or "(a constant)"
            raise Rejected(
                f"weight '{name}': expected numbers, got NaN in {count:,} of {len(values):,} values"
            )


def _floats(file: OnnxFile, tensor: Any) -> np.ndarray:
    """Return a tensor's values as one row, memory-mapped if they are external; empty for integers."""
    import onnx
    from onnx import helper, numpy_helper

    if "FLOAT" not in onnx.TensorProto.DataType.Name(tensor.data_type).replace("DOUBLE", "FLOAT"):
        return np.empty(0)
    count = prod(tensor.dims)
    if not count or not onnx_graph.is_external(tensor):
        return np.asarray(numpy_helper.to_array(tensor)).ravel()
    entry = onnx_file.external_data(file.path, tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    path = file.path.parent / entry.location
    if entry.offset + count * dtype.itemsize > path.stat().st_size:
        raise Rejected(
            f"'{entry.location}' is too short for tensor '{tensor.name}' of shape {list(tensor.dims)}"
        )
    return np.memmap(path, dtype, "r", entry.offset, (count,))


def check_signature(expected: Signature, actual: Signature) -> None:
    """Reject inputs and outputs that differ from the current version's."""
    problems = list(_differences("input", expected.inputs, actual.inputs))
    problems += _differences("output", expected.outputs, actual.outputs)
    if problems:
        raise Rejected("; ".join(problems))


def _differences(
    kind: str, expected: Mapping[str, NetworkTensor], actual: Mapping[str, NetworkTensor]
) -> Iterator[str]:
    for name, tensor in expected.items():
        if actual.get(name) != tensor:
            actual_text = describe(actual[name]) if name in actual else "none"
            yield f"{kind} '{name}': expected {describe(tensor)}, got {actual_text}"
    for name in actual.keys() - expected.keys():
        yield f"unexpected {kind} '{name}' {describe(actual[name])}"


def served_config(request: ExaminationRequest, signature: Signature) -> ModelConfig:
    """Return the config that the server would use, changed to one thread; InvalidConfig if it cannot."""
    document = dict(deepcopy(request.document)) | {"backend": "onnxruntime", "name": request.model}
    onnx_file.complete_document(document, lambda: signature)
    config = ModelConfig.from_document(document, request.version_folder.parent, 1)
    single_threaded = {"intra_op_thread_count": "1", "inter_op_thread_count": "1"}
    # A single instance does not share its weights.
    parameters = {key: text for key, text in config.parameters.items() if key != "nereid.shared_weights"}
    return replace(config, parameters=parameters | single_threaded)


def notes_of_config(request: ExaminationRequest, file: OnnxFile) -> Iterator[str]:
    """Yield notes about differences between the examination and the server."""
    groups = request.document.get("instance_group", ())
    if any(group.get("kind") == "KIND_GPU" for group in groups):
        yield "its instances run on a GPU, but it was examined on the CPU"
    if file.custom_domains:
        yield f"it has custom operators of {', '.join(file.custom_domains)}; every server needs their library"


def check_labels(labels: Path | None, config: ModelConfig) -> None:
    """Check that a label file has one line per class of its output."""
    outputs = [tensor for tensor in config.outputs if -1 not in tensor.dims]
    if labels is None or not outputs:
        return
    labelled = {entry["name"] for entry in config.document.get("output", ()) if entry.get("label_filename")}
    output = next((tensor for tensor in outputs if tensor.name in labelled), outputs[0])
    check_label_count(labels, output)


class OpenedNetwork:
    """The network in a version folder, opened as the backend opens it, to run on one CPU thread.

    `label` is its name in messages. It must fit the config of its model.
    """

    def __init__(self, label: str, config: ModelConfig, folder: Path) -> None:
        from nereid.vision.inference.session import Session

        # Only the folder's name is used, so that it need not be a number.
        self.config = replace(config, folder=folder.parent, version=cast(int, folder.name))
        self.label, self._session = label, Session.from_config(self.config, instances=1)
        self._outputs = [tensor.name for tensor in config.outputs]

    def run(self, sample: NetworkInput) -> Arrays:
        """Return the outputs by name."""
        outcome = self._session.run_requests([sample.inputs], [self._outputs])[0]
        if isinstance(outcome, ServingError):
            raise Rejected(f"{self.label} failed on {sample.name}: {outcome}")
        return outcome

    def outputs(self, samples: Samples) -> list[Arrays]:
        """Return the outputs for each sample, which must be finite."""
        results = [self.run(sample) for sample in samples]
        for sample, outputs in zip(samples, results, strict=True):
            for name, array in outputs.items():
                if array.dtype.kind == "f" and (bad := int((~np.isfinite(array)).sum())):
                    raise Rejected(
                        f"output '{name}' on {sample.name}: expected finite numbers, got NaN or infinity in "
                        f"{bad:,} of {array.size:,} values"
                    )
        return results


def measure_memory(
    label: str, config: ModelConfig, folder: Path, sample: NetworkInput
) -> tuple[OpenedNetwork, int]:
    """Open a network and run it once; return it, and the growth of this process in bytes."""
    gc.collect()
    # Otherwise the network reuses heap memory freed by the last one, which is not counted.
    return_memory()
    before = _resident_bytes()
    network = OpenedNetwork(label, config, folder)
    network.run(sample)
    return network, max(0, _resident_bytes() - before)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_latency(
    network: OpenedNetwork, current: OpenedNetwork | None, sample: NetworkInput, max_slowdown: float
) -> tuple[float, float | None]:
    """Compare the latency with the current version; return the median in ms, and the ratio."""
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


def _measure_latency(networks: Sequence[OpenedNetwork], sample: NetworkInput) -> list[float]:
    """Return each network's median time in ms; runs alternate, so that a busy machine slows all equally."""
    for network in networks:
        for _ in range(WARM_RUNS):
            network.run(sample)
    times: list[list[float]] = [[] for _ in networks]
    start = time.perf_counter()
    while True:
        for network, durations_ms in zip(networks, times, strict=True):
            begin = time.perf_counter()
            network.run(sample)
            durations_ms.append((time.perf_counter() - begin) * 1e3)
        elapsed_s = time.perf_counter() - start
        is_enough = len(times[0]) >= TIMED_RUNS and elapsed_s > MIN_DURATION_S
        if is_enough or elapsed_s > MAX_DURATION_S:
            return [statistics.median(durations_ms) for durations_ms in times]


def is_slower(after_ms: float, before_ms: float, max_slowdown: float) -> bool:
    """Return whether a median exceeds the limit, and by more than the noise of the measurement."""
    return after_ms > before_ms * max_slowdown and after_ms - before_ms > LATENCY_SLACK_MS


def check_memory(after: int, before: int, max_memory_ratio: float) -> float | None:
    """Compare the bytes of two networks; return their ratio, None if the current one uses none."""
    if after > before * max_memory_ratio + MEMORY_SLACK_BYTES:
        raise Rejected(
            f"the network uses too much memory: expected at most {max_memory_ratio:g} times the current "
            f"version's {before / 2**20:,.0f} MB and {MEMORY_SLACK_BYTES / 2**20:.0f} MB more, "
            f"got {after / 2**20:,.0f} MB; fix: allow it with --max-memory"
        )
    return after / before if before else None


def check_headroom(memory_bytes: int, instances: int, available: int) -> None:
    """Reject a network whose instances do not fit in this machine's memory."""
    needed = HEADROOM * memory_bytes * instances
    if needed > available:
        mb = 2**20
        raise Rejected(
            f"not enough memory: expected {needed / mb:,.0f} MB ({instances} instances of "
            f"{memory_bytes / mb:,.0f} MB, and {HEADROOM - 1:.0%} more), got {available / mb:,.0f} MB; "
            "fix: fewer instances in config.pbtxt, or a larger machine"
        )


def check_half_range(path: Path, samples: Samples) -> None:
    """Reject a network with an FP16 tensor that overflows on a sample; minus infinity may be a mask.

    On a CPU, ONNX Runtime computes an FP16 network in FP32 and removes the conversions between its operators,
    so its outputs do not show that an intermediate number exceeds FP16. Tensors that are outputs really are
    converted.
    """
    import onnx

    half, model = onnx.TensorProto.FLOAT16, onnx.load(path)
    if model.ByteSize() > onnx_file.MAX_BYTES:  # it can neither be inferred nor opened from memory
        return
    for output in (*model.graph.value_info, *model.graph.output):
        if output.type.HasField("tensor_type"):  # a wrong shape ends the inference, and only types are needed
            output.type.tensor_type.ClearField("shape")
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception as error:  # its own class
        raise Rejected(f"ONNX cannot infer its datatypes: {' '.join(str(error).split())}") from None
    returned = {name for node in graph.node for name in node.output}
    inner = {value.name for value in graph.value_info if value.type.tensor_type.elem_type == half}
    names = sorted((inner & returned) - {output.name for output in graph.output})
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


def handle_request(text: str, write: Write) -> None:
    """Examine the network of a request, or run it once, and write the steps and the result by their kinds."""
    os.nice(NICENESS)
    try:
        request = ExaminationRequest.from_json(text)
        run = make_first_run if request.is_first_run else examine_step_by_step
        write("report", asdict(run(request, lambda line: write("progress", line))))
    except (Rejected, InvalidOnnx, InvalidConfig) as error:
        write("rejected", _line(error))
    except (OperationFailed, ImportError) as error:  # for example, a missing package
        write("failed", str(error))
    except Exception as error:  # only the network differs between examinations
        write("rejected", f"{UNEXPECTED}: {type(error).__name__}: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def make_first_run(request: ExaminationRequest, progress: Progress) -> FirstRun:
    """Run a network on images for the first time."""
    file, _ = check_file(request, progress)
    config = served_config(request, file.signature)
    progress("running it for the first time")
    network = OpenedNetwork("the network", config, request.version_folder)
    examination = _examination(request)
    samples = examination.samples(config)
    outputs = network.outputs(samples)
    is_single = any(node.name == onnx_graph.FIRST_IMAGE for node in onnx_graph.nodes(file.model))
    can_batch = not is_single and _can_batch(network, examination, samples)
    result = examination.first_run(file, samples, outputs, can_batch)
    if request.task is not DEFAULT_TASK:
        return result
    several = outputs if len(outputs) > 1 else [network.run(sample) for sample in examination.pair(samples)]
    claiming = (task.name for task in TASKS if (claims := task.entry_point("claims")) and claims(several))
    return replace(result, claimed_by=next(claiming, ""))


def _can_batch(network: OpenedNetwork, examination: Examination, samples: Samples) -> bool:
    """Return whether two rows have the same outputs in one batch as separately."""
    pair = examination.pair(samples)
    (name,) = pair[0].inputs
    batch = {name: np.concatenate([sample.inputs[name] for sample in pair])}
    try:
        outputs = network.run(NetworkInput("a batch of two", batch))
    except Rejected:
        return False
    if any(array.shape[:1] != (len(pair),) for array in outputs.values()):
        return False
    rows = [{key: array[index : index + 1] for key, array in outputs.items()} for index in range(len(pair))]
    return examination.is_same([network.run(sample) for sample in pair], rows)


def examine_step_by_step(request: ExaminationRequest, progress: Progress) -> Measurements:
    """Examine a network step by step."""
    file, external_bytes = check_file(request, progress)
    progress("comparing its inputs and outputs with the current version")
    if request.current:
        path = onnx_file.network_path(request.current, request.document)
        check_signature(onnx_file.read(path).signature, file.signature)
    notes = list(notes_of_config(request, file))
    progress("opening it with its config")
    config = served_config(request, file.signature)
    identity = (file.sha256, file.size_bytes + external_bytes, file.opset, file.ir_version)
    del file  # so that its weights are not counted as the network's memory
    return _measure(request, config, identity, notes, progress)


def _measure(
    request: ExaminationRequest,
    config: ModelConfig,
    identity: tuple[str, int, int, int],
    notes: list[str],
    progress: Progress,
) -> Measurements:
    """Run the network and measure it; the report begins with `identity`."""
    # A first session and run, so that libraries and thread pools do not count as the network's memory.
    network = OpenedNetwork("the network", config, request.version_folder)
    check_labels(request.labels, config)
    progress("preparing inputs")
    examination = _examination(request)
    samples = examination.samples(config)
    network.run(samples[0])
    del network
    progress("measuring its memory")
    available = available_bytes()
    current, current_bytes = None, 0
    if request.current:
        current, current_bytes = measure_memory("the current version", config, request.current, samples[0])
    network, memory_bytes = measure_memory("the network", config, request.version_folder, samples[0])
    progress(f"comparing outputs on {len(samples)} inputs")
    outputs = network.outputs(samples)
    notes += examination.notes(config, samples, outputs)
    difference = None
    if current:
        changes = examination.changes(samples, [current.run(sample) for sample in samples], outputs)
        difference = _greatest(changes, request.limits, notes)
    if not request.limits.is_change_accepted:
        check_half_range(onnx_file.network_path(request.version_folder, request.document), samples)
    progress("measuring its latency")
    latency_ms, slowdown = check_latency(network, current, samples[0], request.limits.max_slowdown)
    max_ratio = request.limits.max_memory_ratio
    ratio = check_memory(memory_bytes, current_bytes, max_ratio) if current else None
    check_headroom(memory_bytes, max(1, config.cpu_instances), available)
    unique_notes = tuple(dict.fromkeys(notes))
    return Measurements(*identity, latency_ms, slowdown, memory_bytes, ratio, difference, unique_notes)


def _examination(request: ExaminationRequest) -> Examination:
    """Return what the outputs mean to the task of the network, or else to the default task."""
    entry_point = request.task.entry_point("examination")
    examination_type = (
        entry_point if entry_point and entry_point.fits(request) else DEFAULT_TASK.entry_point("examination")
    )
    examination: Examination = examination_type(request)
    return examination


def _greatest(changes: Iterable[OutputChange], limits: ExaminationLimits, notes: list[str]) -> float:
    """Return the largest difference; one that exceeds the tolerance but is accepted is noted."""
    greatest, text = max(changes, key=lambda change: change.difference, default=(0.0, ""))
    if greatest > limits.tolerance:
        if not limits.is_change_accepted:
            raise Rejected(f"{text}; fix: publish it with --accept-change if the difference is intended")
        notes.append(f"accepted difference: {text}")
    return greatest
