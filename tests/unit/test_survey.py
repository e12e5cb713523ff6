"""What the first run of a network says about its scores."""

import numpy as np
import onnx
from onnx import helper

from nereid.publish.add import AddRequest, add
from nereid.publish.examination.score_outputs import activation_of
from nereid.publish.intake import description
from tests.networks import constant, network, value
from tests.tables import cases
from tests.user_networks import CLASSES, UserNetwork

PROBABILITIES = [[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]
INDEPENDENT = [[0.9, 0.8, 0.1], [0.1, 0.1, 0.2]]
LOGITS = [[7.0, -2.0, 0.1], [1.0, 4.0, 0.3]]


@cases(
    ("rows", "operator", "expected"),
    {
        "softmax": (PROBABILITIES, "Softmax", ("none", False)),
        "softmax of another kind": (PROBABILITIES, "Div", ("none", False)),
        "sigmoid": (INDEPENDENT, "Sigmoid", ("none", True)),
        "logits": (LOGITS, "Gemm", ("softmax", False)),
        "small logits": (INDEPENDENT, "Gemm", ("softmax", False)),
        "log softmax": ([[-0.1, -2.4, -7.0]], "LogSoftmax", ("softmax", False)),
        "one class, logits": ([[3.0], [-2.0]], "Gemm", ("sigmoid", True)),
        "one class, sigmoid": ([[0.9], [0.2]], "Sigmoid", ("none", True)),
    },
)
def test_activation_is_recognised(rows, operator, expected):
    """Rows that sum to 1 are probabilities, a sigmoid makes independent ones, and the rest are logits."""
    assert activation_of(np.array(rows), operator) == expected


def fixed_to_one() -> onnx.ModelProto:
    """Build a network whose inner reshape has a batch of 1 in it, as some exporters write."""
    return network(
        [
            helper.make_node("GlobalAveragePool", ["image"], ["means"]),
            helper.make_node("Reshape", ["means", "shape"], ["flat"]),
            helper.make_node("MatMul", ["flat", "weights"], ["output"]),
        ],
        [value("image", "FP32", [1, 3, 16, 16])],
        [value("output", "FP32", [1, CLASSES])],
        [
            constant("shape", np.array([1, 3])),
            constant("weights", np.random.default_rng(0).standard_normal((3, CLASSES)).astype(np.float32)),
        ],
    )


@cases(
    ("model", "can_batch"), {"inner": (fixed_to_one(), False), "outer": (UserNetwork(batch=1).build(), True)}
)
def test_batches_are_tried(tmp_path, model, can_batch):
    onnx.save(model, tmp_path / "network.onnx")
    seen = []

    def confirm(proposal) -> bool:
        seen.append(proposal)
        return True

    request = AddRequest(tmp_path / "network.onnx", "own", {"scale": "0.1"})
    add(tmp_path / "models", request, None, confirm=confirm)

    assert seen[0].can_batch is can_batch
    config = (tmp_path / "models" / "own" / "config.pbtxt").read_text()
    assert ("max_batch_size: 8" in config) is can_batch
    assert description.read(tmp_path / "models" / "own_network" / "1").source == "network.onnx"
