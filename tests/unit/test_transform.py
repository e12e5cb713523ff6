"""Resize, crop and normalise, against definitions computed another way."""

import numpy as np
import pytest
from PIL import Image

from python_backend.decode import Decoded
from python_backend.transform import Transform, center_crop, shorter_side_size

LITE = Transform(256, 224, (127.0, 127.0, 127.0), (128.0, 128.0, 128.0))
IMAGENET = Transform(256, 224, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


@pytest.mark.parametrize("transform", [LITE, IMAGENET], ids=["lite", "imagenet"])
def test_normalise_matches_its_definition(transform):
    """(pixel - mean) / std in float64 is the reference; 1e-6 is float32 rounding. No resize, no crop."""
    pixels = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    same_size = Transform(224, 224, transform.mean, transform.std)
    out = np.full((3, 224, 224), np.nan, np.float32)

    same_size(Decoded(pixels, (224, 224)), out)

    expected = ((pixels - np.array(transform.mean)) / np.array(transform.std)).transpose(2, 0, 1)
    np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("size_wh", "expected"),
    [
        ((640, 427), (384, 256)),
        ((427, 640), (256, 384)),
        ((256, 256), (256, 256)),
        ((1, 1), (256, 256)),
        ((3, 1000), (256, 85333)),
        ((451, 300), (385, 256)),
    ],
    ids=str,
)
def test_shorter_side_is_exact(size_wh, expected):
    """The shorter side is exactly the one asked for, the longer keeps the aspect."""
    assert shorter_side_size(size_wh, 256) == expected


@pytest.mark.parametrize(
    ("height", "width"), [(300, 451), (427, 640), (1080, 270), (256, 256)], ids=lambda value: str(value)
)
def test_transform_agrees_with_pillow(gradient, height, width):
    """Pillow resizes another way; on a smooth picture both agree to two levels of 255."""
    pixels = gradient(height, width)
    out = np.empty(LITE.shape, np.float32)

    LITE(Decoded(pixels, (width, height)), out)

    image = Image.fromarray(pixels).resize(shorter_side_size((width, height), 256), Image.Resampling.BILINEAR)
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    reference = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float64).transpose(2, 0, 1)
    np.testing.assert_allclose(out * 128 + 127, reference, atol=2)


def test_target_size_follows_the_original_image(gradient):
    """A scaled decode of 451×300 is 226×150; its crop is that of the original, not of the rounded one."""
    scaled = Decoded(gradient(150, 226), (451, 300))

    assert LITE.resize(scaled).shape == (256, 385, 3)


def test_strong_reduction_does_not_alias():
    """Noise shrunk eightfold becomes even: 64 pixels averaged leave an eighth of its spread of 74 levels."""
    noise = np.random.default_rng(0).integers(0, 256, (2048, 2048, 3), dtype=np.uint8)

    resized = LITE.resize(Decoded(noise, (2048, 2048)))

    assert resized.std() < 10


@pytest.mark.parametrize("size_wh", [(30_000, 1), (1, 30_000), (20_000, 40)], ids=str)
def test_extreme_aspect_costs_no_more_than_a_photo(size_wh):
    """A tiny file with a huge aspect would become gigabytes if it were resized whole."""
    width, height = size_wh
    resized = LITE.resize(Decoded(np.zeros((height, width, 3), np.uint8), size_wh))

    assert max(resized.shape) <= 4 * 256 + 4


@pytest.mark.parametrize(
    ("height", "width"), [(100, 900), (900, 100), (99, 800)], ids=lambda value: str(value)
)
def test_trimming_keeps_the_crop(gradient, height, width):
    """What a centre crop shows is the same whether the long ends were cut off before or after resizing."""
    image = Decoded(gradient(height, width), (width, height))
    out = np.empty(LITE.shape, np.float32)

    LITE(image, out)

    whole = Image.fromarray(image.pixels).resize(
        shorter_side_size(image.size_wh, 256), Image.Resampling.BILINEAR
    )
    reference = center_crop(np.asarray(whole), 224).transpose(2, 0, 1)
    np.testing.assert_allclose(out * 128 + 127, reference, atol=2)


def test_center_crop_is_centred():
    """The crop has as much left of it as right of it."""
    pixels = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)

    np.testing.assert_array_equal(center_crop(pixels, 2), pixels[2:4, 3:5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((256, 300, (0, 0, 0), (1, 1, 1)), "crop_px must be 1..256, got 300"),
        ((256, 0, (0, 0, 0), (1, 1, 1)), "crop_px must be 1..256, got 0"),
        ((256, 224, (0, 0), (1, 1, 1)), "mean and std need 3 numbers each"),
        ((256, 224, (0, float("nan"), 0), (1, 1, 1)), "mean and std need 3 numbers each"),
        ((256, 224, (0, 0, 0), (1, 0, 1)), "std must be positive"),
    ],
    ids=["crop too large", "no crop", "two means", "mean that is no number", "std of 0"],
)
def test_contradictory_parameters_are_refused(arguments, message):
    """A transform that could never work is not built."""
    with pytest.raises(ValueError, match=message):
        Transform(*arguments)
