"""Models whose requests have one image, which the warm-up sends at the same time instead of as a batch."""

import pytest

from nereid.assets import REPOSITORY, TEXT_REPOSITORY
from nereid.config.model_config import ModelConfig
from nereid.publish.engine.warm import takes_one
from tests.tables import cases

IMAGE = 'input { name: "image" data_type: TYPE_STRING dims: [ 1 ] } '
BOX = 'output { name: "box" data_type: TYPE_FP32 dims: [ -1, 4 ] } '
SCORES = 'output { name: "scores" data_type: TYPE_FP32 dims: [ 5 ] } '
PICTURE = 'input { name: "image" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] } '
MAP = 'output { name: "map" data_type: TYPE_FP32 dims: [ 1, -1, -1 ] } '


@cases(
    ("config", "expected"),
    {
        "detector": (IMAGE + BOX, True),
        "one output of many": (IMAGE + SCORES + BOX, True),
        "last step of a detector": (
            'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ' + IMAGE + BOX,
            True,
        ),
        "classifier": (IMAGE + SCORES, False),
        "network whose outputs are as large as its picture": (PICTURE + MAP, False),
        "picture of the image's size": (IMAGE + MAP, False),
        "empty": ("", False),
    },
)
def test_model_that_returns_rows_takes_one_image(tmp_path, config, expected):
    """Images differ in their number of rows, so they cannot share a request."""
    (tmp_path / "config.pbtxt").write_text(config)

    assert takes_one(ModelConfig.from_file(tmp_path, 1)) == expected


@pytest.mark.parametrize(
    ("repository", "name", "expected"),
    [
        (REPOSITORY, "classify_v1", False),
        (REPOSITORY, "efficientnet_lite0", False),
        (TEXT_REPOSITORY, "read_text_v1", True),
        (TEXT_REPOSITORY, "read_waybill_v1", True),
        (TEXT_REPOSITORY, "text_recognise", False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_default_models_take_one_image_if_they_read(repository, name, expected):
    assert takes_one(ModelConfig.from_file(repository / name, 1)) == expected
