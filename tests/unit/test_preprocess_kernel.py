"""The GPU's kernel without a GPU: compiled for GPUs, and run as C++ and compared with NumPy and Pillow.

Both compilations read the same source file; a shim replaces CUDA's own names (`blockIdx`, `sinpif`).
"""

import ctypes
import functools
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nereid.base.assets import CHELSEA
from nereid.vision.imaging import kernel as preprocess_kernel
from nereid.vision.imaging.decode import Buffers, ImageLimits, open_image
from nereid.vision.imaging.kernel import IMAGE, SOURCE, Source, build_channels, build_table
from nereid.vision.imaging.resample import FILTERS
from nereid.vision.imaging.transform import DATATYPES, TURNS, Transform
from tests.pictures import encode, levels, noise

pytestmark = pytest.mark.process
ARCHITECTURES = ("sm_75", "sm_80", "sm_90")
SHIM = Path(__file__).with_name("preprocess_on_host.cpp")
PLAIN = Transform(50, 70, resize="exact")
IMAGENET = Transform(64, 64, resize_shorter_px=80, mean=(127.0, 120.0, 110.0), std=(128.0, 60.0, 57.0))
LETTERBOX = Transform(64, 96, resize="letterbox", std=(255.0,) * 3)
TRANSFORMS = {
    "shrink": PLAIN,
    "enlarge": Transform(250, 333, resize="exact"),
    "shorter side": IMAGENET,
    "letterbox": LETTERBOX,
    "letterbox, enlarged": Transform(300, 211, resize="letterbox"),
    "no antialias": replace(PLAIN, antialias=False),
    "no antialias, enlarged": Transform(250, 333, resize="exact", antialias=False),
    "one pixel": Transform(1, 1, resize="exact"),
    "colours of each channel": replace(
        LETTERBOX, mean=(10.0, 20.0, 30.0), std=(50.0, 60.0, 70.0), pad_color=(1, 2, 3), color_order="BGR"
    ),
    "FP16": replace(IMAGENET, datatype="FP16"),
    "UINT8": replace(LETTERBOX, datatype="UINT8", std=(1.0,) * 3),
    "NHWC": replace(IMAGENET, layout="NHWC"),
    "NHWC, UINT8, BGR": replace(
        LETTERBOX, layout="NHWC", datatype="UINT8", color_order="BGR", std=(1.0,) * 3
    ),
}


