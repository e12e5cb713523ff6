"""Post-processing in a `fused` model: rows of a network, or the objects in each image."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nereid.backends.triton.post_processing import PostProcessing, open_post_processing
from nereid.base.assets import REPOSITORY
from nereid.base.config.model_config import FusedSettings, ModelConfig, read_config
from nereid.base.errors import InferenceFailed, InvalidConfig, InvalidImage
from nereid.vision.imaging.pipeline import Batch
from tests.detectors import CLASSES, KNOWN, SIDE, TestDetector, add_detector
from tests.pictures import save
from tests.tables import cases
from tests.unit.test_check import edit

BOXES = np.array([box for box, _, _ in KNOWN], np.float32)
CPU, NETWORK = "cars_v1/configs/cpu.pbtxt", "cars_network/config.pbtxt"
SMALL, LARGE = (save(Image.new("RGB", (side, side))) for side in (SIDE, 2 * SIDE))


@pytest.fixture(scope="module")
def cars(tmp_path_factory) -> Path:
    return add_detector(tmp_path_factory.mktemp("cars"))


def opened(repository: Path, model: str) -> PostProcessing:
    folder = repository / model
    config = ModelConfig.from_document(read_config(folder, "cpu"), folder, 1)
    names = config.settings(FusedSettings)
    return open_post_processing(config, names, config.sibling(names.network, names.network_version))


def test_each_image_gets_its_own_objects(cars):
    step, broken = opened(cars, "cars_v1"), InvalidImage("broken")
    rows = np.stack([TestDetector("yolov8").outputs()["output0"]] * 3)
    rows[1] = np.nan
    places = [slice(0, 1), broken, slice(1, 2), slice(2, 3)]

    requests = [[SMALL], broken, [SMALL], [LARGE]]
    small, failed, nan, large = step.finish(Batch(None, places, []), requests, {"output0": rows})

    assert step.needed_outputs == ("output0",)
    assert {name: array.tolist() for name, array in small.items()} == {
        "box": [BOXES.tolist()],
        "score": [[score for _, score, _ in KNOWN]],
        "label": [[CLASSES[index].encode() for _, _, index in KNOWN]],
    }
    assert large["box"].tolist() == [(2 * BOXES).tolist()]
    assert failed is broken
    assert isinstance(nan, InferenceFailed)


def test_classifier_passes_on_the_rows_of_each_request():
    step, broken = opened(REPOSITORY, "classify_v1"), InvalidImage("broken")

    outcomes = step.finish(
        Batch(None, [slice(0, 2), broken, slice(2, 3)], []),
        [[SMALL] * 2, broken, [SMALL]],
        {step.needed_outputs[0]: np.arange(6, dtype=np.float32).reshape(3, 2)},
    )

    assert step.accept([SMALL, LARGE]) == [SMALL, LARGE]
    assert outcomes[1] is broken
    assert [outcomes[index]["scores"].tolist() for index in (0, 2)] == [[[0, 1], [2, 3]], [[4, 5]]]


@cases(
    another_backend=(edit(CPU, '"cars_boxes"', '"cars_preprocess"'), "of backend boxes, got 'cars_preproc"),
    missing=(edit(CPU, '"cars_boxes"', '"absent"'), "absent"),
    other_outputs=(edit(CPU, 'name: "score"', 'name: "scores"'), "expected the outputs of 'cars_boxes'"),
    other_network=(edit(NETWORK, '"output0"', '"output1"'), "'cars_boxes' needs 'output0' TYPE_FP32 [7, 84]"),
)
def test_step_that_does_not_fit_fails_the_load(damage, message, cars, tmp_path):
    repository = Path(shutil.copytree(cars, tmp_path / "models"))
    damage(repository)

    with pytest.raises(InvalidConfig, match=re.escape(message)):
        opened(repository, "cars_v1")


def test_output_unlike_that_of_the_network_fails_the_load(tmp_path):
    repository = Path(shutil.copytree(REPOSITORY, tmp_path / "models"))
    edit("classify_v1/configs/cpu.pbtxt", "dims: [ 1000 ]", "dims: [ 10 ]")(repository)

    with pytest.raises(InvalidConfig, match=r"expected one output like 'scores' of its network, .*\[10\]"):
        opened(repository, "classify_v1")
