"""Images of every form, compared with the pixels that the server's decoder returns."""

import io

import numpy as np
import pytest
from PIL import Image

from nereid.base.assets import COFFEE
from nereid.base.contract import MAX_IMAGE_BYTES
from nereid.client import images
from nereid.client.images import encode
from nereid.vision.imaging.decode import Buffers, ImageLimits, open_image
from tests.conftest import UPRIGHT
from tests.pictures import exif, save
from tests.tables import cases

WHITE = (255, 255, 255)


def decoded(file: bytes) -> np.ndarray:
    image = open_image(file, ImageLimits())
    return UPRIGHT[image.orientation](image.pixels(1, WHITE, Buffers()))


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def of_mode(mode: str) -> Image.Image:
    name, _, is_transparent = mode.partition(" ")
    if name == "I;16":
        image = Image.fromarray(np.random.default_rng(0).integers(0, 2**16, (7, 13), dtype=np.uint16))
    elif name in ("La", "RGBa"):
        image = Image.fromarray(noise(7, 13, len(name)), name.upper()).convert(name)
    elif name in ("LA", "RGBA", "CMYK", "RGBX"):
        image = Image.frombytes(name, (13, 7), noise(7, 13, len(name)).tobytes())
    else:
        image = Image.fromarray(noise(7, 13, 3)).convert(name)
    if is_transparent:
        image.info["transparency"] = image.getpixel((1, 1))
    return image


MODES = ["1", "L", "P", "RGB", "LA", "RGBA", "CMYK", "I;16", "YCbCr", "HSV"]
MODES += [*("P transparent", "RGB transparent", "I;16 transparent"), "La", "RGBa", "RGBX"]


def expected(image: Image.Image) -> np.ndarray:
    if image.mode == "I;16":
        grey = (np.asarray(image).astype(np.float64) * 255 / 65535).round().astype(np.uint8)
        grey[np.asarray(image) == image.info.get("transparency", -1)] = WHITE[0]
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        over = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        white = Image.new("RGBA", image.size, (*WHITE, 255))
        return np.asarray(Image.alpha_composite(white, over).convert("RGB"))
    return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [MAX_IMAGE_BYTES, 0], ids=["small", "large"])
def test_pixels_arrive_as_they_are(monkeypatch, mode, limit):
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", limit)
    image = of_mode(mode)

    np.testing.assert_array_equal(decoded(encode(image)), expected(image))


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (5, 7, 3), (1, 9, 3)], ids=str)
@pytest.mark.parametrize("order", ["C", "F", "view"])
def test_arrays_arrive_as_they_are(shape, order):
    pixels = noise(*shape)
    array = pixels[::-1, ::-1] if order == "view" else np.asarray(pixels, order=order)

    grey_or_rgb = array if array.ndim == 3 else np.repeat(array[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(decoded(encode(array)), grey_or_rgb)


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_orientation_is_applied_once(mode, orientation):
    stored = Image.fromarray(noise(4, 6, 3)).convert(mode)

    with Image.open(io.BytesIO(save(stored, exif=exif(orientation)))) as photo:
        got = decoded(encode(photo))

    np.testing.assert_array_equal(got, UPRIGHT[orientation](np.asarray(stored.convert("RGB"))))


def test_large_pictures_keep_the_servers_limit():
    flat = np.zeros((4000, 4000, 3), np.uint8)

    assert len(encode(flat)) < MAX_IMAGE_BYTES < flat.nbytes


def test_damaged_picture_is_the_callers_fault():
    """PIL decodes lazily, and raises SyntaxError for a damaged file."""
    content = bytearray(save(Image.fromarray(noise(400, 400, 3))))
    second = content.index(b"IDAT", content.index(b"IDAT") + 4)
    content[second : second + 4] = b"\0\0\0\0"

    with pytest.raises(ValueError, match="a PIL image cannot be read: SyntaxError"):
        encode(Image.open(io.BytesIO(content)))


def test_files_stay_as_they_are():
    file = COFFEE.read_bytes()
    forms = [file, bytearray(file), memoryview(file), COFFEE, str(COFFEE), io.BytesIO(file)]

    assert {encode(form) for form in forms} == {file}


@cases(
    number=(5, TypeError, "an image must be bytes, a path, .* got int"),
    text_file=(io.StringIO("x"), TypeError, "opened for reading bytes, this one reads str"),
    floats=(np.zeros((2, 2, 3), np.float32), ValueError, r"got float32\[2, 2, 3\]"),
    empty=(np.zeros((0, 2, 3), np.uint8), ValueError, "not empty"),
    mode=(Image.new("F", (2, 2)), ValueError, "must have one of the modes .* got F"),
    missing=("no/such/file.jpg", FileNotFoundError, "no/such/file.jpg"),
)
def test_invalid_image_is_named(image, error, message):
    with pytest.raises(error, match=message):
        encode(image)
