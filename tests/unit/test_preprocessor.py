"""Parameters of a `preprocess` model, batches of the CPU preprocessor, and what a network sees."""

import io
import itertools
import os
import re
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from PIL import Image

from nereid.base.assets import CHELSEA, COFFEE
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InferenceFailed, InvalidConfig, InvalidImage
from nereid.server.command_line import KEEP_BUFFERS
from nereid.vision.imaging.decode import ImageLimits, open_image
from nereid.vision.imaging.preprocess_settings import PRESETS, PreprocessSettings
from nereid.vision.imaging.preprocessor import CpuPreprocessor, preview
from nereid.vision.imaging.transform import Transform
from tests.commands import captured
from tests.conftest import ROOT
from tests.pictures import encode
from tests.tables import cases, rows

IMAGENET = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}
BGR = {name: values[::-1] for name, values in IMAGENET.items()}
CLIP = {"mean": (122.7709383, 116.7460125, 104.09373615), "std": (68.5005327, 66.6321579, 70.32316305)}
DIMS = (3, 224, 224)
SQUARE = partial(Transform, 224, 224)
CENTER = partial(SQUARE, resize_shorter_px=256)
PRESET = {"preset": "imagenet"}
OUTPUT = {"name": "input", "data_type": "TYPE_FP32", "dims": DIMS}


