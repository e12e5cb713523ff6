"""Boxes of text in a probability map, their order, and the crops inside."""

import cv2
import numpy as np
import pytest

from nereid.base.contract import MAX_LINES
from nereid.tasks.read import boxes as finder
from nereid.tasks.read.boxes import find_boxes, reading_order
from nereid.tasks.read.line_images import LINE_HEIGHT_PX, MAX_LINE_WIDTH_PX, along_text, cut
from nereid.tasks.read.line_search import page_quarters, positions_before, rotate


def box(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], np.float32)


def probabilities(*regions: tuple[int, int, int, int], level: float = 0.9) -> np.ndarray:
    pixels = np.zeros((300, 400), np.float32)
    for left, top, right, bottom in regions:
        pixels[top:bottom, left:right] = level
    return pixels


def test_region_gets_a_box_that_is_larger_by_the_learned_distance():
    """The distance is area × 1.6 / perimeter; the region was dilated by a pixel."""
    (corners,) = find_boxes(probabilities((100, 100, 200, 120)))

    width, height = 100, 20
    distance = width * height * 1.6 / (2 * (width + height))
    expected = box(100 - distance, 100 - distance, 200 + distance, 120 + distance)
    np.testing.assert_allclose(corners, expected, atol=0.01)  # OpenCV computes with float32


def test_nothing_specks_and_unsure_regions_get_no_box():
    """The mean probability of the last is below the limit, though each pixel is above the threshold."""
    unsure = probabilities((100, 100, 200, 120), level=0.4)

    for pixels in (probabilities(), probabilities((100, 100, 101, 101)), unsure):
        assert find_boxes(pixels).shape == (0, 4, 2)


def test_region_inside_of_a_frame_is_found():
    pixels = probabilities((20, 20, 380, 280))
    pixels[40:260, 40:360] = 0
    pixels[140:160, 150:250] = 0.95

    (inner,) = [corners for corners in find_boxes(pixels) if corners[0, 0] > 100]
    assert abs(inner.mean(axis=0) - [200, 150]).max() < 1


def test_boxes_are_bounded(monkeypatch):
    monkeypatch.setattr(finder, "MAX_LINES", 5)
    monkeypatch.setattr(finder, "MAX_REGIONS", 20)
    pixels = probabilities(*((x, y, x + 12, y + 6) for x in range(10, 380, 30) for y in range(10, 290, 20)))
    pixels[10:16, 10:24] = 0.99

    boxes = find_boxes(pixels)

    assert len(boxes) == 5
    assert boxes[0].min() < 10
    assert MAX_LINES == 1000


def test_crop_has_the_height_of_the_network():
    line, hair, point = box(0, 0, 100, 25), box(0, 0, 390, 2), box(5, 5, 5, 5)

    crops = [cut(np.zeros((300, 400, 3), np.uint8), corners).shape for corners in (line, hair, point)]

    assert crops == [(LINE_HEIGHT_PX, width, 3) for width in (192, MAX_LINE_WIDTH_PX, LINE_HEIGHT_PX)]


def test_crop_is_rectified():
    pixels = np.zeros((300, 400, 3), np.uint8)
    corners = np.array([[50, 100], [250, 160], [241, 190], [41, 130]], np.float32)
    middle = (corners[0] + corners[1]) / 2, (corners[2] + corners[3]) / 2
    cv2.fillPoly(pixels, [np.array([middle[0], corners[1], corners[2], middle[1]], np.int32)], (255,) * 3)

    line = cut(pixels, corners)

    width = line.shape[1]
    assert line[8:40, : width // 2 - 10].max() < 60
    assert line[8:40, width // 2 + 10 : -10].min() > 200


@pytest.mark.parametrize("quarters", range(4))
def test_pixel_of_a_turned_page_was_there_before(quarters):
    page = np.arange(5 * 7).reshape(5, 7, 1)
    lying = rotate(page, quarters)
    rows, columns = np.indices(lying.shape[:2])

    positions = positions_before(np.stack([columns, rows], axis=-1), (7, 5), quarters)

    np.testing.assert_array_equal(page[positions[..., 1], positions[..., 0]], lying)


@pytest.mark.parametrize("quarters", range(4))
def test_reading_order_follows_the_text(quarters):
    rows = [box(10, 10, 90, 30), box(120, 13, 200, 33), box(10, 50, 90, 70), box(130, 47, 200, 67)]
    width, height = 300, 200
    page = np.stack(rows)
    # A page that was turned clockwise: turning it back counter-clockwise gives the upright page.
    lying_wh = (width, height) if quarters % 2 == 0 else (height, width)
    lying = positions_before(page, lying_wh, quarters)

    order = reading_order(lying[[2, 1, 3, 0]])

    assert [[2, 1, 3, 0][index] for index in order] == [0, 1, 2, 3]
    assert page_quarters(lying) == quarters


def test_slanted_rows_stay_together():
    angle = np.deg2rad(8)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]], np.float32)
    rows = np.stack([box(10, 10, 90, 30), box(400, 10, 480, 30), box(10, 50, 90, 70)]) @ turn

    assert reading_order(rows[::-1]).tolist() == [2, 1, 0]


def test_text_in_a_tall_box_runs_downwards():
    (corners,) = along_text(box(200, 10, 220, 110)[None])
    assert corners[:2].tolist() == [[220, 10], [220, 110]]


def test_page_without_a_main_direction_is_not_turned():
    upright, down = box(10, 10, 110, 30), along_text(box(200, 10, 220, 110)[None])[0]
    assert page_quarters(np.stack([upright, down])) == 0
