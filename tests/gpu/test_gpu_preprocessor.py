"""Preprocessing on a GPU: the pixels are those of the CPU path, and stay on the device."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from loadtest.gpu_check.chain import on_host
from nereid.base.assets import CHELSEA, COFFEE
from nereid.base.errors import InferenceFailed, InvalidConfig, InvalidImage
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.imaging.resample import FILTERS
from nereid.vision.imaging.transform import DATATYPES, TURNS, Transform
from tests.commands import captured
from tests.pictures import exif, levels, save
from tests.routes import WATCHDOG_S
from tests.tables import cases

pytestmark = pytest.mark.gpu

ROWS = 8
LIMITS = ImageLimits()
IMAGENET = Transform(224, 224, resize_shorter_px=256, mean=(127.0,) * 3, std=(128.0,) * 3)
LETTERBOX = Transform(96, 128, "UINT8", "NHWC", "letterbox")
PLAIN = Transform(120, 90, resize="exact")
TRANSFORMS = {
    "imagenet": IMAGENET,
    "imagenet, FP16, BGR": replace(IMAGENET, datatype="FP16", color_order="BGR"),
    "letterbox": LETTERBOX,
    "letterbox, FP32": replace(LETTERBOX, datatype="FP32", layout="NCHW", std=(255.0,) * 3),
    "exact": PLAIN,
    "exact, no antialias": replace(PLAIN, antialias=False),
    "exact, enlarged": Transform(700, 900, resize="exact"),
}
COFFEE_JPEG, CHELSEA_JPEG = COFFEE.read_bytes(), CHELSEA.read_bytes()
NOISE = np.random.default_rng(0).integers(0, 256, (333, 334, 3), np.uint8)


def encode(image_format: str = "JPEG", mode: str = "RGB", orientation: int = 1, **options) -> bytes:
    return save(Image.open(CHELSEA).convert(mode), image_format, exif=exif(orientation), **options)


@pytest.fixture
def build(cupy):
    pytest.importorskip("nvidia.nvimgcodec", reason="needs nvImageCodec, of the extra gpu or gpu13")
    from nereid.vision.imaging.gpu_preprocessor import GpuPreprocessor

    def build_one(transform: Transform = IMAGENET, limits: ImageLimits = LIMITS, **more):
        return GpuPreprocessor(transform, limits, ROWS, device_id=0, **more)

    return build_one


def mean_difference(transform: Transform, actual: np.ndarray, expected: np.ndarray) -> float:
    """Return by how many levels of 255 two rows of the tensor differ in the mean."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    return float(np.abs(levels(transform, actual) - levels(transform, expected)).mean())


# A call that never returns from the broken device leaves its stack.
BREAK_DEVICE = """
import faulthandler

import cupy

from nereid.base.assets import COFFEE
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.imaging.gpu_preprocessor import GpuPreprocessor
from nereid.vision.imaging.pipeline import Pipeline
from nereid.vision.imaging.transform import Transform

faulthandler.dump_traceback_later(30, exit=True)
pipeline = Pipeline(GpuPreprocessor(Transform(224, 224, resize="exact"), ImageLimits(), 2, device_id=0))
photo = COFFEE.read_bytes()
assert pipeline.run([[photo]]).outcomes == [slice(0, 1)]
cupy.RawKernel('extern "C" __global__ void bad(int* x) { *x = 1; }', "bad")((1,), (1,), (cupy.uint64(1),))
for _ in range(2):
    print(*pipeline.run([[photo], [b"no image"]]).outcomes, sep="\\n", flush=True)
"""


def test_broken_device_fails_every_request_as_unreachable(build):
    """After a kernel of this process wrote to an invalid address, no image can be decoded there."""
    words = [sys.executable, "-c", BREAK_DEVICE]
    done = captured(words, timeout=WATCHDOG_S)

    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr[-2000:]
    assert all(line.startswith("unavailable: device failed: CUDA") for line in lines), lines


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_rows_are_those_of_the_host(build, transform):
    """JPEGs of any kind and other files, together: each within one level of the CPU path in the mean."""
    images = [COFFEE_JPEG, encode(mode="L"), encode("PNG"), encode(progressive=True), encode(mode="CMYK")]
    images += [save(Image.fromarray(NOISE)), save(Image.fromarray(NOISE[:1, :1]))]
    preprocessor = build(transform)

    outcomes = preprocessor.prepare(images)

    assert outcomes == [None] * len(images)
    for row, encoded in zip(preprocessor.tensor.get(), images, strict=False):
        assert mean_difference(transform, row, on_host(transform, encoded)) <= 1.0


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("interpolation", FILTERS)
def test_every_variant_of_the_kernel_runs(build, interpolation, datatype, layout):
    transform = replace(PLAIN, interpolation=interpolation, datatype=datatype, layout=layout)
    encoded = encode("PNG")
    preprocessor = build(transform)

    assert preprocessor.prepare([encoded]) == [None]

    assert mean_difference(transform, preprocessor.tensor[0].get(), on_host(transform, encoded)) <= 1.0


@pytest.mark.parametrize("orientation", TURNS)
def test_decoder_leaves_turning_to_the_kernel(build, orientation):
    encoded = encode(orientation=orientation)
    preprocessor = build()

    preprocessor.prepare([encoded])

    assert mean_difference(IMAGENET, preprocessor.tensor[0].get(), on_host(IMAGENET, encoded)) <= 1.0


