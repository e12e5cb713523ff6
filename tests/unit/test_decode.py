"""Decoding: every format right, every bad file refused with what was expected and what came."""

import struct
import zlib

import numpy as np
import pytest

from clients.samples import COFFEE
from python_backend.decode import Limits, decode, jpeg_scale
from python_backend.errors import InvalidImage

# A smooth picture survives JPEG's rounding to within this many levels.
LOSSY_LEVELS = 6


@pytest.mark.parametrize(
    ("image_format", "options"),
    [
        ("PNG", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("WEBP", {"lossless": True}),
        ("JPEG", {"quality": 95, "subsampling": 0}),
    ],
    ids=["png", "bmp", "tiff", "webp", "jpeg"],
)
@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 5), (40, 60)], ids=["1x1", "odd", "40x60"])
def test_pixels_come_back(encode, gradient, image_format, options, height, width):
    """Each format gives uint8 RGB of the image's own size."""
    pixels = gradient(height, width)

    decoded = decode(encode(pixels, image_format, **options), 64, Limits())

    assert (decoded.pixels.shape, decoded.pixels.dtype) == ((height, width, 3), np.uint8)
    assert decoded.size_wh == (width, height)
    np.testing.assert_allclose(decoded.pixels.astype(int), pixels, atol=LOSSY_LEVELS)


@pytest.mark.parametrize(
    ("image_format", "mode"),
    [
        ("JPEG", "L"),
        ("JPEG", "CMYK"),
        ("PNG", "L"),
        ("PNG", "P"),
        ("PNG", "RGBA"),
        ("GIF", "P"),
        ("PNG", "1"),
    ],
    ids=["grey jpeg", "cmyk jpeg", "grey png", "palette png", "rgba png", "gif", "bilevel png"],
)
def test_other_colour_modes_become_rgb(encode, image_format, mode):
    """A white picture is white RGB, whatever the file's colour mode."""
    pixels = np.full((8, 8, 3), 255, np.uint8)

    decoded = decode(encode(pixels, image_format, mode=mode), 8, Limits())

    np.testing.assert_allclose(decoded.pixels.astype(int), pixels, atol=LOSSY_LEVELS)


@pytest.mark.parametrize(
    ("size_wh", "min_side_px", "eighths"),
    [
        ((640, 427), 256, 8),
        ((512, 512), 256, 4),
        ((511, 512), 256, 8),
        ((1920, 1080), 256, 2),
        ((8000, 6000), 256, 1),
        ((10, 10), 256, 8),
    ],
    ids=str,
)
def test_jpeg_scale_is_the_smallest_fast_one_that_is_large_enough(size_wh, min_side_px, eighths):
    """Only 8, 4, 2 and 1 eighths have SIMD code, and none may undercut the wanted side."""
    assert jpeg_scale(size_wh, min_side_px) == eighths


def test_scaled_decode_shows_the_same_picture(encode, gradient):
    """A large JPEG is decoded at a quarter: the size asked for is kept, the content is the same."""
    pixels = gradient(1080, 1920)

    decoded = decode(encode(pixels, "JPEG", quality=95), 256, Limits())

    assert (decoded.pixels.shape, decoded.size_wh) == ((270, 480, 3), (1920, 1080))
    expected = pixels.reshape(270, 4, 480, 4, 3).mean((1, 3))
    np.testing.assert_allclose(decoded.pixels, expected, atol=LOSSY_LEVELS)


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (b"", "expected the bytes of an image file .* got 0 bytes"),
        (b"hello world", r"expected an image file .* got 11 bytes starting with b'hello wo'"),
        (b"\xff\xd8\xff", "JPEG of 3 bytes has no readable header"),
        (COFFEE.read_bytes()[:20_000], "JPEG of 20000 bytes is damaged: Premature end of JPEG file"),
        (b"%PDF-1.7 nothing to see", "expected an image file .* got 23 bytes"),
    ],
    ids=["empty", "text", "jpeg without header", "truncated jpeg", "pdf"],
)
def test_bad_file_is_refused(encoded, message):
    """A file that is no complete image says what was expected and what came."""
    with pytest.raises(InvalidImage, match=message):
        decode(encoded, 256, Limits())


def test_truncated_png_is_refused(encode, gradient):
    """Formats that Pillow decodes are refused when cut short, too."""
    encoded = encode(gradient(64, 64))

    with pytest.raises(InvalidImage, match="damaged"):
        decode(encoded[: len(encoded) // 2], 256, Limits())


@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
def test_too_many_pixels_are_refused_from_the_header(encode, gradient, image_format):
    """The limit is checked before any pixel is decoded: the damaged body is never reached."""
    encoded = encode(gradient(100, 100), image_format)[:-40]

    with pytest.raises(InvalidImage, match="expected at most 9999 pixels, got 100 x 100"):
        decode(encoded, 256, Limits(max_image_pixels=9_999))


def test_decompression_bomb_is_refused_from_its_header(encode, gradient):
    """A PNG that claims 20,000 x 20,000 pixels is refused like any other, whatever Pillow thinks of it."""
    encoded = bytearray(encode(gradient(8, 8)))
    encoded[16:24] = struct.pack(">II", 20_000, 20_000)
    encoded[29:33] = struct.pack(">I", zlib.crc32(encoded[12:29]))

    with pytest.raises(InvalidImage, match="expected at most 64000000 pixels, got 20000 x 20000"):
        decode(bytes(encoded), 256, Limits())


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP"])
def test_damaged_bytes_never_escape_as_another_error(encode, gradient, image_format):
    """Whatever bytes are damaged, the file is either decoded or refused as an invalid image."""
    good = encode(gradient(24, 24), image_format)
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(good)
        for place in random.integers(0, len(good), 3):
            damaged[place] = random.integers(0, 256)
        try:
            pixels = decode(bytes(damaged), 256, Limits(max_image_pixels=10**6)).pixels
        except InvalidImage:
            continue
        assert (pixels.ndim, pixels.dtype) == (3, np.uint8)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.int32], ids=lambda dtype: dtype.__name__)
def test_wide_channels_are_refused(encode, dtype):
    """16-bit and float pixels would be clipped to white or black: they are refused, not guessed."""
    with pytest.raises(InvalidImage, match="expected 8 bits per channel, got TIFF of mode"):
        decode(encode(np.ones((4, 4), dtype), "TIFF"), 256, Limits())


def test_harmless_bytes_before_the_end_are_accepted(encode, gradient):
    """Cameras write such JPEGs and every viewer shows them."""
    good = encode(gradient(16, 16), "JPEG")
    odd = good[:-2] + b"\x00\x00" + good[-2:]

    decoded, expected = (decode(encoded, 256, Limits()).pixels for encoded in (odd, good))

    np.testing.assert_array_equal(decoded, expected)


def test_too_many_bytes_are_refused():
    """The byte limit comes first of all."""
    with pytest.raises(InvalidImage, match="expected at most 10 bytes, got 11"):
        decode(b"x" * 11, 256, Limits(max_image_bytes=10))
