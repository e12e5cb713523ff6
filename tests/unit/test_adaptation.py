"""Changes of users' networks: the same numbers as a float64 reference, for every form of network."""

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from nereid.base.errors import WrongUsage
from nereid.models.publish.importing import adaptation
from nereid.models.publish.importing.adaptation import adapt, adapt_outputs_of_file, fit_runtimes
from nereid.repository.onnx_file import supported_runtimes
from tests import networks
from tests.networks import DATATYPES, written
from tests.tables import cases
from tests.user_networks import CLASSES, ELEMENTS, UserNetwork


def run(model: onnx.ModelProto, name: str, pixels: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(model)
    return networks.run(model.SerializeToString(), {model.graph.input[0].name: pixels})[name]


def pixels_for(form: UserNetwork) -> np.ndarray:
    rng = np.random.default_rng(7)
    side = form.side_px or 16
    shape = (3, side, side, 3) if form.is_channels_last else (3, 3, side, side)
    if form.datatype == "UINT8":
        return rng.integers(0, 256, shape).astype(np.uint8)
    return rng.standard_normal(shape).astype(DATATYPES[form.datatype])


FORMS = itertools.product(("NCHW", "NHWC"), (1, 3), ELEMENTS, (None, 1), (0, 2))
FORMS = [UserNetwork(*form, tail=tail) for *form, tail in FORMS]


@pytest.mark.parametrize("activation", ["none", "softmax", "sigmoid"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_becomes_a_classifier(form, activation):
    model, pixels = form.build(), pixels_for(form)

    name, _ = adapt(model, activation=activation)

    scores = run(model, name, pixels)
    assert scores.dtype == np.float32
    assert scores.shape == (3, CLASSES)
    tolerance = 0.03 if form.datatype == "FP16" else 1e-4
    np.testing.assert_allclose(scores, form.probabilities(pixels, activation), atol=tolerance, rtol=0.01)


def fixed(nodes: str, shape: str = "1,12,4", **constants: Any) -> onnx.ModelProto:
    """Return a network for one image of 8 x 8 pixels, from the 12 channels `c` that it computes first."""
    constants["w"] = np.random.default_rng(0).standard_normal((12, 3, 4, 4)).astype(np.float32)
    first = "c = Conv<kernel_shape = [4, 4], strides = [4, 4]>(image, w)"
    weights = {name: np.asarray(numbers) for name, numbers in constants.items()}
    return written(f"(float[1,3,8,8] image) => (float[{shape}] y) {{ {first} {nodes} }}", **weights)


FIXED = {
    # As Ultralytics exports its heads.
    "reshape": fixed("y = Reshape(c, s)", s=[1, 12, -1]),
    "all dims": fixed(
        "r = Reshape(c, s) t = Transpose<perm = [0, 2, 1, 3]>(r) m = Softmax<axis = 1>(t) y = Reshape(m, t2)",
        **{"s": [1, 3, 4, 4], "t2": [1, 12, 4]},
    ),
    # As transformers that were exported for one image.
    "token": fixed(
        "r = Reshape(c, s) y = Concat<axis = 2>(r, token)",
        *("1,12,5",),
        **{"s": [1, 12, 4], "token": np.ones((1, 12, 1), np.float32)},
    ),
    "resize": fixed('y = Resize<mode = "nearest">(c, "", "", s)', "1,12,4,4", s=[1, 12, 4, 4]),
    "expand": fixed(
        "e = Expand(one, s) r = Reshape(c, t) y = Concat<axis = 1>(r, e)",
        *("1,13,4",),
        **{"s": [1, 1, 4], "t": [1, 12, 4], "one": np.ones((1, 1, 1), np.float32)},
    ),
}
# The batch is in a place where it cannot be told from another 1.
MEAN = "m = ReduceMean<axes = [0, 2, 3], keepdims = 1>(c) y = Reshape(m, s)"
ALONE = {"mean": fixed(MEAN, "1,12", s=[1, 12])}


def old(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a network as exporters wrote it in 2018, which listed all weights as inputs."""
    older = onnx.ModelProto.FromString(model.SerializeToString())
    older.ir_version, older.opset_import[0].version = 3, 9
    for weight in older.graph.initializer:
        older.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    return older


def with_weight(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a network that also returns a weight, such as the anchors of its boxes."""
    more = onnx.ModelProto.FromString(model.SerializeToString())
    more.graph.initializer.append(networks.constant("anchors", np.ones((1, 4), np.float32)))
    more.graph.output.append(networks.value("anchors", "FP32", [1, 4]))
    return more


FIXED["old"] = old(FIXED["reshape"])
ALONE |= {"weight": with_weight(FIXED["reshape"]), "old weight": old(with_weight(ALONE["mean"]))}
ALONE["old mean"] = old(ALONE["mean"])


@pytest.mark.process
@pytest.mark.parametrize("name", [*FIXED, *ALONE])
def test_network_of_one_image_computes_several(tmp_path, name):
    onnx.save((FIXED | ALONE)[name], path := tmp_path / "model.onnx")
    images = np.random.default_rng(1).standard_normal((3, 3, 8, 8)).astype(np.float32)
    expected = np.concatenate([networks.run(path, {"image": image[None]})["y"] for image in images])

    changes = adapt_outputs_of_file(path)

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [tensor.name for tensor in session.get_inputs()] == ["image"]
    assert not isinstance(session.get_outputs()[0].shape[0], int)
    alone = "it computes one image at a time: its operators have a fixed batch of 1"
    assert changes == ["the batch of 1 is declared as variable" if name in FIXED else alone]
    batches = [images] if name in FIXED else [image[None] for image in images]
    outputs = np.concatenate([networks.run(path, {"image": batch})["y"] for batch in batches])
    np.testing.assert_allclose(outputs, expected, atol=1e-5 if name in FIXED else 1e-6)


@pytest.mark.process
def test_operators_are_sorted_before_the_edits(tmp_path):
    """As FP16 exports list the casts of their inputs last; the class token depends on the batch."""
    model = onnx.ModelProto.FromString(FIXED["token"].SerializeToString())
    model.graph.node.reverse()
    onnx.save(model, path := tmp_path / "model.onnx")
    images = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)

    changes = adapt_outputs_of_file(path)

    assert changes == ["its operators are sorted by dependency", "the batch of 1 is declared as variable"]
    onnx.checker.check_model(path)
    sorted_content = FIXED["token"].SerializeToString()
    expected = [networks.run(sorted_content, {"image": image[None]})["y"][0] for image in images]
    np.testing.assert_allclose(networks.run(path, {"image": images})["y"], expected, atol=1e-5)


@cases(
    classes_last=((1, 1, 12), (0, 12)),
    any_number_of_classes=((1, 1, -1), (0, 0)),
    boxes=((1, 6, 2), (0, 6, 2)),
    map=((1, 3, 2, 2), (0, 3, 2, 2)),
)
@pytest.mark.parametrize("is_fixed", [True, False], ids=["one image", "any batch"])
def test_only_scores_of_one_dim_are_flattened(shape, expected, is_fixed):
    """Rows of boxes are no scores: read as those of a classifier, they are wrong without an error."""
    declared = ",".join("?" if dim == -1 else str(dim) for dim in shape)
    model = fixed("m = ReduceMean<axes = [2, 3], keepdims = 0>(c) y = Reshape(m, s)", declared, s=shape)

    for tensor in () if is_fixed else (*model.graph.input, *model.graph.output):
        tensor.type.tensor_type.shape.dim[0].dim_param = "n"

    adapt(model)

    (output,) = model.graph.output
    assert tuple(dim.dim_value for dim in output.type.tensor_type.shape.dim) == expected
    assert ("Flatten" in {node.op_type for node in model.graph.node}) == (len(expected) == 2)


def test_network_that_takes_too_long_is_left_to_the_examination(tmp_path, monkeypatch):
    monkeypatch.setattr(adaptation, "TIMEOUT_S", 0.001)
    onnx.save(ALONE["mean"], path := tmp_path / "model.onnx")

    assert adapt_outputs_of_file(path) == ["the batch of 1 is declared as variable"]


def test_fitting_network_stays_as_it_is():
    model = UserNetwork().build()
    before = model.SerializeToString()

    assert adapt(model) == ("output", [])
    assert model.SerializeToString() == before


def test_names_of_the_current_version():
    form = UserNetwork(channels=1, datatype="FP16", tail=2)
    model, pixels = form.build(), pixels_for(form)

    name, changes = adapt(model, activation="softmax", names=("pixels", "scores"))

    assert changes == [
        "colours are converted to grey for input 'image'",
        "output 'output' is flattened from [-1, 5, 1, 1] to [-1, 5]",
        "output 'output' is converted from FLOAT16 to FP32",
        "a softmax is appended to output 'output', as 'probabilities'",
        "input 'image' is named 'pixels'",
        "output 'probabilities' is named 'scores'",
    ]
    assert (name, [tensor.name for tensor in model.graph.input]) == ("scores", ["pixels"])
    np.testing.assert_allclose(run(model, name, pixels), form.probabilities(pixels, "softmax"), atol=0.03)


def two_outputs() -> onnx.ModelProto:
    outputs = ", ".join(f"float16[N,{CLASSES}] {name}" for name in ("features", "probabilities"))
    nodes = f"features = Cast<to = {TensorProto.FLOAT16}>(image) probabilities = Add(features, features)"
    return written(f"(float[N,{CLASSES}] image) => ({outputs}) {{ {nodes} }}")


def test_output_is_chosen_by_name():
    """The other output, which depends on it, and whose name is taken, stays as it is."""
    model = two_outputs()

    name, _ = adapt(model, output="features", activation="sigmoid")

    assert name == "probabilities_2"
    inputs = np.ones((2, CLASSES), np.float32)
    np.testing.assert_allclose(run(model, name, inputs), 1 / (1 + np.exp(-inputs)), rtol=1e-5)
    assert run(model, name, inputs).dtype == np.float32
    np.testing.assert_array_equal(run(model, "probabilities", inputs), np.full_like(inputs, 2, np.float16))


@pytest.mark.parametrize(("output", "got"), [("", "got"), ("scores", "got: 'scores', the network has")])
def test_unclear_output_is_rejected(output, got):
    names = "features, probabilities; fix: name one with --output, or another --task "
    with pytest.raises(WrongUsage, match=rf"^expected one output with scores, {got}: {names}\("):
        adapt(two_outputs(), output=output)


@pytest.mark.parametrize("imported", [(28,), (28, 28), (7, 28)])
def test_new_stamps_are_lowered_if_nothing_changes(imported):
    """A network of old operators under a too new opset and IR version is written in older ones, exactly.

    skl2onnx imports an opset twice; ONNX Runtime takes the last one.
    """
    form = UserNetwork(opset=28, ir_version=14)
    model = form.build()
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid("", version) for version in imported)

    assert len(fit_runtimes(model)) == 2
    pixels = pixels_for(form)
    np.testing.assert_allclose(run(model, "output", pixels), form.logits(pixels), rtol=1e-4, atol=1e-5)


def test_new_operators_keep_their_opset():
    newest = onnx.defs.onnx_opset_version()
    limit = min(runtime.opset for runtime in supported_runtimes())
    schemas = onnx.defs.get_all_schemas_with_history()
    changed = [schema for schema in schemas if not schema.domain and limit < schema.since_version <= newest]
    assert changed, "this version of onnx has no operator that is newer than the runtime"
    model = UserNetwork(opset=newest, ir_version=8).build()
    model.graph.node.append(helper.make_node(changed[0].name, ["logits"], ["new"]))

    assert fit_runtimes(model) == []
    assert model.opset_import[0].version == newest
