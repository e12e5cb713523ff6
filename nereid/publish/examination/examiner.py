"""The examiner process: open a network, run it, and report the findings.

One JSON question on stdin; on stdout JSON lines: `{"progress": …}` per step, then one of `report`, `rejected`
and `failed`. Every step is a function here, in the order in which they are made.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from nereid.config.model_config import ModelConfig, TensorSpec
from nereid.errors import OperationFailed
from nereid.inference.signature import DATATYPES, NetworkTensor, Signature, sequence_controls
from nereid.publish.examination.examine import ExaminationRequest, Rejected, Report
from nereid.repository import onnx_file
from nereid.repository.labels import InvalidLabels, check_count
from nereid.repository.onnx_file import InvalidOnnx, OnnxFile, describe
from nereid.serving_errors import InvalidConfig, ServingError

if TYPE_CHECKING:
    from nereid.inference.session import Session

Tell = Callable[[str], None]
Arrays = Mapping[str, Any]

PR_SET_PDEATHSIG = 1
NICENESS = 19
RANDOM_INPUTS, SEED = 4, 20260826
# A dim that may have any size gets this one in random inputs: networks halve images five times.
FREE_DIM = 64
# Rounding of a softmax in half precision over 1,000 classes stays below this.
PROBABILITY_SLACK = 0.01
WARM_RUNS, TIMED_RUNS = 3, 15
ENOUGH_S, TOO_LONG_S = 0.1, 5.0
# Below this the timer and the machine's other work decide, not the network.
LATENCY_SLACK_MS = 0.2
MEMORY_SLACK_BYTES = 64 * 2**20
HEADROOM = 1.2
NAN_CHUNK = 2**22


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a single row, and what it is called in messages."""

    name: str
    inputs: Arrays


class Network:
    """An open network that answers samples, on one thread of the CPU; `who` names it in messages."""

    def __init__(self, who: str, config: ModelConfig, session: "Session") -> None:
        self.who, self.config, self._session = who, config, session
        self._outputs = [tensor.name for tensor in config.outputs]

    def answer(self, sample: Sample) -> Arrays:
        """Return the outputs by name.

        Raises:
            Rejected: ONNX Runtime refused or failed.
        """
        outcome = self._session.run_requests([sample.inputs], [self._outputs])[0]
        if isinstance(outcome, ServingError):
            raise Rejected(f"{self.who} fails on {sample.name}: {outcome}")
        return outcome

    def time_ms(self, sample: Sample) -> float:
        """Return how long one answer takes."""
        start = time.perf_counter()
        self.answer(sample)
        return (time.perf_counter() - start) * 1e3


@dataclass(frozen=True, slots=True)
class Measured:
    """What a network was seen to do."""

    latency_ms: float
    slowdown: float | None
    memory_bytes: int
    memory_ratio: float | None
    difference: float | None


def examine(question: ExaminationRequest, tell: Tell) -> Report:
    """Make every step in turn.

    Raises:
        Rejected, InvalidOnnx, InvalidConfig: the network is not to be served.
    """
    file, external_bytes = check_file(question, tell)
    tell("comparing its inputs and outputs with the current version")
    if question.current:
        path = onnx_file.network_path(question.current, question.document)
        check_signature(onnx_file.read(path).signature, file.signature)
    notes = list(notes_of_config(question, file))
    tell("opening it as its config says")
    config = served_config(question, file.signature)
    identity = (file.sha256, file.size_bytes + external_bytes, file.opset, file.ir_version)
    del file  # its weights are not to be counted as the network's memory
    measured = measure(question, config, tell, notes)
    return Report(*identity, **asdict(measured), notes=tuple(dict.fromkeys(notes)))


