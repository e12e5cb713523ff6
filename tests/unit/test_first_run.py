"""What the first run of a network says about its scores."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from nereid.models.publish.add import AddRequest
from nereid.models.publish.examination import ExaminationRequest, NetworkInput
from nereid.models.publish.staged_version import read_description
from nereid.tasks.classify import examination
from tests.networks import written
from tests.publishing import propose
from tests.tables import cases
from tests.user_networks import CLASSES, UserNetwork

pytestmark = pytest.mark.process

SHARES = [[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]
LABELS = [[0.9, 0.8, 0.1], [0.1, 0.1, 0.2]]
LOGITS = [[7.0, -2.0, 0.1], [1.0, 4.0, 0.3]]


@cases(
    softmax=(SHARES, "Softmax", ("none", examination.PROBABILITIES)),
    softmax_of_another_kind=(SHARES, "Div", ("none", examination.PROBABILITIES)),
    sigmoid=(LABELS, "Sigmoid", ("none", examination.INDEPENDENT)),
    logits=(LOGITS, "Gemm", ("softmax", examination.PROBABILITIES)),
    small_logits=(LABELS, "Gemm", ("softmax", examination.PROBABILITIES)),
    log_softmax=([[-0.1, -2.4, -7.0]], "LogSoftmax", ("softmax", examination.PROBABILITIES)),
    embedding=([[0.6, -0.8], [-1.0, 0.0]], "Div", ("none", examination.VECTOR)),
    no_embedding=([[0.6, -0.8], [-1.0, 0.1]], "Gemm", ("softmax", examination.PROBABILITIES)),
    one_class_logits=([[3.0], [-2.0]], "Gemm", ("sigmoid", examination.NUMBER)),
    one_class_sigmoid=([[0.9], [0.2]], "Sigmoid", ("none", examination.INDEPENDENT)),
)
def test_meaning_is_recognised(rows, operator, expected):
    """Rows that sum to 1 are probabilities, a sigmoid makes independent ones, and the rest are logits."""
    assert examination.meaning_of(np.array(rows), operator) == expected


def test_one_photo_is_paired_with_its_mirror_image():
    """Twice the same photo would hide a network that computes only the first one."""
    meaning = examination.ScoreExamination(ExaminationRequest("net", Path("1"), {}))

    _, second = meaning.pair([NetworkInput("photo", {"image": np.arange(6).reshape(1, 2, 3)})])

    assert second.inputs["image"].tolist() == [[[2, 1, 0], [5, 4, 3]]]


def mixed() -> onnx.ModelProto:
    nodes = "means = ReduceMean<axes = [0, 2, 3]>(image) flat = Reshape(means, shape)"
    io = f"(float[1,3,16,16] image) => (float[1,{CLASSES}] output) <int64[2] shape = {{1, 3}}>"
    weights = np.random.default_rng(0).standard_normal((3, CLASSES)).astype(np.float32)
    return written(f"{io} {{ {nodes} output = MatMul(flat, weights) }}", weights=weights)


@cases(("model", "can_batch"), mixed=(mixed(), False), outer=(UserNetwork(batch=1).build(), True))
def test_batches_are_tried(tmp_path, model, can_batch):
    onnx.save(model, tmp_path / "network.onnx")

    proposal = propose(tmp_path / "models", AddRequest(tmp_path / "network.onnx", "own", {"scale": "0.1"}))

    assert proposal.settings.can_batch is can_batch
    config = (tmp_path / "models" / "own" / "config.pbtxt").read_text()
    assert ("max_batch_size: 8" in config) is can_batch
    assert read_description(tmp_path / "models" / "own_network" / "1").source == "network.onnx"
