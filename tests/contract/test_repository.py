"""The model repository: valid configs with the tensors that clients and other models need."""

import hashlib

import onnx
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from nereid.repository.check import check
from tests.conftest import ROOT

REPOSITORY = ROOT / "model_repository"
MODELS = sorted(path.parent.name for path in REPOSITORY.glob("*/config.pbtxt"))
CONFIGS = sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("*.pbtxt"))
IMAGE, SCORES = ("image", "BYTES", (1,)), ("scores", "FP32", (1000,))
TOLD = [("variant", "BYTES", (1,)), ("version", "BYTES", (1,)), ("route_reason", "BYTES", (1,))]
INPUT = ("input", "FP32", (3, 224, 224))
TENSORS = {
    "classify": ([IMAGE], [SCORES, *TOLD]),
    "classify_v1": ([IMAGE], [SCORES]),
    "classify_v2": ([IMAGE], [SCORES]),
    "imagenet_preprocess": ([IMAGE], [INPUT]),
    "efficientnet_lite0": ([INPUT], [SCORES]),
}


def tensors(entries) -> list[tuple[str, str, tuple[int, ...]]]:
    """Write a config's tensors as the contract's table does: BYTES is protobuf's STRING."""
    names = {number: name.partition("_")[2].replace("STRING", "BYTES") for name, number in DataType.items()}
    return [(entry.name, names[entry.data_type], tuple(entry.dims)) for entry in entries]


@pytest.mark.parametrize("relative", CONFIGS)
def test_tensors_are_those_of_the_contract(relative):
    config = text_format.Parse((REPOSITORY / relative).read_text(), ModelConfig())

    assert (tensors(config.input), tensors(config.output)) == TENSORS[config.name]
    assert config.name == relative.split("/")[0]
    assert config.max_batch_size >= 8


@pytest.mark.parametrize("model", [model for model in MODELS if SCORES in TENSORS[model][1]])
def test_labels_are_the_same_real_file_everywhere(model):
    path = REPOSITORY / model / "labels.txt"
    labels = path.read_text().splitlines()

    assert not path.is_symlink()
    assert (len(labels), len(set(labels)), labels[967]) == (1000, 1000, "espresso")
    assert path.read_bytes() == (REPOSITORY / "efficientnet_lite0" / "labels.txt").read_bytes()


@pytest.mark.parametrize("version", ["1", "2"])
def test_network_is_what_its_card_and_config_say(version):
    path = REPOSITORY / "efficientnet_lite0" / version / "model.onnx"
    model = onnx.load(path)

    onnx.checker.check_model(model)
    assert (model.opset_import[0].version, model.ir_version <= 10) == (17, True)
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in [*model.graph.input, *model.graph.output]
    }
    assert shapes == {"input": ["N", 3, 224, 224], "scores": ["N", 1000]}
    card = (REPOSITORY / "efficientnet_lite0" / "README.md").read_text()
    assert hashlib.sha256(path.read_bytes()).hexdigest() in card


def test_check_finds_no_fault():
    assert [(finding.model, finding.found) for finding in check(REPOSITORY) if finding.verdict != "ok"] == []


def test_every_model_has_a_row_in_the_contract():
    assert sorted(TENSORS) == MODELS
    page = (ROOT / "docs" / "contract.md").read_text()
    assert [model for model in MODELS if f"`{model}`" not in page] == []


@pytest.mark.parametrize("relative", CONFIGS)
def test_queue_has_no_policy(relative):
    """One keeps instances waiting, and hangs the ensemble whose step it is; deadlines go in a parameter."""
    config = text_format.Parse((REPOSITORY / relative).read_text(), ModelConfig())

    assert not config.dynamic_batching.HasField("default_queue_policy")
