"""The first run of a network: what kind of scores it returns, whether it has batches, and its top classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nereid.publish.examination.examine import ExaminationRequest, Rejected, Survey
from nereid.publish.examination.file_checks import Progress, check_file, served_config
from nereid.publish.examination.measurements import Network
from nereid.publish.examination.samples import Sample, golden_samples
from nereid.publish.intake.adaptation import Activation
from nereid.repository import onnx_graph

# Rounding of a softmax in half precision over 1,000 classes stays below this.
PROBABILITY_SLACK = 0.01
# Largest difference of a row alone and in a batch, relative to the largest score: kernels may differ.
BATCH_TOLERANCE = 0.02
# Operators that keep the values of an activation in front of them.
KEEPING = frozenset({"Cast", "Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "DequantizeLinear"})
SIGMOIDS = frozenset({"Sigmoid", "HardSigmoid"})
TOP = 3


def survey(request: ExaminationRequest, progress: Progress) -> Survey:
    """Run a network on images.

    Raises:
        Rejected, InvalidOnnx, InvalidConfig: it cannot be opened or run.
    """
    file, _ = check_file(request, progress)
    config = served_config(request, file.signature)
    progress("running it for the first time")
    network = Network("the network", config, request.candidate)
    samples = golden_samples(request, config)
    (output,) = (tensor.name for tensor in config.outputs)
    rows = np.concatenate([network.run(sample)[output] for sample in samples])
    if not np.isfinite(rows).all():
        raise Rejected(f"output '{output}': expected finite numbers, got NaN or infinity")
    activation, is_multi_label = activation_of(rows, last_operator(file.model, output))
    can_batch = _can_batch(network, samples, rows, output)
    top = tuple(tuple(map(int, np.argsort(-row, kind="stable")[:TOP])) for row in rows)
    return Survey(activation, is_multi_label, can_batch, top)


def activation_of(rows: np.ndarray, operator: str) -> tuple[Activation, bool]:
    """Return the activation that turns scores into probabilities, and whether they are multi-label.

    Args:
        rows: the scores of several images, float[N, C].
        operator: computes them, as `last_operator` returns it.
    """
    is_fraction = bool(rows.min() >= -PROBABILITY_SLACK and rows.max() <= 1 + PROBABILITY_SLACK)
    sums_to_1 = bool(np.all(np.abs(rows.sum(1, dtype=np.float64) - 1) <= PROBABILITY_SLACK))
    if rows.shape[1] == 1:  # a softmax of one class is always 1
        return "none" if is_fraction and (operator in SIGMOIDS or not sums_to_1) else "sigmoid", True
    if is_fraction and sums_to_1:
        return "none", False
    if is_fraction and operator in SIGMOIDS:
        return "none", True
    return "softmax", False


def last_operator(model: Any, output: str) -> str:
    """Return the operator that computes an output, without those that only convert or reshape it."""
    producers = {name: node for node in onnx_graph.nodes(model) for name in node.output}
    node = producers.get(output)
    while node is not None and node.op_type in KEEPING:
        node = producers.get(node.input[0])
    return "" if node is None else str(node.op_type)


def _can_batch(network: Network, samples: Sequence[Sample], rows: np.ndarray, output: str) -> bool:
    """Return whether two rows together get the scores that they get alone."""
    pair = [samples[0], samples[-1]]
    (name,) = samples[0].inputs
    together = np.concatenate([each.inputs[name] for each in pair])
    try:
        found = network.run(Sample("a batch of two", {name: together}))[output]
    except Rejected:
        return False
    expected = rows[[0, -1]]
    limit = BATCH_TOLERANCE * (np.abs(expected).max() or 1.0)
    return found.shape == expected.shape and bool(np.abs(found - expected).max() <= limit)