def measure(question: ExaminationRequest, config: ModelConfig, tell: Tell, notes: list[str]) -> Measured:
    """Make the steps that run the network.

    Raises:
        Rejected, InvalidConfig: the network is not to be served.
    """
    # A first session and run, thrown away, so that libraries and thread pools are counted for nobody.
    network = open_network("the network", config, question.candidate)
    check_labels(question.labels, config)
    tell("preparing inputs")
    samples = golden_samples(question, config) if question.preprocess else random_samples(config)
    network.answer(samples[0])
    del network
    tell("measuring its memory")
    available = available_bytes()
    current, current_bytes = None, 0
    if question.current:
        current, current_bytes = measure_memory("the current version", config, question.current, samples[0])
    network, memory_bytes = measure_memory("the network", config, question.candidate, samples[0])
    tell(f"comparing answers on {len(samples)} inputs")
    difference = check_answers(question, network, current, samples, notes)
    tell("measuring its latency")
    latency_ms, slowdown = check_latency(question, network, current, samples[0])
    ratio = check_memory(memory_bytes, current_bytes, question.max_memory_ratio) if current else None
    check_headroom(memory_bytes, max(1, config.cpu_instances), available)
    return Measured(latency_ms, slowdown, memory_bytes, ratio, difference)


def check_file(question: ExaminationRequest, tell: Tell) -> tuple[OnnxFile, int]:
    """Read the network and check what can be told without running it; returns its external bytes, too.

    Raises:
        InvalidOnnx, Rejected: it cannot be served.
    """
    tell("reading the file")
    file = onnx_file.read(onnx_file.network_path(question.candidate, question.document))
    external_bytes = onnx_file.check_external_data(file)
    onnx_file.check_runtimes(file, onnx_file.supported_runtimes())
    tell("checking it with ONNX's own checker")
    onnx_file.check_with_onnx(file.path)
    tell("looking for NaN in its weights")
    check_weights(file)
    return file, external_bytes


def check_weights(file: OnnxFile) -> None:
    """Refuse weights that are not numbers; infinities may be meant, such as in a mask.

    Raises:
        Rejected: naming the first such tensor.
    """
    for tensor in onnx_file.tensors(file.model):
        values = _floats(file, tensor)
        parts = (values[start : start + NAN_CHUNK] for start in range(0, len(values), NAN_CHUNK))
        if count := sum(int(np.isnan(part).sum()) for part in parts):
            name = tensor.name or "(a constant)"
            raise Rejected(f"weight '{name}' has NaN in {count:,} of {len(values):,} values")


