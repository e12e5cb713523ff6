"""Models whose requests have one image, which the warm-up sends at the same time instead of as a batch."""

from nereid.base.config.model_config import ModelConfig
from nereid.models.publish.actions import takes_one
from tests.tables import cases

IMAGE = 'input { name: "image" data_type: TYPE_STRING dims: [ 1 ] } '
BOX = 'output { name: "box" data_type: TYPE_FP32 dims: [ -1, 4 ] } '
SCORES = 'output { name: "scores" data_type: TYPE_FP32 dims: [ 5 ] } '
PICTURE = 'input { name: "image" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] } '
MAP = 'output { name: "map" data_type: TYPE_FP32 dims: [ 1, -1, -1 ] } '


@cases(
    detector=(IMAGE + BOX, True),
    one_output_of_many=(IMAGE + SCORES + BOX, True),
    classifier=(IMAGE + SCORES, False),
    network_whose_outputs_are_as_large_as_its_picture=(PICTURE + MAP, False),
    picture_of_the_images_size=(IMAGE + MAP, False),
    empty=("", False),
)
def test_model_that_returns_rows_takes_one_image(config, expected, tmp_path):
    """Images differ in their number of rows, so they cannot share a request."""
    (tmp_path / "config.pbtxt").write_text(config)

    assert takes_one(ModelConfig.from_file(tmp_path, 1)) == expected
