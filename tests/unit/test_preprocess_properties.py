"""An image of one colour keeps it, in every format, size and orientation, and through every transform."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from nereid.imaging.buffers import Buffers
from nereid.imaging.decode import Limits, open_image
from nereid.imaging.transform import CHOICES, DATATYPES, Transform
from tests.pictures import save

# Every mode of 8 bits that Pillow writes in the format.
MODES = {
    "PNG": ("L", "LA", "P", "RGB", "RGBA"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("L", "P", "RGB"),
    "GIF": ("L", "P"),
    "TIFF": ("L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"),
}
FILES = [(image_format, mode) for image_format, modes in MODES.items() for mode in modes]
WITH_EXIF = ("PNG", "JPEG", "WEBP", "TIFF")
# Most sides are small, for many examples; the longest are those of a panorama.
SIDES = st.one_of(st.integers(1, 20), st.integers(1, 300))
SIZES = st.one_of(
    st.tuples(SIDES, SIDES),
    st.tuples(st.integers(1_000, 8_000), st.integers(1, 50)),
    st.tuples(st.integers(1, 50), st.integers(1_000, 8_000)),
)


@st.composite
def transforms(draw):
    """Draw a transform without normalisation."""
    height, width = draw(st.integers(1, 96)), draw(st.integers(1, 96))
    choices = {name: draw(st.sampled_from(known)) for name, known in CHOICES.items()}
    shorter = max(height, width) + draw(st.integers(0, 64)) if choices["resize"] == "shorter_side" else 0
    switches = {"antialias": draw(st.booleans()), "exif_orientation": draw(st.booleans())}
    return Transform(height, width, resize_shorter_px=shorter, **switches, **choices)


def encode(image, image_format, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    options = {"exif": exif} if image_format in WITH_EXIF else {}
    lossless = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}
    return save(image, image_format, **options, **lossless.get(image_format, {}))


def apply(transform, encoded):
    """Return the network's input, height by width by channels, R first for every transform."""
    out = np.full(transform.shape, 99, DATATYPES[transform.datatype])
    transform(open_image(encoded, Limits()), out, Buffers())
    assert (out.shape, out.dtype) == (transform.shape, DATATYPES[transform.datatype])
    pixels = out if transform.layout == "NHWC" else out.transpose(1, 2, 0)
    return pixels[:, :, ::-1] if transform.color_order == "BGR" else pixels


@settings(max_examples=120, derandomize=True)
@given(st.sampled_from(FILES), SIZES, st.integers(1, 8), transforms(), st.integers(0, 255))
def test_constant_image_stays_constant(kind, size_wh, orientation, transform, level):
    image_format, mode = kind
    image = Image.new("RGB", size_wh, (level,) * 3).convert(mode, dither=Image.Dither.NONE)
    colour = image.crop((0, 0, 1, 1)).convert("RGB").getpixel((0, 0))
    pad = colour if transform.color_order == "RGB" else colour[::-1]

    pixels = apply(replace(transform, pad_color=pad), encode(image, image_format, orientation))

    # JPEG's own rounding moves a whole block by one level, of ink and of black.
    tolerance = 2 if image_format == "JPEG" else 0
    np.testing.assert_allclose(pixels.astype(float), np.broadcast_to(colour, pixels.shape), atol=tolerance)
