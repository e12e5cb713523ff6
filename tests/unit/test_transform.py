"""From an image file to a network's input, compared with Pillow and with float64 arithmetic."""

import io
import re
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageOps

from nereid.vision.imaging.decode import Buffers, ImageLimits, open_image
from nereid.vision.imaging.resample import ResizeCrop
from nereid.vision.imaging.transform import DATATYPES, Placement, Transform, make_plan
from tests.pictures import assert_same_levels, exif, gradient, noise, resize, save
from tests.tables import cases, rows

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
SHORTER = Transform(224, 224, resize_shorter_px=256)
EXACT = Transform(41, 59, resize="exact")
LETTERBOX = Transform(64, 64, resize="letterbox")
PADDED_AFTER = replace(LETTERBOX, pad_position="after")
ANY = ImageLimits(2**30, 10**9, 10**6)


def apply(transform, encoded):
    out = np.full(transform.shape, 77, DATATYPES[transform.datatype])
    transform(open_image(encoded, ANY), out, Buffers())
    return out


def resized(image, transform, rows_first=True):
    """Apply the resize rules to an upright RGB image with Pillow: uint8[H, W, 3]."""
    target_wh = transform.width_px, transform.height_px
    method = Image.Resampling[transform.interpolation.upper()]
    if transform.resize == "exact":
        return np.asarray(resize(image, target_wh, method, rows_first))
    if transform.resize == "letterbox":  # ultralytics, LetterBox with auto=False, center=True
        ratio = min(target_wh[1] / image.height, target_wh[0] / image.width)
        size = round(image.width * ratio), round(image.height * ratio)
        share = 0.0 if transform.pad_position == "after" else 0.5
        left, top = (round(share * (whole - part) - 0.1) for whole, part in zip(target_wh, size, strict=True))
        canvas = Image.new("RGB", target_wh, transform.pad_color)
        canvas.paste(resize(image, size, method, rows_first), (left, top))
        return np.asarray(canvas)
    size, short, long = transform.resize_shorter_px, min(image.size), max(image.size)
    longer = int(size * long / short)
    size_wh = (size, longer) if image.width <= image.height else (longer, size)
    left, top = (round((whole - part) / 2) for whole, part in zip(size_wh, target_wh, strict=True))
    whole = np.asarray(resize(image, size_wh, method, rows_first))
    return whole[top : top + target_wh[1], left : left + target_wh[0]]


@rows(
    # Torchvision: the longer side is int(256 * long / short), the crop begins at round((long - 224) / 2).
    (SHORTER, (640, 427), Placement(ResizeCrop(427, 256, 16, 224)), Placement(ResizeCrop(640, 383, 80, 224))),
    (SHORTER, (1, 1), Placement(ResizeCrop(1, 256, 16, 224)), Placement(ResizeCrop(1, 256, 16, 224))),
    (SHORTER, (451, 300), Placement(ResizeCrop(300, 256, 16, 224)), Placement(ResizeCrop(451, 384, 80, 224))),
    (SHORTER, (259, 256), Placement(ResizeCrop(256, 256, 16, 224)), Placement(ResizeCrop(259, 259, 18, 224))),
    # Ultralytics: sides are round(side * ratio), at least 1; an odd row of padding goes below.
    (LETTERBOX, (64, 64), Placement(ResizeCrop(64, 64, 0, 64)), Placement(ResizeCrop(64, 64, 0, 64))),
    (LETTERBOX, (128, 64), Placement(ResizeCrop(64, 32, 0, 32), 16), Placement(ResizeCrop(128, 64, 0, 64))),
    (LETTERBOX, (64, 63), Placement(ResizeCrop(63, 63, 0, 63), 0), Placement(ResizeCrop(64, 64, 0, 64))),
    (LETTERBOX, (10, 20), Placement(ResizeCrop(20, 64, 0, 64)), Placement(ResizeCrop(10, 32, 0, 32), 16)),
    (LETTERBOX, (9_000, 1), Placement(ResizeCrop(1, 1, 0, 1), 31), Placement(ResizeCrop(9_000, 64, 0, 64))),
    ids=str,
)
def test_picture_is_placed_as_by_torchvision_and_ultralytics(transform, size_wh, rows, columns):
    assert transform.place(size_wh) == (rows, columns)


