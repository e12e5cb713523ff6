"""Resampling: Pillow's arithmetic, and the estimate of pixels from a decoder's averages."""

from itertools import product

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from nereid.base.assets import CHELSEA, COFFEE
from nereid.vision.imaging.decode import Buffers
from nereid.vision.imaging.resample import FILTERS, ResizeCrop, build_axis, resample
from tests.pictures import assert_same_levels, noise


def resampled(pixels, rows, columns):
    return np.stack([plane.copy() for plane in resample(pixels, rows, columns, Buffers())], axis=-1)


def resized(pixels, size_wh, filter_name="bilinear", antialias=True):
    (height, width), (wide, high) = pixels.shape[:2], size_wh
    rows = build_axis(ResizeCrop(height, high, 0, high), filter_name, antialias)
    return resampled(pixels, rows, build_axis(ResizeCrop(width, wide, 0, wide), filter_name, antialias))


def keys(x):
    return 1.5 * x**3 - 2.5 * x**2 + 1 if x < 1 else -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2


WEIGHTS = {
    "box": lambda x: float(-0.5 < x <= 0.5),
    "bilinear": lambda x: max(0.0, 1 - abs(x)),
    "bicubic": lambda x: keys(abs(x)) if abs(x) < 2 else 0.0,
    "lanczos": lambda x: float(np.sinc(x) * np.sinc(x / 3)) if abs(x) < 3 else 0.0,
}


def plain_matrix(source, count, filter_name):
    weights = np.zeros((count, source))
    for output, pixel in product(range(count), range(source)):
        distance = pixel + 0.5 - (output + 0.5) * source / count
        weights[output, pixel] = WEIGHTS[filter_name](distance)
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize("size_wh", [(13, 9), (31, 41)], ids=["down", "up"])
def test_resize_without_antialias_matches_its_definition(filter_name, size_wh):
    """Each output weighs the few pixels around its centre; the reference is a dense float64 matrix."""
    pixels = noise(29, 25)

    actual = resized(pixels, size_wh, filter_name, antialias=False)

    rows, columns = (plain_matrix(*pair, filter_name) for pair in ((29, size_wh[1]), (25, size_wh[0])))
    across = np.rint(np.einsum("xw,hwc->hxc", columns, pixels)).clip(0, 255)
    assert_same_levels(actual, np.rint(np.einsum("yh,hxc->yxc", rows, across)).clip(0, 255))


@pytest.mark.parametrize("filter_name", ["bicubic", "lanczos"])
@pytest.mark.parametrize("shrink", [1, 8])
def test_overshoot_is_cut_off(filter_name, shrink):
    """At an edge, filters with negative lobes exceed 0..255; the levels are clipped."""
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:, 32:], pixels[16:48] = 255, 255 - pixels[16:48]
    rows = build_axis(ResizeCrop(64 * shrink, 50, 0, 50), filter_name, shrink=shrink)

    levels = resampled(pixels, rows, rows)

    assert rows.overshoots
    assert (levels.min(), levels.max()) == (0, 255)


@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize("shrink", [2, 4, 8])
@pytest.mark.parametrize("photo", [COFFEE, CHELSEA], ids=["coffee", "chelsea"])
def test_estimates_come_closer_than_the_averages_themselves(photo, shrink, filter_name):
    encoded = photo.read_bytes()
    full = simplejpeg.decode_jpeg(encoded)
    height, width = full.shape[:2]
    scaled = simplejpeg.decode_jpeg(encoded, min_height=-(-height // shrink), min_width=-(-width // shrink))
    high, wide = int(height / shrink / 1.1), int(width / shrink / 1.1)
    small = Image.fromarray(full).resize((wide, high), Image.Resampling[filter_name.upper()])
    reference = np.asarray(small, np.float64)

    spans = ResizeCrop(height, high, 0, high), ResizeCrop(width, wide, 0, wide)
    estimated = resampled(scaled, *(build_axis(span, filter_name, shrink=shrink) for span in spans))

    plain = resized(scaled, (wide, high), filter_name)
    assert np.abs(estimated - reference).mean() < np.abs(plain - reference).mean()


@st.composite
def axes(draw):
    source, result = draw(st.integers(1, 9_000)), draw(st.integers(1, 3_000))
    offset = draw(st.integers(0, result - 1))
    count = draw(st.integers(1, min(700, result - offset)))
    shrink = draw(st.sampled_from([1, 2, 4, 8]))
    options = draw(st.sampled_from(list(FILTERS))), draw(st.booleans()), shrink
    return ResizeCrop(source, result, offset, count), options


@settings(max_examples=150, derandomize=True)
@given(axes())
def test_every_window_lies_in_the_image(drawn):
    span, (filter_name, antialias, shrink) = drawn

    axis = build_axis(span, filter_name, antialias, shrink)

    made = set()
    assert (axis.count, axis.shrink) == (span.count, shrink)
    assert 0 <= axis.first < axis.last <= -(-span.source // shrink)
    for block in axis.blocks:
        assert 0 <= block.sources.start < block.sources.stop <= axis.last - axis.first
        assert block.weights.shape == tuple(part.stop - part.start for part in (block.outputs, block.sources))
        assert (block.weights.dtype, block.weights.flags.c_contiguous) == (np.float32, True)
        np.testing.assert_allclose(block.weights.sum(1), 1, atol=1e-4)  # sums of some 100 float32
        made |= set(range(block.outputs.start, block.outputs.stop))
    assert made == set(range(span.count))
