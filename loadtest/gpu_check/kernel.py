"""Rows of the CuPy kernel against the CPU path (NumPy) and Pillow."""

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from loadtest.gpu_check import chain, gpu_tests
from loadtest.gpu_check.sections import CODEC, TESTS, Context, Findings
from nereid.assets import CHELSEA, COFFEE
from nereid.imaging import kernel
from nereid.imaging.buffers import Buffers
from nereid.imaging.decode import Limits, open_image
from nereid.imaging.transform import DATATYPES, Transform

TEST_FILE = "test_gpu_preprocessor.py"
# Most of the tests' time is spent in the compiler of the kernel.
PROCESSES = 12
EXACT = Transform(150, 200, "UINT8", "NHWC", "exact")
NOISE_PX = 333


def transforms() -> dict[str, Transform]:
    """Return the compared transforms."""
    imagenet = chain.transform()
    return {
        "imagenet": imagenet,
        "imagenet, FP16, BGR": replace(imagenet, datatype="FP16", color_order="BGR"),
        "letterbox, UINT8": Transform(96, 128, "UINT8", "NHWC", "letterbox"),
        "exact, bicubic": Transform(120, 90, resize="exact", interpolation="bicubic"),
        "exact, no antialias": Transform(120, 90, resize="exact", antialias=False),
        "exact, enlarged": Transform(700, 900, resize="exact"),
    }


def pictures() -> dict[str, bytes]:
    """Return the compared pictures, as PNG: decoders of PNG agree in every pixel."""
    noise = np.random.default_rng(0).integers(0, 256, (NOISE_PX, NOISE_PX + 1, 3), np.uint8)
    return {
        "coffee": _png(Image.open(COFFEE)),
        "cat, turned": _png(Image.open(CHELSEA), orientation=6),
        "noise": _png(Image.fromarray(noise)),
        "one pixel": _png(Image.new("RGB", (1, 1), (10, 200, 30))),
    }


def measure(context: Context) -> Iterator[Findings]:
    """Yield the differences in levels of 255, and the outcomes of the tests."""
    yield {"against_cpu_path": _worst(compare(pictures(), transforms()))}
    yield {"against_pillow": _worst(compare_with_pillow(pictures()))}
    if CODEC.is_installed and TESTS.is_installed:
        yield {f"tests of {TEST_FILE}": gpu_tests.run([TEST_FILE], context.left_s(), PROCESSES)}


def rehearse(context: Context) -> Iterator[Findings]:
    """Yield the differences between the CPU path and Pillow, which the GPU's rows are compared with."""
    rows = {
        name: chain.difference(EXACT, chain.on_host(EXACT, encoded), pillow_row(encoded))
        for name, encoded in pictures().items()
    }
    yield {"cpu_path_against_pillow": _worst(rows)}
    yield {
        "transforms": {
            name: list(chain.on_host(each, pictures()["noise"]).shape) for name, each in transforms().items()
        }
    }


def compare(images: dict[str, bytes], wanted: dict[str, Transform]) -> dict[str, dict[str, float]]:
    """Return the difference between the kernel and the CPU path, by transform and picture."""
    found = {}
    for name, each in wanted.items():
        rows = kernel_rows(each, list(images.values()))
        for (picture, encoded), row in zip(images.items(), rows, strict=True):
            found[f"{name}: {picture}"] = chain.difference(each, row, chain.on_host(each, encoded))
    return found


def compare_with_pillow(images: dict[str, bytes]) -> dict[str, dict[str, float]]:
    """Return the difference between the kernel and Pillow's antialiased resize, by picture."""
    rows = kernel_rows(EXACT, list(images.values()))
    return {
        name: chain.difference(EXACT, row, pillow_row(encoded))
        for (name, encoded), row in zip(images.items(), rows, strict=True)
    }


def pillow_row(encoded: bytes) -> np.ndarray:
    """Return Pillow's row for `EXACT`: uint8[H, W, 3]."""
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")
    size_wh = EXACT.width_px, EXACT.height_px
    return np.asarray(upright.resize(size_wh, Image.Resampling.BILINEAR))


def kernel_rows(wanted: Transform, images: list[bytes]) -> np.ndarray:
    """Run the kernel on images that were decoded on the host; returns its rows, on the host."""
    import cupy

    opened = [open_image(encoded, Limits()) for encoded in images]
    pixels = [cupy.asarray(each.pixels(1, wanted.background_color, Buffers())) for each in opened]
    sources = [_source(image, array) for image, array in zip(opened, pixels, strict=True)]
    table = np.empty(len(sources), kernel.IMAGE)
    kernel.build_table(sources, wanted, table)
    tensor = cupy.empty((len(images), *wanted.shape), DATATYPES[wanted.datatype])
    compiled = cupy.RawKernel(kernel.SOURCE.read_text(), "preprocess", kernel.options(wanted))
    size = np.int32(wanted.height_px), np.int32(wanted.width_px)
    arguments = cupy.asarray(table.view(np.uint8)), kernel.build_channels(wanted), tensor, *size
    compiled(kernel.grid(wanted, len(images)), (*kernel.BLOCK_XY, 1), arguments)
    rows: np.ndarray = tensor.get()
    return rows


def _source(image: Any, pixels: Any) -> kernel.Source:
    height, width, _ = pixels.shape
    return kernel.Source(pixels.data.ptr, width * 3, height, width, image.orientation)


def _worst(found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Add the largest mean difference to the differences."""
    return {"worst_mean": max(each["mean"] for each in found.values()), "levels": found}


def _png(image: Image.Image, orientation: int = 1) -> bytes:
    target, exif = io.BytesIO(), Image.Exif()
    exif[0x112] = orientation
    image.convert("RGB").save(target, "PNG", exif=exif)
    return target.getvalue()