def config(folder, parameters, *outputs):
    document = {
        "name": "m",
        "max_batch_size": 8,
        "input": [{"name": "image", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": outputs,
        "parameters": {name: {"string_value": text} for name, text in parameters.items()},
    }
    return ModelConfig.from_document(document, folder, 1)


def settings(folder, parameters, **output):
    return PreprocessSettings.from_config(config(folder, parameters, OUTPUT | output))


@rows(
    (PRESET, CENTER(**IMAGENET)),
    ({"preset": "efficientnet_lite"}, CENTER(mean=(127.0,) * 3, std=(128.0,) * 3)),
    ({"preset": "clip"}, SQUARE(resize_shorter_px=224, interpolation="bicubic", **CLIP)),
    ({"preset": "letterbox"}, SQUARE(resize="letterbox", std=(255.0,) * 3)),
    ({"preset": "yolo"}, SQUARE(resize="letterbox", std=(255.0,) * 3)),
    ({"preset": "yolox"}, SQUARE(resize="letterbox", pad_position="after", color_order="BGR")),
    ({"preset": "detr"}, SQUARE(resize="exact", **IMAGENET)),
    ({"preset": "rtdetr"}, SQUARE(resize="exact", std=(255.0,) * 3)),
    ({"resize": "exact"}, SQUARE(resize="exact")),
    ids=[*PRESETS, "none"],
)
def test_preset_stands_for_its_numbers(parameters, expected, tmp_path):
    preset = parameters.get("preset", "")
    scale = float(PRESETS.get(preset, {}).get("scale", 0))

    assert settings(tmp_path, parameters) == PreprocessSettings(
        expected, ImageLimits(), preset=preset, scale=scale
    )


@cases(
    another_size=(PRESET | {"resize_shorter_px": "300"}, SQUARE(resize_shorter_px=300, **IMAGENET)),
    mean_alone=(PRESET | {"mean": "1, 2, 3"}, CENTER(mean=(1.0, 2.0, 3.0), std=IMAGENET["std"])),
    scale=(PRESET | {"scale": "0.5"}, CENTER(std=(2.0,) * 3)),
    mean_and_std_for_scale=(
        {"preset": "letterbox", "mean": "1, 2, 3", "std": "4, 5, 6"},
        SQUARE(resize="letterbox", mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0)),
    ),
    the_other_colour_order=(PRESET | {"color_order": "BGR"}, CENTER(color_order="BGR", **BGR)),
)
def test_given_parameter_replaces_the_presets(parameters, expected, tmp_path):
    assert settings(tmp_path, parameters).transform == expected


def test_every_parameter_is_read(tmp_path):
    resize = {"resize": "letterbox", "interpolation": "lanczos", "antialias": "false", "pad_color": "7, 8, 9"}
    levels = {"mean": "1, 2, 3", "std": "4, 5, 6.5", "background_color": "10, 11, 12"}
    order = {"layout": "NHWC", "color_order": "BGR", "exif_orientation": "off"}
    limits = {"max_image_bytes": "13", "max_image_pixels": "14", "max_image_side_px": "15"}
    resources = {"decode_threads": "16", "gpu_memory_limit_bytes": "17"}

    parameters = resize | levels | order | limits | resources
    read = settings(tmp_path, parameters, data_type="TYPE_FP16", dims=(320, 640, 3))

    transform = Transform(
        *(320, 640, "FP16", "NHWC", "letterbox"),
        interpolation="lanczos",
        antialias=False,
        color_order="BGR",
        mean=(1.0, 2.0, 3.0),
        std=(4.0, 5.0, 6.5),
        pad_color=(7, 8, 9),
        background_color=(10, 11, 12),
        exif_orientation=False,
    )
    assert read == PreprocessSettings(transform, ImageLimits(13, 14, 15), 16, 17)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_for_uint8_is_not_normalised(tmp_path, preset):
    transform = settings(tmp_path, {"preset": preset}, data_type="TYPE_UINT8").transform

    assert (transform.datatype, transform.mean, transform.std) == ("UINT8", (0.0,) * 3, (1.0,) * 3)


EXACT = {"resize": "exact"}
SHORTER = {"resize_shorter_px": "256"}
MEAN, STD, PAD = {"mean": "1, 2, 3"}, {"std": "1, 2, 3"}, {"pad_color": "0, 0, 0"}
# Transform and ImageLimits check their own fields: test_transform.py and test_decode.py. One of each is here.
MISTAKES = [
    (EXACT | {"sise": "1"}, "unknown parameter 'sise': expected one of antialias, "),
    (EXACT | {"height_px": "9"}, "unknown parameter 'height_px': expected one of antialias, "),
    ({"preset": "resnet"}, "preset: expected one of imagenet, efficientnet_lite, clip, "),
    (EXACT | {"layout": "CHW"}, "layout: expected one of NCHW, NHWC, got 'CHW'"),
    (EXACT | {"antialias": "maybe"}, "parameter 'antialias': expected bool, got 'maybe'"),
    ({"resize_shorter_px": "big"}, "'resize_shorter_px': expected int, got 'big'"),
    (SHORTER | {"mean": "1, x"}, "'mean': expected floats separated by commas, got '1, x'"),
    (SHORTER | MEAN | {"scale": "0.5"}, "scale contradicts mean"),
    (SHORTER | STD | {"scale": "0.5"}, "scale contradicts std"),
    *(
        (SHORTER | {"scale": scale}, f"scale: expected a positive number, got '{scale}'")
        for scale in ("0", "-1", "inf", "x", "1e-320")
    ),
    (EXACT | PAD, "pad_color contradicts resize = exact: expected letterbox"),
    ({"preset": "letterbox", "pad_color": "0, 256, 0"}, "pad_color: expected 0..255"),
    ({"preset": "letterbox"} | SHORTER, "= 256 contradicts resize = letterbox"),
    (EXACT | {"antialias": "false", "decode_margin": "2"}, "contradicts antialias = false"),
    (EXACT | {"mean": "1e39, 0, 0"}, "expected pixels within FP32"),
    (EXACT | {"max_image_bytes": "-1"}, "max_image_bytes: expected a positive number, got -1"),
    (EXACT | {"decode_threads": "-1"}, "decode_threads: expected 0 or more, got -1"),
    (EXACT | {"gpu_memory_limit_bytes": "-1"}, "limit_bytes: expected 0 or more, got -1"),
]
UINT8, FP16 = {"data_type": "TYPE_UINT8"}, {"data_type": "TYPE_FP16"}


@rows(
    *((parameters, {}, message) for parameters, message in MISTAKES),
    (EXACT | MEAN, UINT8, "mean contradicts an output of TYPE_UINT8, whose pixels are not normalised"),
    (EXACT | {"scale": "2"}, UINT8, "scale contradicts an output of"),
    (EXACT | {"scale": "1000"}, FP16, "expected pixels within FP16"),
    (PRESET, {"dims": (3, 299, 299)}, "at least the output's 299 x 299, got 256"),
    (EXACT, {"dims": (224, 224, 3)}, "dims [3, H, W] for layout NCHW, got [224, 224, 3]"),
    (EXACT | {"layout": "NHWC"}, {}, "dims [H, W, 3] for layout NHWC, got [3, 224, 224]"),
    (EXACT, {"dims": (3, -1, -1)}, "dims [3, H, W] for layout NCHW, got [3, -1, -1]"),
    (EXACT, {"dims": (1, 224, 224)}, "dims [3, H, W] for layout NCHW, got [1, 224, 224]"),
    (EXACT, {"dims": ()}, "output 'input': expected dims [3, H, W] for layout NCHW, got []"),
    (EXACT, {"data_type": "TYPE_INT32"}, "one of TYPE_FP32, TYPE_FP16, TYPE_UINT8, got TYPE_INT32"),
    ids=str,
)
def test_mistake_fails_the_load(parameters, output, message, tmp_path):
    with pytest.raises(InvalidConfig, match=f"^model 'm'.*{re.escape(message)}"):
        settings(tmp_path, parameters, **output)


@pytest.mark.parametrize("count", [0, 2])
def test_there_is_one_output(tmp_path, count):
    with pytest.raises(InvalidConfig, match=f"^model 'm': expected one output, got {count}$"):
        PreprocessSettings.from_config(config(tmp_path, EXACT, *[OUTPUT] * count))


NCHW = CENTER(mean=(127.0,) * 3, std=(128.0,) * 3)
NHWC = Transform(160, 96, "UINT8", "NHWC", resize="letterbox")
A, B, BAD = COFFEE.read_bytes(), CHELSEA.read_bytes(), b"not an image"


@pytest.mark.parametrize("threads", [1, 4])
def test_image_i_is_in_row_i(threads):
    preprocessor = CpuPreprocessor(NCHW, ImageLimits(), 4, threads)
    alone = []
    for image in (A, B):
        preprocessor.prepare([image])
        alone.append(preprocessor.tensor[0].copy())

    errors = preprocessor.prepare([B, BAD, A, b""])

    assert [type(error) for error in errors] == [type(None), InvalidImage, type(None), InvalidImage]
    np.testing.assert_array_equal(preprocessor.tensor[[2, 0]], alone)


class Fragile:
    shape, datatype = (1,), "FP32"

    def __call__(self, image, out, buffers, decoded):
        if image.encoded == B:
            raise ZeroDivisionError("nothing to divide")


@pytest.mark.parametrize("threads", [1, 2])
def test_unexpected_error_is_that_of_one_image(threads):
    first, second = CpuPreprocessor(Fragile(), ImageLimits(), 2, threads).prepare([A, B])

    assert first is None
    assert isinstance(second, InferenceFailed)
    assert str(second) == "inference failed: ZeroDivisionError: nothing to divide"


class Counting:
    shape, datatype = (1,), "FP32"

    def __init__(self):
        self.now = self.most = 0
        self.lock = threading.Lock()

    def __call__(self, image, out, buffers, decoded):
        """Take long enough for other threads to begin."""
        with self.lock:
            self.now += image.pixel_count
            self.most = max(self.most, self.now)
        time.sleep(0.02)
        with self.lock:
            self.now -= image.pixel_count


def test_pixels_in_work_are_bounded():
    """Images that are decoded at the same time have at most twice the pixels of the largest valid image."""
    pixels = open_image(A, ImageLimits()).pixel_count
    counts = []
    for limit in (pixels, 2 * pixels, 100 * pixels):
        transform = Counting()
        preprocessor = CpuPreprocessor(transform, ImageLimits(max_image_pixels=limit), 16, 8)
        assert preprocessor.prepare([A] * 16) == [None] * 16
        counts.append(transform.most // pixels)

    assert counts[0] <= 2
    assert counts[1] <= 4
    assert counts[2] > 4


# Prints by how many MiB a process has grown after a picture of 25 million pixels.
GROWTH = """
import sys
from pathlib import Path
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.imaging.preprocessor import CpuPreprocessor
from tests.unit.test_preprocessor import NCHW

def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

preprocessor = CpuPreprocessor(NCHW, ImageLimits(), 1)
preprocessor.prepare([Path(sys.argv[1]).read_bytes()])
before = pages()
assert preprocessor.prepare([Path(sys.argv[2]).read_bytes()]) == [None]
print((pages() - before) * 4096 >> 20)
"""


@pytest.mark.process
def test_memory_of_a_large_image_is_returned(tmp_path):
    """With the server's settings of the C library, which would keep up to 256 MiB per process."""
    for name, side in (("small", 100), ("large", 5000)):
        Image.new("RGBA", (side, side)).save(tmp_path / f"{name}.png")
    words = [sys.executable, "-c", GROWTH, str(tmp_path / "small.png"), str(tmp_path / "large.png")]

    grown = captured(words, env=os.environ | KEEP_BUFFERS, cwd=ROOT, check=True)

    assert int(grown.stdout) < 64


SIDE = 16
PIXELS = np.random.default_rng(5).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
LEVELS = {"mean": (127.0, 110.0, 90.0), "std": (128.0, 60.0, 50.0)}


def shown_settings(**fields) -> PreprocessSettings:
    transform = Transform(SIDE, SIDE, resize="exact", **fields)
    return PreprocessSettings(transform, ImageLimits())


@rows(*itertools.product(("NCHW", "NHWC"), ("RGB", "BGR"), ("FP32", "FP16", "UINT8")))
def test_the_picture_has_the_pixels_of_the_image(layout, color_order, datatype):
    """Normalisation, layout and colour order are undone; FP16 rounds by at most one level."""
    normalisation = {} if datatype == "UINT8" else LEVELS
    made = shown_settings(layout=layout, color_order=color_order, datatype=datatype, **normalisation)

    picture = preview(made, {"a": encode(PIXELS), "b": encode(255 - PIXELS)})

    seen = np.asarray(Image.open(io.BytesIO(picture.png)), np.int16)
    expected = np.concatenate([PIXELS, 255 - PIXELS], axis=1).astype(np.int16)
    assert np.abs(seen - expected).max() <= (datatype == "FP16")
    channels = expected if color_order == "RGB" else expected[:, :, ::-1]
    values = channels if datatype == "UINT8" else (channels - LEVELS["mean"]) / LEVELS["std"]
    assert (picture.lowest, picture.highest) == pytest.approx((values.min(), values.max()), rel=1e-3)


def test_bad_image_is_named():
    with pytest.raises(InvalidImage, match=r"bad\.jpg: expected an image file"):
        preview(shown_settings(), {"good.png": encode(PIXELS), "bad.jpg": b"text"})
