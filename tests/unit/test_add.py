"""Files that `nereid add` writes and requests that it refuses, without a server."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from nereid.backends.routing.assignment import parse_route
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish.add import AddRequest, add
from nereid.repository.check import check
from nereid.repository.repository_index import PinnedModel, configs, pinned_models, unused_models
from nereid.vision.imaging.pipeline import Pipeline
from tests.networks import run
from tests.pictures import noise, save
from tests.publishing import SIDE, classifier, contents, propose, unchanged
from tests.tables import cases
from tests.user_networks import CLASSES, UserNetwork

pytestmark = pytest.mark.process
UTF_16 = Path("utf-16.txt")


@pytest.fixture
def file(tmp_path):
    onnx.save(classifier(), path := tmp_path / "new.onnx")
    return path


@pytest.fixture
def repository(tmp_path):
    return tmp_path / "models"


def request(file, **more) -> AddRequest:
    parameters = {"preset": more.pop("preset", "imagenet")}
    return AddRequest(file, **{"name": "small", "parameters": parameters, **more})


def test_added_model_has_all_its_parts(repository, file, tmp_path):
    labels = tmp_path / "labels.txt"
    labels.write_text("a\nb\nc\nd\ne\n")

    done = add(repository, request(file, labels=labels), None)

    assert (done.model, done.version, done.pinned) == ("small_network", 1, ("small_v1",))
    assert [finding for finding in check(repository) if finding.verdict != "ok"] == []
    pinned = PinnedModel("small_v1", "small_network", 1, "small_preprocess", 1)
    assert pinned_models(repository, configs(repository)) == [pinned]
    assert unused_models(repository, "cpu") == {"small_network", "small_preprocess"}
    kinds = {name: fields["instance_group"][0]["kind"] for name, fields in configs(repository, "gpu").items()}
    on_gpu = ("small_network", "small_preprocess", "small_v1")
    assert kinds == {"small": "KIND_CPU"} | dict.fromkeys(on_gpu, "KIND_GPU")
    route = parse_route((repository / "small.route.json").read_bytes())
    assert [(v.name, v.model, v.version, v.weight) for v in route.variants] == [("v1", "small_v1", 1, 100)]
    config = ModelConfig.from_file(repository / "small_network", 1)
    sizes = [int(warmup["batch_size"]) for warmup in config.document["model_warmup"]]
    assert sizes == list(range(1, config.max_batch_size + 1))


def test_logits_that_stay_are_not_called_probabilities(repository, tmp_path):
    onnx.save(UserNetwork().build(), tmp_path / "logits.onnx")

    proposal = propose(repository, request(tmp_path / "logits.onnx", activation="none"))

    assert ("scores", "5 classes, values as the network returns them") in proposal.about
    assert len(proposal.measurements.notes) == 1


@cases(
    channels_first=("FP32", ["N", 3, SIDE, SIDE], (0, 0), (3, SIDE, SIDE), "NCHW"),
    channels_last_uint8=("UINT8", ["N", SIDE, SIDE, 3], (0, 0), (SIDE, SIDE, 3), "NHWC"),
    any_size_fp16=("FP16", ["N", 3, "H", "W"], (48, 40), (3, 48, 40), "NCHW"),
    oblong=("FP32", ["N", 3, 40, SIDE], (0, 0), (3, 40, SIDE), "NCHW"),
)
def test_input_decides_the_preprocessing(datatype, shape, size, dims, layout, repository, tmp_path):
    onnx.save(classifier(datatype, shape), tmp_path / "new.onnx")

    add(repository, request(tmp_path / "new.onnx", size=size), None)

    config = ModelConfig.from_file(repository / "small_preprocess", 1)
    (output,) = config.outputs
    assert (output.name, output.datatype, output.dims) == ("images", f"TYPE_{datatype}", dims)
    assert config.parameters.get("layout", "NCHW") == layout
    # ImageNet's 256 for 224, in proportion.
    longer = max(dims[:2] if layout == "NHWC" else dims[1:])
    assert config.parameters["resize_shorter_px"] == str(round(256 * longer / 224))


@cases(
    NUL=("cat\0", r"cat\x00"),
    title=("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    colour=("\x9b31m", r"\x9b31m"),
    direction=("\u202egnp", r"\u202egnp"),
)
@pytest.mark.parametrize("source", ["--labels", "metadata"])
def test_label_with_a_control_character_is_refused(label, shown, repository, tmp_path, source):
    model, names = classifier(), [label, "b", "c", "d", "e"]
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n")
    onnx.helper.set_model_props(model, {"names": json.dumps(names)} if source == "metadata" else {})
    onnx.save(model, tmp_path / "new.onnx")
    labels = tmp_path / "names.txt" if source == "--labels" else None

    message = re.escape(f"expected no control characters, got '{shown}'")
    with pytest.raises(WrongUsage, match=f"^label 1 of .*{message}"):
        add(repository, request(tmp_path / "new.onnx", labels=labels), None)

    assert not repository.exists() or contents(repository) == {}


@cases(
    name=({"name": "a b"}, r"invalid name: expected .*letters, digits, '\.', .*, got 'a b'"),
    preset=({"preset": "vgg"}, r"invalid preset: expected one of imagenet, .*, got 'vgg'"),
    profile=({"profiles": ("tpu",)}, r"invalid profile: expected one of cpu, gpu, got 'tpu'"),
    outputs=({}, "expected one output with scores, got: a, b; fix: name one with --output"),
    few_labels=({"output": "a", "labels": Path(__file__)}, "--labels: expected 5 lines, .*, got"),
    labels_of_UTF_16=({"labels": UTF_16}, "--labels: expected text in UTF-8, got byte 0xff in 'u"),
)
def test_request_that_does_not_fit_is_wrong_usage(more, message, repository, tmp_path, monkeypatch):
    onnx.save(classifier(outputs=("a", "b")), tmp_path / "new.onnx")
    (tmp_path / UTF_16).write_text("a", encoding="utf-16")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(WrongUsage, match=message):
        add(repository, request(tmp_path / "new.onnx", **more), None)

    assert not repository.exists() or contents(repository) == {}


def test_labels_lose_their_byte_order_mark(repository, file, tmp_path):
    """Editors on Windows write one, which would become part of the first label."""
    (tmp_path / "labels.txt").write_text("ä\nb\nc\nd\ne\n", encoding="utf-8-sig")

    add(repository, request(file, labels=tmp_path / "labels.txt"), None)

    written = [path.read_bytes() for path in repository.glob("*/labels.txt")]
    assert {content.decode() for content in written} == {"ä\nb\nc\nd\ne\n"}


def test_name_that_is_taken_is_refused(repository, file):
    add(repository, request(file), None)

    message = r"already has a model 'small'; fix: nereid publish small .*, another --name, or --replace"
    with unchanged(repository), pytest.raises(WrongUsage, match=message):
        add(repository, request(file), None)


def test_route_file_that_is_there_is_kept(repository, file):
    repository.mkdir()
    (repository / "small.route.json").write_text("mine")

    with pytest.raises(WrongUsage, match=r"already has a file 'small\.route\.json'; fix: .* another --name"):
        add(repository, request(file), None)

    assert [path.read_text() for path in repository.iterdir()] == ["mine"]


def test_names_of_tensors_may_have_any_characters(repository, tmp_path):
    model = classifier(outputs=['a"b\\c', "other"])
    model.graph.input[0].name = model.graph.node[0].input[0] = 'é"\n\\'
    onnx.save(model, tmp_path / "new.onnx")

    add(repository, request(tmp_path / "new.onnx", output='a"b\\c'), None)

    assert [finding for finding in check(repository) if finding.verdict != "ok"] == []
    config = ModelConfig.from_file(repository / "small_network", 1)
    assert [tensor.name for tensor in (*config.inputs, *config.outputs)] == ['é"\n\\', "probabilities"]


def test_batches_are_small_on_a_cpu_and_any_on_a_gpu(repository, file):
    """On a CPU, large batches would leave the other instance without work. Only the wanted configs exist."""
    add(repository, request(file, profiles=("cpu",)), None)
    add(repository, request(file, name="other", profiles=("gpu",)), None)

    is_small = {
        str(path.relative_to(repository)): "preferred_batch_size: [ 2, 4 ]" in path.read_text()
        for path in repository.rglob("*.pbtxt")
        if "dynamic_batching" in path.read_text()
    }
    assert is_small == {
        "other_network/config.pbtxt": True,
        "other_network/configs/gpu.pbtxt": False,
        "other_preprocess/config.pbtxt": True,
        "other_preprocess/configs/gpu.pbtxt": False,
        "other_v1/configs/gpu.pbtxt": False,
        "small_network/config.pbtxt": True,
        "small_preprocess/config.pbtxt": True,
        "small_v1/configs/cpu.pbtxt": True,
    }


def test_preview_shows_what_the_network_sees(repository, file, tmp_path):
    shown, proposals = tmp_path / "seen.png", []

    with pytest.raises(OperationFailed, match="'small' was not added"):
        add(repository, request(file, preview=shown), None, confirm=lambda plan: bool(proposals.append(plan)))

    with Image.open(shown) as picture:
        assert picture.size == (2 * SIDE, SIDE)
    lowest, highest = proposals[0].value_range
    assert -2.2 < lowest < highest < 2.7
    with pytest.raises(WrongUsage, match=r"--images: invalid image: .*new\.onnx: expected an image file"):
        add(repository, request(file, images=(file,)), None)
    assert not [*repository.iterdir()]


def test_given_resize_replaces_that_of_the_metadata(repository, file):
    numbers = {"input_size": [3, SIDE, SIDE], "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.9}
    (file.parent / "config.json").write_text(json.dumps({"pretrained_cfg": numbers}))

    add(repository, AddRequest(file, "small", {"resize": "exact"}), None)

    parameters = ModelConfig.from_file(repository / "small_preprocess", 1).parameters
    numbers = {"mean": "127.5, 127.5, 127.5", "std": "63.75, 63.75, 63.75"}
    assert parameters == {"resize": "exact", "interpolation": "bilinear"} | numbers


@pytest.mark.parametrize("side", [SIDE // 2, 2 * SIDE])
def test_crop_for_another_size_is_refused(side, repository, file):
    """The message names the file, and the resizing that has the same effect for this network."""
    numbers = {"input_size": [3, side, side], "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.8}
    (file.parent / "config.json").write_text(json.dumps({"pretrained_cfg": numbers}))

    message = rf"timm's 'config.json' .* {SIDE} x {SIDE} .* {side} x {side}; fix: .*resize_shorter_px=(\d+)"
    with pytest.raises(WrongUsage, match=message) as refusal:
        add(repository, request(file, parameters={}), None)
    scaled = str(refusal.value).rpartition("=")[2]
    add(repository, request(file, parameters={"resize_shorter_px": scaled}), None)

    parameters = ModelConfig.from_file(repository / "small_preprocess", 1).parameters
    assert abs(int(parameters["resize_shorter_px"]) - SIDE / 0.8) <= 1
    assert parameters["mean"] == "127.5, 127.5, 127.5"


NAMES = [f"name {number}" for number in range(CLASSES)]


@cases(
    scale=(UserNetwork(), {"scale": str(1 / 255)}),
    one_number_grey=(UserNetwork("NHWC", 1, batch=1, tail=2), {"mean": "127.5", "std": "127.5"}),
    per_channel_FP16=(
        UserNetwork(datatype="FP16", activation="softmax"),
        {"mean": "120, 110, 100", "std": "60, 50, 40"},
    ),
    # In newer stamps of exporters, the operators are the same.
    BGR_any_size_new_opset=(
        UserNetwork(side_px=None, activation="sigmoid", opset=28, ir_version=14),
        {"mean": "100, 110, 120", "std": "255", "color_order": "BGR"},
    ),
    bytes=(UserNetwork("NHWC", datatype="UINT8"), {}),
)
def test_scores_are_those_of_the_users_network(form, parameters, repository, tmp_path):
    """A photo of the network's size, so that no resize takes part; the reference is in float64."""
    model, pixels = form.build(), noise(16, 16)
    onnx.helper.set_model_props(model, {"names": repr(dict(enumerate(NAMES)))})
    onnx.save(model, tmp_path / "own.onnx")
    size = (0, 0) if form.side_px else (16, 16)

    request = AddRequest(tmp_path / "own.onnx", "own", {"resize": "exact", **parameters}, size=size)
    add(repository, request, None)

    config = ModelConfig.from_file(repository / "own_preprocess", 1)
    batch = Pipeline.from_config(config, max_batch_size=1, instances=1).run([[save(Image.fromarray(pixels))]])
    (scores,) = run(repository / "own_network" / "1" / "model.onnx", {"image": batch.tensor}).values()
    seen = pixels[:, :, ::-1] if parameters.get("color_order") == "BGR" else pixels
    mean, std = (np.array(parameters.get(*item).split(","), float) for item in (("mean", "0"), ("std", "1")))
    seen = (seen * float(parameters.get("scale", "1")) - mean) / std
    pixels = (seen if form.is_channels_last else seen.transpose(2, 0, 1))[None]
    expected = form.probabilities(pixels, "softmax" if form.activation == "none" else form.activation)
    np.testing.assert_allclose(scores, expected, atol=0.02 if form.datatype == "FP16" else 2e-3)
    assert (repository / "own" / "labels.txt").read_text().splitlines() == NAMES
