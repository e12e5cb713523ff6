"""Batches of the CPU preprocessor: rows in order, equal results with threads, no memory per batch."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from nereid.base.assets import CHELSEA, COFFEE
from nereid.base.serving_errors import InferenceFailed, InvalidImage
from nereid.server.command_line import KEEP_BUFFERS
from nereid.vision.imaging.decode import Limits, open_image
from nereid.vision.imaging.preprocessor import CpuPreprocessor
from nereid.vision.imaging.transform import Transform
from tests.conftest import ROOT

NCHW = Transform(224, 224, resize_shorter_px=256, mean=(127.0,) * 3, std=(128.0,) * 3)
NHWC = Transform(160, 96, "UINT8", "NHWC", resize="letterbox")
A, B, BAD = COFFEE.read_bytes(), CHELSEA.read_bytes(), b"not an image"


@pytest.mark.parametrize("threads", [1, 4])
def test_image_i_is_in_row_i(threads):
    preprocessor = CpuPreprocessor(NCHW, Limits(), 4, threads)
    alone = []
    for image in (A, B):
        preprocessor.prepare([image])
        alone.append(preprocessor.tensor[0].copy())

    errors = preprocessor.prepare([B, BAD, A, b""])

    assert [type(error) for error in errors] == [type(None), InvalidImage, type(None), InvalidImage]
    np.testing.assert_array_equal(preprocessor.tensor[[2, 0]], alone)


class Meeting:
    """Transform in which each image waits for another one."""

    shape, datatype = (1,), "FP32"

    def __init__(self) -> None:
        self.both = threading.Barrier(2, timeout=60)

    def __call__(self, image, out, buffers, decoded):
        self.both.wait()


def test_threads_work_side_by_side():
    assert CpuPreprocessor(Meeting(), Limits(), 2, threads=2).prepare([A, B]) == [None, None]


class Fragile:
    shape, datatype = (1,), "FP32"

    def __call__(self, image, out, buffers, decoded):
        if image.encoded == B:
            raise ZeroDivisionError("nothing to divide")


@pytest.mark.parametrize("threads", [1, 2])
def test_unexpected_error_is_that_of_one_image(threads):
    first, second = CpuPreprocessor(Fragile(), Limits(), 2, threads).prepare([A, B])

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
    pixels = open_image(A, Limits()).pixel_count
    counts = []
    for limit in (pixels, 2 * pixels, 100 * pixels):
        transform = Counting()
        preprocessor = CpuPreprocessor(transform, Limits(max_image_pixels=limit), 16, 8)
        assert preprocessor.prepare([A] * 16) == [None] * 16
        counts.append(transform.most // pixels)

    assert counts[0] <= 2
    assert counts[1] <= 4
    assert counts[2] > 4


# Prints by how many MiB a process has grown after a picture of 25 million pixels.
GROWTH = """
import sys
from pathlib import Path
from nereid.vision.imaging.decode import Limits
from nereid.vision.imaging.preprocessor import CpuPreprocessor
from tests.unit.test_preprocessor import NCHW

def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

preprocessor = CpuPreprocessor(NCHW, Limits(), 1)
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
    environment = os.environ | KEEP_BUFFERS

    grown = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)

    assert int(grown.stdout) < 64
