"""Boxes around the regions of a text probability map, and their reading order."""

from itertools import pairwise

import cv2
import numpy as np

from nereid.base.contract import MAX_LINES

# Source: PP-OCRv6 small, its inference settings.
THRESHOLD, MIN_SCORE, UNCLIP_RATIO = 0.3, 0.5, 1.6
# Minimum shorter side of a region and of its box, in map pixels.
MIN_REGION_PX, MIN_BOX_PX = 3, 5
# Regions that are scored, largest first, so that noise costs little time.
MAX_REGIONS = 3 * MAX_LINES
DILATION = np.ones((2, 2), np.uint8)


def find_boxes(probabilities: np.ndarray) -> np.ndarray:
    """Return the text boxes float32[N, 4, 2] in a map float32[H, W], most confident first.

    Corners are clockwise, starting at the top left. At most `MAX_LINES` boxes are returned.
    """
    mask = cv2.dilate((probabilities > THRESHOLD).view(np.uint8), DILATION)
    rectangles = [*map(cv2.minAreaRect, _outer_contours(mask))]
    sizes = np.array([size for _, size, _ in rectangles], np.float32).reshape(-1, 2)
    large = np.flatnonzero(sizes.min(axis=1, initial=np.inf) >= MIN_REGION_PX)
    scored = [(_score(probabilities, cv2.boxPoints(rectangles[index])), index) for index in large]
    sure = sorted((region for region in scored if region[0] >= MIN_SCORE), reverse=True)[:MAX_LINES]
    boxes = [_grown(rectangles[index]) for _, index in sure]
    corners = [cv2.boxPoints(box) for box in boxes if min(box[1]) >= MIN_BOX_PX]
    return clockwise(np.array(corners, np.float32).reshape(-1, 4, 2))


def clockwise(corners: np.ndarray) -> np.ndarray:
    """Order the corners of boxes [N, 4, 2] clockwise from the top left.

    The upper of the two left corners comes first, followed by the upper of the two right corners.
    """
    by_x = np.take_along_axis(corners, np.argsort(corners[..., :1], axis=1, kind="stable"), axis=1)
    left, right = (
        np.take_along_axis(side, np.argsort(side[..., 1:], axis=1, kind="stable"), axis=1)
        for side in (by_x[:, :2], by_x[:, 2:])
    )
    return np.stack([left[:, 0], right[:, 0], right[:, 1], left[:, 1]], axis=1)


def _outer_contours(mask: np.ndarray) -> list[np.ndarray]:
    """Return the outlines of the largest regions, but not of holes."""
    contours, hierarchy = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    outer = [
        contour
        for contour, links in zip(contours, [] if hierarchy is None else hierarchy[0], strict=True)
        if links[3] < 0
    ]
    if len(outer) > MAX_REGIONS:
        outer.sort(key=cv2.contourArea, reverse=True)
    return outer[:MAX_REGIONS]


def _score(probabilities: np.ndarray, corners: np.ndarray) -> float:
    limits = np.array(probabilities.shape[::-1]) - 1
    left, top = np.clip(np.floor(corners.min(axis=0)).astype(int), 0, limits)
    right, bottom = np.clip(np.ceil(corners.max(axis=0)).astype(int), 0, limits)
    inside = np.zeros((bottom - top + 1, right - left + 1), np.uint8)
    cv2.fillConvexPoly(inside, (corners - (left, top)).astype(np.int32), (1,))
    return float(cv2.mean(probabilities[top : bottom + 1, left : right + 1], inside)[0])


def _grown(rectangle: tuple) -> tuple:
    """Enlarge a rectangle by the margin that the network learned to leave out.

    The distance is area × `UNCLIP_RATIO` / perimeter. Offsetting a rectangle gives a rectangle, so no polygon
    library is needed. Source: Liao et al. 2020, Real-time Scene Text Detection with Differentiable
    Binarization, 3.5.
    """
    center, (width, height), angle = rectangle
    distance = width * height * UNCLIP_RATIO / (2 * (width + height))
    return center, (width + 2 * distance, height + 2 * distance), angle


# Lines are in one row if their centres differ by less than this fraction of the smaller one's height.
ROW_OVERLAP = 0.5


def reading_order(boxes: np.ndarray) -> np.ndarray:
    """Return the indices of boxes [N, 4, 2] from top to bottom, and from left to right within a row.

    Each box's corners are clockwise from its text's top left, so "top" is where most of the text has its top.
    """
    if not len(boxes):
        return np.zeros(0, int)
    along = boxes[:, 1] - boxes[:, 0]
    length = np.linalg.norm(along, axis=1)
    angle = _main_angle(np.arctan2(along[:, 1], along[:, 0]), length)
    cosine, sine = np.cos(angle), np.sin(angle)
    centers = boxes.mean(axis=1) @ np.array([[cosine, -sine], [sine, cosine]], np.float32)
    heights = np.linalg.norm(boxes[:, 3] - boxes[:, 0], axis=1)
    rows = _rows(centers[:, 1], heights)
    order: np.ndarray = np.lexsort((centers[:, 0], rows))
    return order


def _main_angle(angles: np.ndarray, weights: np.ndarray) -> float:
    """Return the median angle within the quarter turn that most of the text has."""
    quarters = np.rint(angles / (np.pi / 2)).astype(int) % 4
    main = int(np.bincount(quarters, weights, 4).argmax())
    inside = np.angle(np.exp(1j * (angles[quarters == main] - main * np.pi / 2)))
    return main * np.pi / 2 + float(np.median(inside))


def _rows(y: np.ndarray, heights: np.ndarray) -> np.ndarray:
    rows = np.zeros(len(y), int)
    order = np.argsort(y, kind="stable")
    first = order[0]
    for before, index in pairwise(order):
        is_new = y[index] - y[first] >= ROW_OVERLAP * min(heights[index], heights[first])
        first = index if is_new else first
        rows[index] = rows[before] + is_new
    return rows