@pytest.mark.parametrize("interpolation", ["box", "bilinear", "bicubic", "lanczos"])
@cases("transform", shorter_side=SHORTER, exact=EXACT, letterbox=LETTERBOX, padded_after=PADDED_AFTER)
@rows((1, 1), (301, 451), (427, 640), (700, 263), (33, 47), (50, 2_003), ids=str)
def test_resize_agrees_with_pillow(height, width, transform, interpolation):
    image, transform = Image.fromarray(noise(height, width)), replace(transform, interpolation=interpolation)

    levels = apply(transform, save(image)).transpose(1, 2, 0)

    assert_same_levels(levels, resized(image, transform), interpolation)


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("color_order", ["RGB", "BGR"])
def test_normalise_matches_its_definition(datatype, layout, color_order):
    """(pixel - mean) / std in float64, mean and std by output channel, to the type's rounding."""
    pixels = np.random.default_rng(0).integers(0, 256, (41, 59, 3), dtype=np.uint8)
    mean, std = ((0.0,) * 3, (1.0,) * 3) if datatype == "UINT8" else (MEAN, STD)
    transform = replace(EXACT, datatype=datatype, layout=layout, color_order=color_order, mean=mean, std=std)

    out = apply(transform, save(Image.fromarray(pixels)))

    channels = pixels if color_order == "RGB" else pixels[:, :, ::-1]
    expected = (channels.astype(np.float64) - mean) / std
    expected = expected if layout == "NHWC" else expected.transpose(2, 0, 1)
    assert (out.shape, out.dtype) == (transform.shape, DATATYPES[datatype])
    np.testing.assert_allclose(out, expected, atol={"FP32": 1e-6, "FP16": 2e-3, "UINT8": 0}[datatype])


@pytest.mark.parametrize("size_wh", [(128, 64), (40, 90), (64, 63)], ids=str)
@pytest.mark.parametrize("color_order", ["RGB", "BGR"])
@cases("letterbox", around=LETTERBOX, after=PADDED_AFTER)
def test_padding_is_normalised_like_the_picture(size_wh, color_order, letterbox):
    image = Image.new("RGB", size_wh, (10, 20, 30))
    pad = (200, 100, 50)
    transform = replace(letterbox, pad_color=pad, mean=MEAN, std=STD, color_order=color_order)

    out = apply(transform, save(image))

    order = slice(None) if color_order == "RGB" else slice(None, None, -1)
    canvas = resized(image, replace(letterbox, pad_color=pad[order]))[:, :, order]
    np.testing.assert_allclose(out, ((canvas - MEAN) / STD).transpose(2, 0, 1), atol=1e-6)


def test_padding_of_the_last_image_does_not_stay():
    out, buffers = np.empty(LETTERBOX.shape, np.float32), Buffers()
    for size_wh in ((64, 64), (64, 8), (8, 64)):
        LETTERBOX(open_image(save(Image.new("RGB", size_wh, (1, 2, 3))), ANY), out, buffers)

    np.testing.assert_array_equal(out, apply(LETTERBOX, save(Image.new("RGB", (8, 64), (1, 2, 3)))))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("transform", [SHORTER, EXACT, LETTERBOX], ids=lambda transform: transform.resize)
@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_image_is_turned_upright(orientation, transform, image_format):
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}
    # The crop of 74 pixels is not symmetric: it begins at 66.5, rounded to 66.
    height = 74 if transform.resize == "shorter_side" else 71
    image = Image.fromarray(noise(height, 53))
    encoded = save(image, image_format, exif=exif(orientation), **options.get(image_format, {}))
    with Image.open(io.BytesIO(encoded)) as stored:
        upright = ImageOps.exif_transpose(stored).convert("RGB")

    levels = apply(transform, encoded).transpose(1, 2, 0)

    # The rows of the file are resampled first; Pillow turns TIFF files itself, before.
    rows_first = orientation <= 4 or image_format == "TIFF"
    assert_same_levels(levels, resized(upright, transform, rows_first))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_scaled_decode_is_turned_upright(orientation):
    """A large JPEG is decoded at an eighth and turned, too; a smooth one differs by three levels at most."""
    encoded = save(Image.fromarray(gradient(643, 1_021)), "JPEG", quality=95, exif=exif(orientation))
    with Image.open(io.BytesIO(encoded)) as stored:
        upright = ImageOps.exif_transpose(stored)

    levels = apply(LETTERBOX, encoded).transpose(1, 2, 0)

    np.testing.assert_allclose(levels, resized(upright, LETTERBOX), atol=3)


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
def test_orientation_can_be_ignored(orientation, image_format):
    image = Image.fromarray(noise(71, 53))

    turned = save(image, image_format, exif=exif(orientation))

    as_stored = replace(EXACT, exif_orientation=False)
    np.testing.assert_array_equal(apply(as_stored, turned), apply(EXACT, save(image, image_format)))


