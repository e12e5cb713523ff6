"""Batches of lines, their tensors, and the text of a recogniser's outputs."""

import numpy as np
import pytest

from nereid.base.errors import InvalidConfig
from nereid.tasks.read.characters import MIN_OTHER, Characters
from nereid.tasks.read.line_images import MAX_PADDING, DetectorInput, batches, network_size, stacked
from nereid.tasks.read.line_search import upside_down
from tests.tables import cases


def test_batches_have_every_line_once_and_little_padding():
    widths = np.random.default_rng(1).integers(20, 900, 200).tolist()

    groups = [*batches(widths, 2000)]

    assert sorted(index for group, _ in groups for index in group) == list(range(200))
    for group, width in groups:
        assert width % 8 == 0
        assert len(group) == 1 or len(group) * width <= 2000
        assert max(widths[index] for index in group) <= width
        assert min(widths[index] for index in group) >= (width - 8) * (1 - MAX_PADDING)
    assert len(groups) < 120
    assert [*batches([3200, 3200], 1000)] == [([0], 3200), ([1], 3200)], "longer than a batch"


def test_stacked_lines_are_normalised_planes():
    line = np.zeros((48, 10, 3), np.uint8)
    line[..., 0] = 255

    tensor = stacked([line], 16)

    assert (tensor.shape, tensor.dtype) == ((1, 3, 48, 16), np.float32)
    assert (tensor[0, 2, :, :10] == 1).all()
    assert (tensor[0, :2, :, :10] == -1).all()
    assert (tensor[..., 10:] == 0).all()


def test_detector_sees_multiples_of_32():
    """The shorter side is 736 at least, unless the longer one would exceed 2000."""
    kept, enlarged = {(800, 1100): (800, 1088)}, {(400, 600): (736, 1088), (1, 1): (736, 736)}
    limited = {(100, 600): (320, 1984), (4000, 3000): (1984, 1504)}
    sizes = kept | enlarged | limited

    assert {size: network_size(*size) for size in sizes} == sizes


@cases("shape", wide=(20, 1000, 3), tall=(1000, 20, 3), usual=(480, 640, 3))
def test_positions_in_the_detectors_input_are_those_of_the_pixels(shape):
    height, width = shape[:2]
    prepared = DetectorInput(np.zeros(shape, np.uint8))

    def there(x: float, y: float) -> np.ndarray:
        return (np.array([x, y]) + prepared.offset_xy) / prepared.scale_xy

    points = np.stack([there(0, 0), there(width, height)])
    assert (points >= 0).all()
    assert (points <= np.array(prepared.tensor.shape[:1:-1]) + 1e-3).all()
    np.testing.assert_allclose(prepared.positions(points), [[0, 0], [width, height]], atol=1e-3)


def test_direction_is_asked_in_bounded_batches():
    seen = []

    def network(tensor: np.ndarray) -> np.ndarray:
        seen.append(tensor.shape)
        return np.tile([0.25, 0.75], (len(tensor), 1))

    chances = upside_down(network, [np.zeros((48, 40 * (1 + index), 3), np.uint8) for index in range(20)])

    assert seen == [(16, 3, 48, 192), (4, 3, 48, 192)]
    assert (chances == 0.75).all()


def test_repeated_classes_and_blanks_are_left_out():
    """A character that is really repeated has a blank between; the confidence is the mean of what is kept."""
    index = np.array([[0, 1, 1, 0, 1, 3, 2], [0, 0, 0, 0, 0, 0, 0]])
    probability = np.array([[0.1, 0.9, 0.2, 0.1, 0.7, 0.5, 0.3], [0.5] * 7], np.float32)

    (text, confidence, others), empty = Characters(["a", "b"]).decode(index, probability)

    assert (text, others) == ("aa b", "")
    assert confidence == pytest.approx(0.6)  # float32 inputs
    assert empty == ("", 0.0, "")


def test_second_best_characters_are_those_that_are_probable():
    index, next_index = np.array([[1, 1, 2, 2, 0, 1]]), np.array([[2, 0, 0, 1, 1, 2]])
    probability = np.full((1, 6), 0.6, np.float32)
    next_probability = np.array([[0.3, 0.3, 0.3, 0.3, 0.3, MIN_OTHER / 2]], np.float32)

    ((text, _, others),) = Characters(["a", "b"]).decode(index, probability, next_index, next_probability)

    assert (text, others) == ("aba", "b  ")


@cases("content", empty=b"", cut=b"\xff\xff", group=b"\x0b\x00", endless=b"\x80" * 50_000_000)
def test_file_without_characters_is_refused(tmp_path, content):
    path = tmp_path / "net.onnx"
    path.write_bytes(content)

    with pytest.raises(InvalidConfig, match=r"net\.onnx"):
        Characters.from_file(path)
