"""Pictures of what a network sees, for every layout, colour order and datatype."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image

from nereid.base.errors import InvalidImage
from nereid.vision.imaging.decode import Limits
from nereid.vision.imaging.preprocess_settings import PreprocessSettings, Resources, Shorthand
from nereid.vision.imaging.preprocessor import preview
from nereid.vision.imaging.transform import Transform
from tests.tables import rows

SIDE = 16
PIXELS = np.random.default_rng(5).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
NORMALISED = {"mean": (127.0, 110.0, 90.0), "std": (128.0, 60.0, 50.0)}


def encoded(pixels) -> bytes:
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue()


def settings(**fields) -> PreprocessSettings:
    transform = Transform(SIDE, SIDE, resize="exact", **fields)
    return PreprocessSettings(transform, Limits(), Resources(), Shorthand())


@rows(*itertools.product(("NCHW", "NHWC"), ("RGB", "BGR"), ("FP32", "FP16", "UINT8")))
def test_the_picture_has_the_pixels_of_the_image(layout, color_order, datatype):
    """Normalisation, layout and colour order are undone; FP16 rounds by at most one level."""
    normalisation = {} if datatype == "UINT8" else NORMALISED
    made = settings(layout=layout, color_order=color_order, datatype=datatype, **normalisation)

    found = preview(made, {"a": encoded(PIXELS), "b": encoded(255 - PIXELS)})

    seen = np.asarray(Image.open(io.BytesIO(found.png)), np.int16)
    expected = np.concatenate([PIXELS, 255 - PIXELS], axis=1).astype(np.int16)
    assert np.abs(seen - expected).max() <= (datatype == "FP16")
    assert (found.lowest, found.highest) == ((0, 255) if datatype == "UINT8" else limits(color_order))


def limits(color_order: str) -> tuple:
    levels = PIXELS[:, :, :: -1 if color_order == "BGR" else 1].astype(np.float64)
    both = np.stack([levels, 255 - levels])
    values = (both - NORMALISED["mean"]) / NORMALISED["std"]
    return pytest.approx(values.min(), rel=1e-3), pytest.approx(values.max(), rel=1e-3)


def test_bad_image_is_named():
    with pytest.raises(InvalidImage, match=r"bad\.jpg: expected an image file"):
        preview(settings(), {"good.png": encoded(PIXELS), "bad.jpg": b"text"})
