"""FP16 as a version of its own: the conversion of a file, and its publication next to the FP32 version."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from nereid.base.assets import REPOSITORY, TEXT_REPOSITORY
from nereid.base.errors import OperationFailed
from nereid.models.publish.examination import ExaminationLimits, Rejected
from nereid.models.publish.importing.adaptation import convert_to_fp16
from nereid.models.publish.publisher import publish
from tests.networks import constant, identity, store, written
from tests.publishing import unchanged
from tests.tables import cases

NETWORK = "efficientnet_lite0"


def mixing() -> onnx.ModelProto:
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    return written("(float[N,64] x) => (float[N,64] y) { y = MatMul(x, W) }", W=weights)


@pytest.mark.parametrize("weights", ["", "weights.bin"], ids=["inside", "outside"])
def test_weights_are_fp16_and_tensors_fp32(tmp_path, weights):
    """External data becomes part of the file, because no checksum would name their use."""
    path = store(tmp_path, "m", mixing(), None, weights=weights)
    before, x = sum(file.stat().st_size for file in path.parent.iterdir()), np.eye(64, dtype=np.float32)
    (expected,) = onnxruntime.InferenceSession(path).run(None, {"x": x})

    convert_to_fp16(path)

    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"]
    (output,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    assert output.dtype == np.float32
    # FP16 has 11 significant bits.
    np.testing.assert_allclose(output, expected, rtol=2**-10, atol=1e-3)
    assert not np.array_equal(output, expected)
    assert path.stat().st_size < 0.6 * before
    onnx.checker.check_model(onnx.load(path), full_check=True)


@cases(
    INT8=(
        lambda to: shutil.copy(REPOSITORY / NETWORK / "2" / "model.onnx", to),
        "expected an FP32 network, got the operators of INT8 QuantizeLinear",
    ),
    no_weights=(lambda to: onnx.save(identity("FP32", ["N", 3]), to), "expected FP32 weights, got none"),
    FP16_already=(lambda to: shutil.copy(converted(to.parent), to), "expected FP32 weights, got FLOAT16"),
)
def test_other_networks_are_refused_with_the_reason(make, reason, tmp_path):
    make(tmp_path / "model.onnx")

    with pytest.raises(OperationFailed, match=f"^'model.onnx' cannot be converted to FP16: {reason}; fix: "):
        convert_to_fp16(tmp_path / "model.onnx")


def converted(folder: Path) -> Path:
    path = store(folder, "m", mixing(), None)
    convert_to_fp16(path)
    return path


def test_network_that_fp16_changes_is_rejected(tmp_path):
    repository = shutil.copytree(REPOSITORY, tmp_path / "models")
    path = tmp_path / "large.onnx"
    model = onnx.load(REPOSITORY / NETWORK / "1" / "model.onnx")
    # Multiply the first weights and divide the result again: only FP16 cannot hold the numbers between.
    index, first = next((i, node) for i, node in enumerate(model.graph.node) if node.op_type == "Conv")
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    arrays = {name: onnx.numpy_helper.to_array(weights[name]) for name in first.input[1:]}
    factor = np.float32(60_000 / max(np.abs(array).max() for array in arrays.values()))
    for name, array in arrays.items():
        weights[name].CopyFrom(constant(name, array * factor))
    model.graph.initializer.append(constant("inverse", np.float32(1 / factor)))
    output, first.output[0] = first.output[0], "large"
    model.graph.node.insert(index + 1, onnx.helper.make_node("Mul", ["large", "inverse"], [output]))
    onnx.save(model, path)

    message = r"tensor '.*' exceeds FP16 on .*: expected numbers up to 65,504; fix: "
    with unchanged(repository), pytest.raises(Rejected, match=message):
        publish(
            repository, NETWORK, path, None, ExaminationLimits(max_slowdown=100, against=1), precision="fp16"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text_detect", "text_direction", "text_recognise"])
def test_networks_of_the_readers_are_converted(tmp_path, name):
    repository = shutil.copytree(TEXT_REPOSITORY, tmp_path / "models")
    source = repository / name / "1" / "model.onnx"

    done = publish(repository, name, source, None, ExaminationLimits(max_slowdown=100), precision="fp16")

    assert done.version == 2
    assert (repository / name / "2" / "model.onnx").stat().st_size < 0.8 * source.stat().st_size
