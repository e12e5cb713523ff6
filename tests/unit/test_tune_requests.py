"""The requests that `nereid tune` sends, and the repository that it serves for them."""

import json
import os
import shutil

import pytest

from nereid.base.assets import PARCEL_LABEL, REPOSITORY
from nereid.base.errors import WrongUsage
from nereid.insight.tune import photos, profiles
from nereid.insight.tune.trial import OPEN_SIDE_PX, TrialServer, request_bodies
from nereid.repository.pbtxt import parse
from tests.tables import cases

PHOTOS = [b"one photo", b"another"]


def shapes(config: str) -> list[dict[str, list[int]]]:
    found = []
    for body, headers in request_bodies(parse(config), PHOTOS):
        head = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
        found.append({each["name"]: each["shape"] for each in head["inputs"]})
    return found


@cases(
    fixed_picture=([3, 48, 192], 8, [1, 3, 48, 192]),
    open_width=([3, 48, -1], 8, [1, 3, 48, OPEN_SIDE_PX]),
    open_sides_without_a_batch=([3, -1, -1], 0, [3, OPEN_SIDE_PX, OPEN_SIDE_PX]),
    tokens=([-1], 8, [1, 1]),
)
def test_tensors_have_the_shapes_of_the_config(dims, batch, shape):
    """Sides that the config leaves open are those of a picture, because networks cannot take one pixel."""
    config = f'max_batch_size: {batch} input {{ name: "x" data_type: TYPE_FP32 dims: {dims} }}'

    assert shapes(config) == [{"x": shape}]


def test_other_text_is_refused():
    with pytest.raises(WrongUsage, match="expected an input of images or numbers, got 'words' STRING"):
        request_bodies(parse('input { name: "words" data_type: TYPE_STRING dims: [ 1 ] }'), PHOTOS)


def test_reader_gets_a_page_with_text():
    """On a photo without text, a reader would not run its recogniser."""
    assert photos.sample(["text", "confidence", "box"]) == PARCEL_LABEL.read_bytes()
    assert photos.sample(["box", "score", "label"]) == photos.jpeg((640, 427)) == photos.sample(["scores"])


def test_steps_have_their_configs_of_the_profile(tmp_path):
    repository = shutil.copytree(REPOSITORY, tmp_path / "models")
    on_gpu = (repository / "efficientnet_lite0" / "configs" / "gpu.pbtxt").read_text()
    (tmp_path / "trial").mkdir()
    tuned = profiles.tunable(repository, "classify_v1", "gpu")

    TrialServer(repository, tuned, (), (1,), tmp_path / "trial", os.environ)

    served = tmp_path / "trial" / "models" / "efficientnet_lite0" / "configs" / "tuned.pbtxt"
    assert served.read_text().endswith(on_gpu)
    assert not [*repository.rglob("tuned.pbtxt")]
