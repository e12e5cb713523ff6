"""The examiner, in a child process: open a network, run it, and report the findings."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from nereid.base.config.model_config import ModelConfig, read_pbtxt
from nereid.base.errors import OperationFailed
from nereid.base.processes import available_bytes
from nereid.base.serving_errors import InvalidConfig
from nereid.models.publish.child import Write
from nereid.models.publish.examination.examine import ExaminationRequest, Gates, Rejected, Report, Survey
from nereid.models.publish.examination.file_checks import (
    Progress,
    check_file,
    check_labels,
    check_signature,
    notes_of_config,
    served_config,
)
from nereid.models.publish.examination.measurements import (
    Network,
    check_half_range,
    check_headroom,
    check_latency,
    check_memory,
    measure_memory,
)
from nereid.models.publish.examination.samples import Arrays, Sample
from nereid.models.publish.examination.score_outputs import Scores
from nereid.repository import onnx_file, onnx_graph
from nereid.repository.labels import InvalidLabels
from nereid.repository.onnx_file import InvalidOnnx
from nereid.tasks.detect.examination import FoundObjects
from nereid.tasks.read.examination import ReadLines
from nereid.tasks.read.reading_settings import BACKEND as READER

# The server keeps the cores.
NICENESS = 19
UNEXPECTED = "the examination failed unexpectedly"
# What the outputs of a network mean: it makes inputs, reads a first run, and compares two versions.
Answers = Scores | FoundObjects | ReadLines
# By the backend of the model after the network, or of the reader.
MEANINGS: Mapping[str, Callable[[ExaminationRequest], Answers]] = {
    "boxes": FoundObjects,
    READER: ReadLines,
}


def answer(text: str, write: Write) -> None:
    """Examine or survey the network of a request, and write the steps and the result by their kinds."""
    os.nice(NICENESS)
    try:
        request = ExaminationRequest.from_json(text)
        run = survey if request.is_survey else examine
        write("report", asdict(run(request, lambda line: write("progress", line))))
    except (Rejected, InvalidOnnx, InvalidLabels, InvalidConfig) as error:
        write("rejected", _line(error))
    except (OperationFailed, ImportError) as error:  # such as a missing package
        write("failed", str(error))
    except Exception as error:  # only the network differs between examinations
        write("rejected", f"{UNEXPECTED}: {type(error).__name__}: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def survey(request: ExaminationRequest, progress: Progress) -> Survey:
    """Run a network on images for the first time.

    Raises:
        Rejected, InvalidOnnx, InvalidConfig: it cannot be opened or run.
    """
    file, _ = check_file(request, progress)
    config = served_config(request, file.signature)
    progress("running it for the first time")
    network = Network("the network", config, request.candidate)
    answers = _answers(request)
    samples = answers.samples(config)
    outputs = _outputs(network, samples)
    is_single = any(node.name == onnx_graph.FIRST_IMAGE for node in onnx_graph.nodes(file.model))
    can_batch = not is_single and _can_batch(network, answers, samples)
    return answers.first_run(file, samples, outputs, can_batch)


def _can_batch(network: Network, answers: Answers, samples: Sequence[Sample]) -> bool:
    """Return whether two rows together get the outputs that they get alone."""
    pair = answers.pair(samples)
    (name,) = pair[0].inputs
    batch = {name: np.concatenate([each.inputs[name] for each in pair])}
    try:
        found = network.run(Sample("a batch of two", batch))
    except Rejected:
        return False
    if any(array.shape[:1] != (len(pair),) for array in found.values()):
        return False
    rows = [{key: array[place : place + 1] for key, array in found.items()} for place in range(len(pair))]
    return answers.is_same([network.run(each) for each in pair], rows)


def examine(request: ExaminationRequest, progress: Progress) -> Report:
    """Examine a network step by step.

    Raises:
        Rejected, InvalidOnnx, InvalidConfig: the network must not be served.
    """
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
) -> Report:
    """Run the network and measure it; the report begins with `identity`."""
    # A first session and run, so that libraries and thread pools do not count as the network's memory.
    network = Network("the network", config, request.candidate)
    check_labels(request.labels, config)
    progress("preparing inputs")
    answers = _answers(request)
    samples = answers.samples(config)
    network.run(samples[0])
    del network
    progress("measuring its memory")
    available = available_bytes()
    current, current_bytes = None, 0
    if request.current:
        current, current_bytes = measure_memory("the current version", config, request.current, samples[0])
    network, memory_bytes = measure_memory("the network", config, request.candidate, samples[0])
    progress(f"comparing outputs on {len(samples)} inputs")
    difference = _compare(request.gates, answers, network, current, samples, notes)
    if not request.gates.is_change_accepted:
        check_half_range(onnx_file.network_path(request.candidate, request.document), samples)
    progress("measuring its latency")
    latency_ms, slowdown = check_latency(network, current, samples[0], request.gates.max_slowdown)
    max_ratio = request.gates.max_memory_ratio
    ratio = check_memory(memory_bytes, current_bytes, max_ratio) if current else None
    check_headroom(memory_bytes, max(1, config.cpu_instances), available)
    unique_notes = tuple(dict.fromkeys(notes))
    return Report(*identity, latency_ms, slowdown, memory_bytes, ratio, difference, unique_notes)


def _answers(request: ExaminationRequest) -> Answers:
    """Return what the outputs of a network mean.

    Raises:
        InvalidConfig: the model after the network, or the reader, cannot be read.
    """
    model = request.after or request.reader
    if not model:
        return Scores(request)
    return MEANINGS[read_pbtxt(model / "config.pbtxt").get("backend", "")](request)


def _compare(
    gates: Gates,
    answers: Answers,
    network: Network,
    current: Network | None,
    samples: Sequence[Sample],
    notes: list[str],
) -> float | None:
    """Compare the outputs with those of the current version; return the largest difference.

    Raises:
        Rejected: an output is not finite, or differs by more than the tolerance.
    """
    outputs = _outputs(network, samples)
    notes += answers.notes(network.config, samples, outputs)
    if not current:
        return None
    changes = answers.changes(samples, [current.run(sample) for sample in samples], outputs)
    greatest, text = max(changes, key=lambda each: each.difference, default=(0.0, ""))
    if greatest > gates.tolerance:
        if not gates.is_change_accepted:
            raise Rejected(f"{text}; fix: publish it with --accept-change if the difference is intended")
        notes.append(f"accepted difference: {text}")
    return greatest


def _outputs(network: Network, samples: Sequence[Sample]) -> list[Arrays]:
    """Return the outputs for each sample.

    Raises:
        Rejected: an output has NaN or infinity.
    """
    found = [network.run(sample) for sample in samples]
    for sample, outputs in zip(samples, found, strict=True):
        for name, array in outputs.items():
            if array.dtype.kind == "f" and (bad := int((~np.isfinite(array)).sum())):
                raise Rejected(
                    f"output '{name}' on {sample.name}: expected finite numbers, got NaN or infinity in "
                    f"{bad:,} of {array.size:,} values"
                )
    return found
