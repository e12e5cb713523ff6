"""Signals of images, against the formulas on all of the sampled pixels in float64."""

import numpy as np
import pytest
from PIL import Image

from nereid.base.assets import CHELSEA
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.imaging.image_signals import SAMPLES, ImageMeter
from nereid.vision.imaging.image_times import ProbeImage
from nereid.vision.imaging.preprocessor import CpuPreprocessor
from nereid.vision.imaging.transform import DATATYPES, Transform
from tests.pictures import exif, noise, save
from tests.tables import cases

NORMALISED = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}
TRANSFORMS = {
    "nchw": Transform(224, 224, resize_shorter_px=256, **NORMALISED),
    "nhwc": Transform(224, 224, layout="NHWC", resize_shorter_px=256, **NORMALISED),
    "bgr": Transform(224, 224, color_order="BGR", resize_shorter_px=256, mean=(103.5, 116.3, 123.7)),
    "fp16": Transform(224, 224, datatype="FP16", resize_shorter_px=256, **NORMALISED),
    "uint8": Transform(160, 96, datatype="UINT8", layout="NHWC", resize="exact"),
    "letterbox": Transform(96, 320, resize="letterbox", std=(255.0,) * 3),
    "tiny": Transform(8, 5, resize="exact"),
}
# FP16 has 11 bits, of numbers up to 2.6 in units of 0.23 of the full range.
TOLERANCE = {"fp16": 1e-3}


def expected(pixels: np.ndarray) -> dict[str, float]:
    height, width = pixels.shape[:2]
    whole = pixels / 255.0
    luma = 0.299 * whole[..., 0] + 0.587 * whole[..., 1] + 0.114 * whole[..., 2]
    rows, columns = range(0, height, max(1, height // SAMPLES)), range(0, width - 1, max(1, width // SAMPLES))
    positions = [(y, x) for y in rows for x in columns]
    here = np.array([luma[position] for position in positions])
    differences = [abs(luma[y, x + 1] - luma[y, x]) for y, x in positions]
    red, blue = (np.mean([whole[(*position, color)] for position in positions]) for color in (0, 2))
    light = {"brightness": here.mean(), "contrast": here.std(), "sharpness": np.mean(differences)}
    return light | {"warmth": red / (red + blue)}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_signals_are_those_of_the_pixels(name):
    transform = TRANSFORMS[name]
    pixels = noise(transform.height_px, transform.width_px)
    ordered = pixels if transform.color_order == "RGB" else pixels[..., ::-1]
    values = (ordered.astype(np.float64) - transform.mean) / transform.std
    values = values if transform.layout == "NHWC" else values.transpose(2, 0, 1)

    signals = ImageMeter(transform, print).pixel_signals(values.astype(DATATYPES[transform.datatype]))

    assert signals == pytest.approx(expected(pixels), abs=TOLERANCE.get(name, 1e-5))


@cases(stored=(1, 2.0), turned_by_its_EXIF_tag=(6, 0.5))
def test_size_is_that_of_the_upright_image(orientation, aspect):
    encoded = save(Image.fromarray(noise(300, 600)), "JPEG", exif=exif(orientation))
    received: list = []

    CpuPreprocessor(TRANSFORMS["nchw"], ImageLimits(), 1, sink=received.append).prepare([encoded])

    (signals,) = received
    assert (signals["aspect"], signals["megapixels"]) == (aspect, 0.18)
    assert set(signals) == {"brightness", "contrast", "sharpness", "warmth", "aspect", "megapixels"}


def test_probes_and_bad_images_do_not_count():
    received: list = []
    preprocessor = CpuPreprocessor(TRANSFORMS["nchw"], ImageLimits(), 4, 2, received.append)
    photo = CHELSEA.read_bytes()

    errors = preprocessor.prepare([ProbeImage(photo), photo, b"no image"])

    assert [error is None for error in errors] == [True, True, False]
    assert len(received) == 1


def test_failure_harms_no_image():
    def fail(signals: object) -> None:
        raise RuntimeError("planted")

    preprocessor = CpuPreprocessor(TRANSFORMS["nchw"], ImageLimits(), 1, sink=fail)

    assert preprocessor.prepare([CHELSEA.read_bytes()]) == [None]
    plain = CpuPreprocessor(TRANSFORMS["nchw"], ImageLimits(), 1)
    plain.prepare([CHELSEA.read_bytes()])
    np.testing.assert_array_equal(plain.tensor, preprocessor.tensor)