def test_transparent_pixels_show_the_background_colour():
    """`background_color` is R, G, B, independent of the network's order."""
    encoded = save(Image.new("RGBA", (8, 8), (9, 9, 9, 0)))

    levels = apply(replace(EXACT, background_color=(1, 2, 3), color_order="BGR"), encoded)

    np.testing.assert_array_equal(levels[:, 0, 0], [3, 2, 1])


@rows(
    ((538, 538), SHORTER, 2),
    ((537, 538), SHORTER, 1),
    ((1_920, 1_080), replace(SHORTER, decode_margin=2.0), 2),
    ((1_920, 1_080), SHORTER, 4),
    ((8_000, 6_000), SHORTER, 8),
    ((600, 90), EXACT, 2),
    ((8_000, 64), LETTERBOX, 8),
    ((1_920, 1_080), replace(SHORTER, antialias=False), 1),
    ids=str,
)
def test_decoder_shrinks_as_much_as_the_resize_allows(size_wh, transform, shrink):
    """At least `decode_margin` times the resized image is decoded; without antialias, the whole image."""
    assert make_plan(transform, size_wh, 1, 8).shrink == shrink
    assert make_plan(transform, size_wh, 1, 1).shrink == 1


@pytest.mark.parametrize("transform", [SHORTER, EXACT, LETTERBOX], ids=lambda transform: transform.resize)
@pytest.mark.parametrize("size_wh", [(30_000, 1), (1, 30_000), (20_000, 40)], ids=str)
def test_extreme_aspect_needs_little_memory(transform, size_wh):
    """A tiny file with a huge aspect ratio would need gigabytes if all of it were resized, not 64 MiB."""
    encoded = save(Image.new("RGB", size_wh, (50, 60, 70)))
    make_plan.cache_clear()

    tracemalloc.start()
    levels = apply(transform, encoded)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak_bytes < 64 * 2**20
    shown = levels[:, transform.height_px // 2 - 1, transform.width_px // 2 - 1]
    np.testing.assert_array_equal(shown, [50, 60, 70])


@pytest.mark.parametrize(("side_px", "max_shrink"), [(640, 1), (64, 8)], ids=["whole", "scaled"])
def test_plans_of_many_sizes_take_little_memory(side_px, max_shrink):
    """Small files can claim any size, so the cached plans have a limit in bytes."""
    make_plan.cache_clear()
    transform = Transform(side_px, side_px, resize="letterbox")

    tracemalloc.start()
    for width in range(16_384, 8_384, -100):
        make_plan(transform, (width, 3_900), 1, max_shrink)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    make_plan.cache_clear()
    assert kept_bytes < 64 * 2**20


@rows(
    ({"resize_shorter_px": 223}, "resize_shorter_px: expected at least the output's 224 x 224, got 223"),
    ({"resize": "exact"}, "resize_shorter_px = 256 contradicts resize = exact"),
    ({"resize": "fit"}, "resize: expected one of shorter_side, exact, letterbox, got 'fit'"),
    ({"datatype": "FP64"}, "datatype: expected one of FP32, FP16, UINT8, got 'FP64'"),
    ({"mean": (0.0, 0.0)}, "mean: expected 3 numbers, got (0.0, 0.0)"),
    ({"std": (1.0, 0.0, 1.0)}, "std: expected positive numbers, got (1.0, 0.0, 1.0)"),
    ({"decode_margin": float("nan")}, "decode_margin: expected 1 or more, got nan"),
    ({"pad_color": (0, 256, 0)}, "pad_color: expected 0..255, got (0, 256, 0)"),
    ({"background_color": (0, -1, 0)}, "background_color: expected 0..255, got (0, -1, 0)"),
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_contradictory_parameters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(SHORTER, **arguments)