@pytest.fixture(scope="session")
def compile_for_host(tmp_path_factory):
    """Compile the kernel of a transform with the host's C++ compiler; returns the loaded library."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++; fix: apt-get install g++")
    folder = tmp_path_factory.mktemp("kernel")

    @functools.cache
    def build(options: tuple[str, ...]) -> ctypes.CDLL:
        target = folder / f"{len(list(folder.iterdir()))}.so"
        source = f'-DSOURCE="{SOURCE}"'
        flags = ["-O2", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
        subprocess.run(["g++", *flags, source, *options, str(SHIM), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))

    return lambda transform: build(preprocess_kernel.options(transform))


@pytest.fixture
def run(compile_for_host):
    def run_kernel(transform: Transform, *images: np.ndarray | None, orientation: int = 1) -> np.ndarray:
        sources = [image if image is None else source(image, orientation) for image in images]
        table, tensor = np.empty(len(images), IMAGE), blank(transform, len(images))
        build_table(sources, transform, table)
        grid = np.array(preprocess_kernel.grid(transform, len(images)), np.int32)
        block = np.array(preprocess_kernel.BLOCK_XY, np.int32)
        arrays = grid, block, table, build_channels(transform), tensor
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        compile_for_host(transform).run(*pointers, transform.height_px, transform.width_px)
        return tensor

    return run_kernel


def source(pixels: np.ndarray, orientation: int = 1) -> Source:
    return Source(pixels.ctypes.data, pixels.strides[0], *pixels.shape[:2], orientation)


def blank(transform: Transform, count: int) -> np.ndarray:
    """Return a tensor full of values that the kernel must overwrite."""
    dtype = DATATYPES[transform.datatype]
    return np.full((count, *transform.shape), 222 if dtype == np.uint8 else np.nan, dtype)


def photo(width_px: int | None = None, height_px: int | None = None) -> np.ndarray:
    pixels = np.asarray(Image.open(CHELSEA).convert("RGB"))
    return np.ascontiguousarray(pixels[:height_px, :width_px])


def weigh(span, transform: Transform, pixels: np.ndarray) -> np.ndarray:
    """Resample the first axis of float32[source, ...] to whole levels, tap after tap: float32[count, ...]."""
    name, scale = transform.interpolation, span.source / span.resized
    widening = max(scale, 1.0) if transform.antialias else 1.0
    centres = (np.arange(span.offset, span.offset + span.count) + 0.5) * scale
    reach = FILTERS[name].support_px * widening
    firsts = np.maximum((centres - reach + 0.5).astype(int), 0)
    ends = np.minimum((centres + reach + 0.5).astype(int), span.source)
    starts = ((firsts + 0.5 - centres) / widening).astype(np.float32)
    sums, norms = np.zeros((span.count, *pixels.shape[1:]), np.float32), np.zeros(span.count, np.float32)
    for tap in range((ends - firsts).max()):
        places = np.minimum(firsts + tap, span.source - 1)
        distances = starts + np.float32(tap) * np.float32(1 / widening)
        # Where a box ends on a pixel's centre, rounding decides about it: the window's, not the filter's.
        weights = np.ones(span.count) if name == "box" else FILTERS[name].weight(distances)
        weights = np.where(firsts + tap < ends, weights, 0).astype(np.float32)
        sums += weights[:, None, None] * pixels[places]
        norms += weights
    return np.clip(np.floor(sums * (np.float32(1) / norms)[:, None, None] + np.float32(0.5)), 0, 255)


def model(transform: Transform, pixels: np.ndarray) -> np.ndarray:
    """Compute the expected output for one image in float32: 0..255 first, then normalised and laid out."""
    rows, columns = transform.place(pixels.shape[1::-1])
    across = weigh(columns.span, transform, pixels.astype(np.float32).swapaxes(0, 1)).swapaxes(0, 1)
    whole = np.empty((transform.height_px, transform.width_px, 3), np.float32)
    whole[:] = transform.pad_color if transform.color_order == "RGB" else transform.pad_color[::-1]
    whole[rows.inside, columns.inside] = weigh(rows.span, transform, across)
    if transform.color_order == "BGR":
        whole = whole[:, :, ::-1]
    normalised = (whole - np.float32(transform.mean)) / np.float32(transform.std)
    return normalised if transform.layout == "NHWC" else normalised.transpose(2, 0, 1)


def assert_same_levels(transform: Transform, actual: np.ndarray, expected: np.ndarray) -> None:
    """Nearly all pixels are equal, the rest one level off: a sum at a half may be rounded either way."""
    assert (actual.dtype, actual.shape) == (DATATYPES[transform.datatype], expected.shape)
    actual_levels, expected_levels = levels(transform, actual), levels(transform, expected)
    difference = np.abs(actual_levels - expected_levels)
    assert difference.max() <= 1.1
    # FP16 has 11 bits, of which 8 are the level's: 1/16 of a level is left.
    assert (difference > 0.1).mean() < 0.0005


@functools.cache
def compile_for_gpu(architecture: str, options: tuple[str, ...]) -> str:
    """Compile with NVRTC, which needs no GPU; returns its log."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings, of tritonclient[cuda]")
    try:
        _, program = nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"preprocess.cu", 0, [], [])
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC, of the wheel nvidia-cuda-nvrtc: {error}")
    flags = [f"--gpu-architecture={architecture}".encode(), *map(str.encode, options)]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    assert size > 0
    return log.rstrip(b"\0\n ").decode()


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernel_compiles_for_gpus(architecture, interpolation, datatype, layout):
    transform = replace(PLAIN, interpolation=interpolation, datatype=datatype, layout=layout)

    assert compile_for_gpu(architecture, preprocess_kernel.options(transform)) == ""


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_kernel_does_the_arithmetic_of_the_model(run, transform, interpolation):
    """A batch has a photo, and noise of any size."""
    transform = replace(transform, interpolation=interpolation)
    sizes = (131, 77), (157, 211), (1, 1), (40, 1), (1, 40), (2, 4096)
    images = [photo(), *(noise(*size) for size in sizes)]

    for row, pixels in zip(run(transform, *images), images, strict=True):
        assert_same_levels(transform, row, model(transform, pixels))


def test_orientation_may_be_ignored(run):
    pixels = photo(150, 97)
    transform = replace(IMAGENET, exif_orientation=False)

    np.testing.assert_array_equal(run(transform, pixels, orientation=6), run(transform, pixels))


def test_window_of_a_large_image_is_exact(run):
    """Among 16,384 pixels each window starts at the right one, although 1/3 is not an exact float."""
    transform = Transform(1, 5461, resize="exact", interpolation="box")
    pixels = noise(1, 16_384)

    (row,) = run(transform, pixels)

    assert_same_levels(transform, row, model(transform, pixels))


def test_rows_may_be_padded_in_memory(run):
    wide = noise(60, 100)

    np.testing.assert_array_equal(run(PLAIN, wide[:, :71]), run(PLAIN, np.ascontiguousarray(wide[:, :71])))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_row_without_an_image_is_padding(run, transform):
    tensor = run(transform, photo(40, 30), None)

    expected = np.broadcast_to(np.float64(transform.pad_color), (transform.height_px, transform.width_px, 3))
    np.testing.assert_allclose(levels(transform, tensor[1]), expected, atol=0.1)
    assert not np.isnan(tensor.astype(np.float32)).any()


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_kernel_agrees_with_the_cpu_path(run, name, orientation):
    transform, pixels = TRANSFORMS[name], photo(150, 97)
    image = replace(open_image(encode(pixels), ImageLimits()), orientation=orientation)
    expected = blank(transform, 1)[0]

    transform(image, expected, Buffers())

    (row,) = run(transform, pixels, orientation=orientation)
    assert np.abs(levels(transform, row) - levels(transform, expected)).mean() <= 1.0