def _floats(file: OnnxFile, tensor: Any) -> np.ndarray:
    """Return a tensor's values as one row, mapped if they lie in another file; none if they are integers."""
    import onnx
    from onnx import helper, numpy_helper

    if "FLOAT" not in onnx.TensorProto.DataType.Name(tensor.data_type).replace("DOUBLE", "FLOAT"):
        return np.empty(0)
    count = prod(tensor.dims)
    if not count or not onnx_file.is_external(tensor):
        return np.asarray(numpy_helper.to_array(tensor)).ravel()
    entry = onnx_file.external_data(file.path, tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    path = file.path.parent / entry.location
    if entry.offset + count * dtype.itemsize > path.stat().st_size:
        raise Rejected(f"'{entry.location}' is too short for tensor '{tensor.name}' {list(tensor.dims)}")
    return np.memmap(path, dtype, "r", entry.offset, (count,))


def check_signature(expected: Signature, got: Signature) -> None:
    """Refuse inputs and outputs that are not those of the current version.

    Raises:
        Rejected: with every difference.
    """
    problems = list(_differences("input", expected.inputs, got.inputs))
    problems += _differences("output", expected.outputs, got.outputs)
    if problems:
        raise Rejected("; ".join(problems))


def _differences(
    what: str, expected: Mapping[str, NetworkTensor], got: Mapping[str, NetworkTensor]
) -> Iterator[str]:
    for name, tensor in expected.items():
        if got.get(name) != tensor:
            found = describe(got[name]) if name in got else "none"
            yield f"{what} '{name}': expected {describe(tensor)}, got {found}"
    for name in got.keys() - expected.keys():
        yield f"unexpected {what} '{name}' {describe(got[name])}"


def served_config(question: ExaminationRequest, signature: Signature) -> ModelConfig:
    """Return the config that the server would serve it with, on one thread.

    Raises:
        InvalidConfig: it asks for batches, which the network cannot do.
    """
    document = dict(deepcopy(question.document)) | {"backend": "onnxruntime", "name": question.model}
    onnx_file.complete_document(document, lambda: signature)
    config = ModelConfig.from_document(document, question.candidate.parent, 1)
    ours = {"intra_op_thread_count": "1", "inter_op_thread_count": "1"}
    # Shared weights are written beside the network, where nothing may be added yet.
    parameters = {key: text for key, text in config.parameters.items() if key != "nereid.shared_weights"}
    return replace(config, parameters=parameters | ours)


def notes_of_config(question: ExaminationRequest, file: OnnxFile) -> Iterator[str]:
    """Say what the examination cannot tell about the network as it will be served."""
    groups = question.document.get("instance_group", ())
    if any(group.get("kind") == "KIND_GPU" for group in groups):
        yield "its instances run on a GPU; it was examined on the CPU"
    if file.custom_domains:
        yield f"has operators of {', '.join(file.custom_domains)}, which every server must be given"


def open_network(who: str, config: ModelConfig, folder: Path) -> Network:
    """Open the network in a version folder, as the backend does.

    Raises:
        InvalidConfig: it cannot be opened, or does not fit its config; with NVIDIA's texts.
    """
    from nereid.inference.session import Session

    # The folder may have no number yet; of a version, only the folder's name is used.
    version = cast(int, folder.name)
    config = replace(config, folder=folder.parent, version=version)
    return Network(who, config, Session.from_config(config, instances=1))


def check_labels(labels: Path | None, config: ModelConfig) -> None:
    """Count the lines of the label file against the classes of the output that it is for.

    Raises:
        InvalidLabels: they are not as many, or the file cannot be read.
    """
    outputs = [tensor for tensor in config.outputs if -1 not in tensor.dims]
    if labels is None or not outputs:
        return
    labelled = {entry["name"] for entry in config.document.get("output", ()) if entry.get("label_filename")}
    output = next((tensor for tensor in outputs if tensor.name in labelled), outputs[0])
    check_count(labels, output)


def golden_samples(question: ExaminationRequest, config: ModelConfig) -> list[Sample]:
    """Return what the preprocess model makes of the golden images.

    Raises:
        Rejected: its output is not what the network takes, or an image cannot be used.
        InvalidConfig: the preprocess model cannot be used.
    """
    from nereid.imaging.pipeline import Pipeline

    assert question.preprocess is not None
    preprocess = ModelConfig.from_file(question.preprocess, question.preprocess_version)
    preprocess = replace(preprocess, parameters={**preprocess.parameters, "decode_threads": "1"})
    pipeline = Pipeline.from_config(preprocess, max_batch_size=1, instances=1)
    made, wanted = preprocess.outputs[0], config.inputs[0]
    if len(config.inputs) > 1 or (made.datatype, made.dims) != (wanted.datatype, wanted.dims):
        takes = ", ".join(_spec(tensor) for tensor in config.inputs)
        gives = f"{made.datatype.removeprefix('TYPE_')} {list(made.dims)}"
        raise Rejected(f"'{preprocess.name}' gives {gives}, but the network takes {takes}")
    samples = []
    for image in question.images:
        batch = pipeline.run([[image.read_bytes()]])
        if isinstance(batch.outcomes[0], ServingError):
            raise Rejected(f"golden image '{image}': {batch.outcomes[0]}")
        shape = (*([1] if config.max_batch_size else []), *wanted.network_dims)
        samples.append(Sample(image.name, {wanted.name: batch.tensor.copy().reshape(shape)}))
    if not samples:
        raise Rejected("no golden image was given to compare answers on")
    return samples


def _spec(tensor: TensorSpec) -> str:
    return f"'{tensor.name}' {tensor.datatype.removeprefix('TYPE_')} {list(tensor.dims)}"


def random_samples(config: ModelConfig) -> list[Sample]:
    """Return inputs that are the same in every examination; without images they are all there is."""
    rng = np.random.default_rng(SEED)
    tensors = [*(each for each in config.inputs if not each.is_optional), *sequence_controls(config)]
    return [
        Sample(f"random input {number}", {tensor.name: _random(tensor, config, rng) for tensor in tensors})
        for number in range(1, RANDOM_INPUTS + 1)
    ]


def _random(tensor: TensorSpec, config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    shape = [FREE_DIM if dim < 0 else dim for dim in tensor.network_dims]
    shape = [1, *shape] if config.max_batch_size else shape
    element = next(name for name, datatype in DATATYPES.items() if datatype == tensor.datatype)
    if element == "string":
        return np.full(shape, b"0", dtype=object)
    dtype = np.dtype({"float": "float32", "double": "float64"}.get(element, element))
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    # Integers may be indices of a table of any length, but for bytes, which are pixels.
    return rng.integers(0, 256 if element == "uint8" else 2, shape).astype(dtype)


def measure_memory(who: str, config: ModelConfig, folder: Path, sample: Sample) -> tuple[Network, int]:
    """Open a network and run it once; returns how much this process grew, too.

    Raises:
        InvalidConfig, Rejected: it cannot be opened or run.
    """
    _settle()
    before = _resident_bytes()
    network = open_network(who, config, folder)
    network.answer(sample)
    return network, max(0, _resident_bytes() - before)


def _settle() -> None:
    gc.collect()
    # Otherwise what is opened next uses, uncounted, the room that the last one left on the heap.
    ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Return how much memory this machine can still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def check_answers(
    question: ExaminationRequest,
    network: Network,
    current: Network | None,
    samples: Sequence[Sample],
    notes: list[str],
) -> float | None:
    """Compare the answers with those of the current version; returns the greatest difference.

    Raises:
        Rejected: an answer is not finite, or differs by more than the tolerance.
    """
    changes = []
    for sample in samples:
        answers = network.answer(sample)
        check_finite(answers, sample.name)
        notes += notes_of_answers(question, network.config, answers)
        for name, before in current.answer(sample).items() if current else ():
            changes.append((difference(before, answers[name]), sample.name, name, before, answers[name]))
    if not changes:
        return None
    greatest, where, name, before, after = max(changes, key=lambda each: each[0])
    if greatest > question.tolerance:
        text = describe_change(where, name, before, after, question.tolerance)
        if not question.accept_change:
            raise Rejected(f"{text}; --accept-change takes it as it is")
        notes.append(f"accepted: {text}")
    return greatest


def check_finite(answers: Arrays, sample: str) -> None:
    """Refuse NaN and infinities in outputs.

    Raises:
        Rejected: naming the output and how many.
    """
    for name, array in answers.items():
        if array.dtype.kind == "f" and (bad := int((~np.isfinite(array)).sum())):
            raise Rejected(f"output '{name}' is not finite on {sample}: {bad:,} of {array.size:,} values")


def notes_of_answers(question: ExaminationRequest, config: ModelConfig, answers: Arrays) -> Iterator[str]:
    """Say so if the scores, an output of images or one with labels, are no probabilities."""
    for entry in config.document.get("output", ()):
        scores = answers[entry["name"]]
        is_score = question.preprocess or entry.get("label_filename")
        if not is_score or scores.dtype.kind != "f":
            continue
        total = float(scores.sum(dtype=np.float64)) / (len(scores) if config.max_batch_size else 1)
        if abs(total - 1) > PROBABILITY_SLACK or scores.min() < 0:
            yield (
                f"output '{entry['name']}' holds no probabilities (sum {total:.3g}): "
                "--softmax appends a softmax"
            )


def difference(before: Any, after: Any) -> float:
    """Return the greatest |after - before|, relative to the greatest |before|; infinite for another shape."""
    if before.shape != after.shape:
        return inf
    if not before.size:
        return 0.0
    if before.dtype.kind == "O":
        return 0.0 if np.array_equal(before, after) else inf
    old, new = before.astype(np.float64), after.astype(np.float64)
    change, size = np.abs(new - old).max(), np.abs(old).max()
    if not change:
        return 0.0
    return float(change / size) if size else inf


def describe_change(sample: str, name: str, before: Any, after: Any, tolerance: float) -> str:
    """Write how an answer differs from the current version's, with both top classes of a vector."""
    if before.shape != after.shape:
        shapes = f"{list(before.shape)} before, {list(after.shape)} now"
        return f"output '{name}' on {sample} has another shape: {shapes}"
    text = (
        f"output '{name}' on {sample} differs by {difference(before, after):.3g} of the current version's "
        f"largest value, allowed is {tolerance:g}"
    )
    if before.dtype.kind == "O" or before.size < 2:
        return text
    return f"{text}: top class {int(before.argmax())} before, {int(after.argmax())} now"


def check_latency(
    question: ExaminationRequest, network: Network, current: Network | None, sample: Sample
) -> tuple[float, float | None]:
    """Time the network against the current version; returns its median in ms, and the ratio to the other's.

    Raises:
        Rejected: it is slower than allowed.
    """
    networks = [network, current] if current else [network]
    after, *rest = measure_latency(networks, sample)
    if not rest:
        return after, None
    before = rest[0]
    if is_slower(after, before, question.max_slowdown):  # others use this machine, too: once is no proof
        after, before = measure_latency(networks, sample)
    if is_slower(after, before, question.max_slowdown):
        raise Rejected(
            f"the network takes {after:.3g} ms for one row, the current version {before:.3g} ms: "
            f"{after / before:.2f} times as long, allowed is {question.max_slowdown:g}"
        )
    return after, after / before


def measure_latency(networks: Sequence[Network], sample: Sample) -> list[float]:
    """Return each network's median time in ms, from runs in turn, so that a busy machine slows all alike."""
    for network in networks:
        for _ in range(WARM_RUNS):
            network.answer(sample)
    times: list[list[float]] = [[] for _ in networks]
    start = time.perf_counter()
    while True:
        for network, taken in zip(networks, times, strict=True):
            taken.append(network.time_ms(sample))
        elapsed_s = time.perf_counter() - start
        is_enough = len(times[0]) >= TIMED_RUNS and elapsed_s > ENOUGH_S
        if is_enough or elapsed_s > TOO_LONG_S:
            return [statistics.median(taken) for taken in times]


def is_slower(after_ms: float, before_ms: float, max_slowdown: float) -> bool:
    """Tell whether a median is beyond what is allowed, and by more than the machine's noise."""
    return after_ms > before_ms * max_slowdown and after_ms - before_ms > LATENCY_SLACK_MS


def check_memory(after: int, before: int, max_memory_ratio: float) -> float | None:
    """Compare the bytes that two networks take; returns their ratio, None if the current one takes none.

    Raises:
        Rejected: it takes more than allowed, and more than what is noise.
    """
    if after > before * max_memory_ratio + MEMORY_SLACK_BYTES:
        raise Rejected(
            f"the network takes {after / 2**20:,.0f} MB, the current version {before / 2**20:,.0f} MB: "
            f"allowed is {max_memory_ratio:g} times as much and {MEMORY_SLACK_BYTES / 2**20:.0f} MB"
        )
    return after / before if before else None


def check_headroom(memory_bytes: int, instances: int, available: int) -> None:
    """Check that this machine has room for all instances beside what it runs now.

    Raises:
        Rejected: it has not.
    """
    needed = HEADROOM * memory_bytes * instances
    if needed > available:
        mb = 2**20
        raise Rejected(
            f"the network needs {needed / mb:,.0f} MB ({instances} instances of {memory_bytes / mb:,.0f} MB, "
            f"and {HEADROOM - 1:.0%} more), this machine has {available / mb:,.0f} MB available"
        )


def main(parent: int) -> None:
    """Answer the question on stdin.

    Args:
        parent: process id of who asked; this process does not outlive it.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request was made
        return
    os.nice(NICENESS)
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)  # what libraries print is no answer

        def say(kind: str, content: object) -> None:
            with contextlib.suppress(BrokenPipeError):
                out.write(json.dumps({kind: content}) + "\n")

        question = ExaminationRequest.from_json(sys.stdin.read())
        try:
            say("report", asdict(examine(question, lambda line: say("progress", line))))
        except (Rejected, InvalidOnnx, InvalidLabels, InvalidConfig) as error:
            say("rejected", _line(error))
        except (OperationFailed, ImportError) as error:  # a package is missing
            say("failed", str(error))
        except Exception as error:  # only the network is another one each time
            say("rejected", f"the examination broke on it: {type(error).__name__}: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    main(int(sys.argv[1]))