@cases(
    jpeg=(COFFEE_JPEG, 0),
    grey=(encode(mode="L"), 0),
    progressive=(encode(progressive=True), 0),
    png=(encode("PNG"), 1),
    cmyk=(encode(mode="CMYK"), 1),
    cut_off=(COFFEE_JPEG[:-5000], 1),
    no_image=(b"no image", 0),
)
def test_what_the_host_decodes_is_counted(encoded, fallbacks, build):
    """`fallbacks` counts files that are not for the GPU's decoder, and no others."""
    preprocessor = build()

    preprocessor.prepare([encoded, COFFEE_JPEG])

    assert preprocessor.fallbacks == fallbacks


def test_bad_image_fails_alone(build):
    """Bad images get the CPU path's errors and rows of padding; good ones give what they give alone."""
    bad = [b"", b"no image", COFFEE_JPEG[:2000], COFFEE_JPEG[:-5000]]
    preprocessor = build()
    preprocessor.prepare([CHELSEA_JPEG])
    alone = preprocessor.tensor[0].get()

    outcomes = preprocessor.prepare([*bad, CHELSEA_JPEG, encode("BMP")])

    assert [type(outcome) for outcome in outcomes] == [InvalidImage] * len(bad) + [type(None)] * 2
    for outcome, encoded in zip(outcomes, bad, strict=False):
        with pytest.raises(InvalidImage) as expected:
            on_host(IMAGENET, encoded)
        assert str(outcome) == str(expected.value)
    np.testing.assert_array_equal(preprocessor.tensor[len(bad)].get(), alone)
    np.testing.assert_allclose(levels(IMAGENET, preprocessor.tensor[0].get()), 114, atol=0.01)


def test_too_large_image_is_refused_by_its_header(build):
    (outcome,) = build(limits=ImageLimits(max_image_pixels=1000)).prepare([COFFEE_JPEG])

    assert str(outcome) == "invalid image: expected at most 1000 pixels, got 600 x 400"


def test_image_larger_than_the_staging_memory_arrives_whole(build):
    large = save(Image.open(COFFEE).resize((3000, 2500)), "BMP")
    transform = Transform(250, 300, resize="exact")
    preprocessor = build(transform)

    preprocessor.prepare([large, encode("PNG"), large])

    expected = on_host(transform, large)
    for row in (0, 2):
        assert mean_difference(transform, preprocessor.tensor[row].get(), expected) <= 1.0


def test_limit_without_room_for_the_tensor_fails_the_load(build):
    with pytest.raises(InvalidConfig, match="gpu_memory_limit_bytes = 1000: expected room for the tensor"):
        build(memory_limit_bytes=1000)


def test_limit_fails_the_image_that_needs_more(build):
    large = save(Image.new("RGB", (4000, 4000)))
    preprocessor = build(memory_limit_bytes=ROWS * 3 * 224 * 224 * 4 + 2**22)

    outcomes = preprocessor.prepare([encode("PNG"), large, COFFEE_JPEG])

    assert [type(outcome) for outcome in outcomes] == [type(None), InferenceFailed, type(None)]


def test_tensor_is_handed_over_where_it_lies(cupy, build):
    """The tensor keeps its address from batch to batch, and DLPack shares it without a copy."""
    preprocessor = build()
    address, row_bytes = preprocessor.tensor.data.ptr, preprocessor.tensor[0].nbytes

    for images in ([COFFEE_JPEG], [CHELSEA_JPEG, encode("PNG")], [COFFEE_JPEG] * ROWS):
        preprocessor.prepare(images)
        handed = cupy.from_dlpack(preprocessor.tensor[1:3])
        assert (preprocessor.tensor.data.ptr, handed.data.ptr) == (address, address + row_bytes)
    assert preprocessor.tensor.flags.c_contiguous


def test_tensor_is_whole_when_prepare_returns(cupy, build):
    """A reader on another stream, which does not wait, sees the finished rows."""
    preprocessor = build()
    preprocessor.prepare([CHELSEA_JPEG] * ROWS)
    expected = preprocessor.tensor.get()
    stream = cupy.cuda.Stream(non_blocking=True)

    for _ in range(20):
        preprocessor.tensor.fill(0)
        cupy.cuda.Device(0).synchronize()
        preprocessor.prepare([CHELSEA_JPEG] * ROWS)
        np.testing.assert_array_equal(preprocessor.tensor.get(stream=stream, blocking=True), expected)


def test_damaged_image_is_not_the_one_decoded_before(build):
    """Memory of decoded images is used again, but an image that cannot be decoded has no earlier pixels."""
    tables = COFFEE_JPEG.index(b"\xff\xc4") + 4
    damaged = COFFEE_JPEG[:tables] + b"\xff" * 20 + COFFEE_JPEG[tables + 20 :]
    preprocessor = build()

    outcomes = [preprocessor.prepare([image] * 3) for image in (COFFEE_JPEG, COFFEE_JPEG, damaged)]

    assert outcomes[:2] == [[None] * 3] * 2
    assert [type(outcome) for outcome in outcomes[2]] == [InvalidImage] * 3


def test_pixels_from_the_host_are_released(build):
    """Batches without a JPEG need no more memory than the first two."""
    preprocessor, images = build(), [encode("PNG")] * ROWS

    used = []
    for _ in range(8):
        preprocessor.prepare(images)
        used.append(preprocessor.held_bytes)

    assert len(set(used[2:])) == 1


def test_preprocessor_can_be_deleted(build):
    """Its kept images go before its stream; in the other order, the process ends with SIGSEGV."""
    for size in (8, 2, 8):
        preprocessor = build()
        preprocessor.prepare([COFFEE_JPEG] * size)
        del preprocessor
