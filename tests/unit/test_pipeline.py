"""Batches of encoded images: one outcome per request, rows in order, one reused tensor."""

import gc
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from nereid.base.assets import CHELSEA, COFFEE
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import DeadlineExceeded, DeviceFailed, InferenceFailed, InvalidConfig, InvalidImage
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.imaging.pipeline import Pipeline
from nereid.vision.imaging.preprocessor import CpuPreprocessor
from nereid.vision.imaging.transform import Transform
from tests.faulty_networks import CUDARuntimeError
from tests.tables import cases

TRANSFORM = Transform(224, 224, resize_shorter_px=256, mean=(127.0,) * 3, std=(128.0,) * 3)
A, B, BAD = COFFEE.read_bytes(), CHELSEA.read_bytes(), b"not an image"
LATE = DeadlineExceeded("late")


class Numbers:
    """Stands for a preprocessor: an image is a number, which its row holds; `errors` are of bad ones."""

    times = ()

    def __init__(self, size: int, errors=None) -> None:
        self.tensor = np.full((size, 2), -1.0, np.float32)
        self.errors = errors or {}

    def prepare(self, images):
        for row, image in zip(self.tensor, images, strict=False):
            row[:] = -1 if image in self.errors else int(image)
        return [self.errors.get(image) for image in images]

    def move(self, source, target):
        self.tensor[target] = self.tensor[source].copy()


class Broken(Numbers):
    """A device that fails as a whole."""

    def __init__(self, size: int, error: Exception) -> None:
        super().__init__(size)
        self.error = error

    def prepare(self, images):
        raise self.error


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline(CpuPreprocessor(TRANSFORM, ImageLimits(), 4))


@pytest.fixture
def alone(pipeline):
    return {image: pipeline.run([[image]]).tensor[0].copy() for image in (A, B)}


@pytest.mark.parametrize("position", [0, 1, 2], ids=["first", "middle", "last"])
@cases(("request_", "kind"), refused_already=(LATE, DeadlineExceeded), bad_image=([BAD], InvalidImage))
def test_failed_request_leaves_the_others_alone(pipeline, alone, position, request_, kind):
    requests = [[A], [B, A]]
    requests.insert(position, request_)

    batch = pipeline.run(requests)

    failed = batch.outcomes.pop(position)
    assert type(failed) is kind
    assert failed is LATE or request_ is not LATE
    assert batch.outcomes == [slice(0, 1), slice(1, 3)]
    np.testing.assert_array_equal(batch.tensor, np.stack([alone[A], alone[B], alone[A]]))
    assert batch.tensor.flags.c_contiguous


@cases(
    first=(["01", "2345", "6"], "0", [None, (0, 4), (4, 5)], "23456"),
    middle=(["01", "2345", "6"], "3", [(0, 2), None, (2, 3)], "016"),
    last=(["01", "2345", "6"], "6", [(0, 2), (2, 6), None], "012345"),
    all=(["01", "2345", "6"], "046", [None, None, None], ""),
    empty_request=(["0", "", "12", "3"], "0", [None, (0, 0), (0, 2), (2, 3)], "123"),
    every_other_one=(["0", "1", "2", "3", "4"], "13", [(0, 1), None, (1, 2), None, (2, 3)], "024"),
    long_move_over_itself=(["01", "23456"], "0", [None, (0, 5)], "23456"),
)
def test_rows_are_closed_up(requests, bad, rows, expected):
    errors = {number: InvalidImage("bad") for number in bad}

    batch = Pipeline(Numbers(7, errors)).run([list(request) for request in requests])

    assert [(o.start, o.stop) if isinstance(o, slice) else None for o in batch.outcomes] == rows
    np.testing.assert_array_equal(batch.tensor, np.array([[int(n)] * 2 for n in expected]).reshape(-1, 2))


@cases(
    indices_of_each_request=(
        ["0a2b", "3", "4b"],
        [
            "invalid image: 2 of 4 images cannot be used: image 1: a; image 3: b",
            None,
            "invalid image: 1 of 2 images cannot be used: image 1: b",
        ],
    ),
    ours=(["ax"], ["inference failed: 2 of 2 images cannot be used: image 0: a; image 1: x"]),
    one_image=(["a"], ["invalid image: a"]),
)
def test_failed_request_lists_its_bad_images(requests, expected):
    errors = {"a": InvalidImage("a"), "b": InvalidImage("b"), "x": InferenceFailed("x")}

    outcomes = Pipeline(Numbers(8, errors)).run([list(request) for request in requests]).outcomes

    assert [None if isinstance(outcome, slice) else str(outcome) for outcome in outcomes] == expected


@cases(
    "error",
    memory=MemoryError("device is full"),
    call=CUDARuntimeError(1, "cudaErrorInvalidValue: invalid argument"),
)
def test_failed_call_fails_every_request_and_does_not_mean_a_lost_device(error):
    batch = Pipeline(Broken(3, error)).run([["0"], ["1", "2"]])

    assert [type(outcome) for outcome in batch.outcomes] == [InferenceFailed] * 2
    assert all(f"{type(error).__name__}: {error}" in str(outcome) for outcome in batch.outcomes)
    assert len(batch.tensor) == 0
    assert batch.device_failure is None


def test_lost_device_fails_every_request_as_unreachable(pipeline):
    """Clients may send the request to another instance, and the supervisor replaces this one."""
    illegal = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    batch = Pipeline(Broken(3, CUDARuntimeError(700, illegal))).run([["0"], LATE, ["1", "2"]])

    expected = f"unavailable: device failed: CUDARuntimeError: {illegal}"
    assert [str(outcome) for outcome in batch.outcomes] == [expected, str(LATE), expected]
    assert batch.device_failure is batch.outcomes[0]
    assert pipeline.run([[A], [BAD]]).device_failure is None


def test_device_may_fail_while_rows_move():
    numbers = Numbers(4, {"bad": InvalidImage("bad")})

    def move(source, target):
        raise CUDARuntimeError(719, "cudaErrorLaunchFailure: unspecified launch failure")

    numbers.move = move
    batch = Pipeline(numbers).run([["1"], ["bad"], ["2"]])

    assert batch.outcomes[0] == slice(0, 1)
    assert [type(outcome) for outcome in batch.outcomes[1:]] == [InvalidImage, DeviceFailed]
    assert batch.device_failure is batch.outcomes[2]


@pytest.mark.parametrize("requests", [[], [[BAD]], [[]]], ids=["no request", "only a bad one", "no image"])
def test_empty_batch_is_empty(pipeline, requests):
    assert pipeline.run(requests).tensor.shape == (0, 3, 224, 224)


ONE_INPUT = "expected one input, 'image' TYPE_STRING [1], got "
SECOND_INPUT = 'input { name: "size" data_type: TYPE_INT32 dims: [ 2 ] } output {'


@cases(
    dims=("[ 3, 224, 224 ]", "[ 3, 299, 299 ]", "expected at least the output's 299 x 299, got 256"),
    no_batches=("max_batch_size: 8", "max_batch_size: 0", "max_batch_size: expected 1 or more, got 0"),
    inputs_type=("TYPE_STRING", "TYPE_UINT8", ONE_INPUT + "'image' TYPE_UINT8 [1]"),
    two_inputs=("output {", SECOND_INPUT, ONE_INPUT + "'image' TYPE_STRING [1], 'size' TYPE_INT32 [2]"),
)
def test_unsuitable_config_fails_the_load(old, new, message, root, tmp_path):
    text = (root / "model_repository" / "imagenet_preprocess" / "config.pbtxt").read_text()
    assert old in text
    (tmp_path / "config.pbtxt").write_text(text.replace(old, new))

    with pytest.raises(InvalidConfig, match=f"^model 'imagenet_preprocess'.*{re.escape(message)}"):
        Pipeline.from_config(ModelConfig.from_file(tmp_path, 1))


@cases(("kind", "parameter"), cpu=("CPU", "gpu_memory_limit_bytes"), gpu=("GPU", "decode_threads"))
def test_parameter_of_the_other_device_fails_the_load(root, kind, parameter):
    config = ModelConfig.from_file(root / "model_repository" / "imagenet_preprocess", 1)
    config = replace(config, device_kind=kind, parameters={**config.parameters, parameter: "7"})

    with pytest.raises(InvalidConfig, match=f"{parameter} contradicts an instance on a {kind}"):
        Pipeline.from_config(config)


def test_more_images_than_rows_are_refused(pipeline):
    """If Triton sent too many images, no request would get rows of another."""
    assert [str(outcome) for outcome in pipeline.run([[A, A, A], [B, B]]).outcomes] == [
        f"inference failed: {count} of {count} images cannot be used: "
        + "; ".join(f"image {i}: expected at most 4 images per batch, got 5" for i in range(count))
        for count in (3, 2)
    ]


def test_gpu_without_its_packages_fails_the_load(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "nereid.vision.imaging.gpu_preprocessor", raising=False)
    config = ModelConfig.from_file(root / "model_repository" / "imagenet_preprocess", 1)

    with pytest.raises(InvalidConfig, match=r"cupy.*; fix: .* the packages of the extra 'gpu' or 'gpu13'"):
        Pipeline.from_config(replace(config, device_kind="GPU"))


@cases("image", no_image=BAD, cut_off=A[:20_000], too_large=bytes(ImageLimits().max_image_bytes + 1))
def test_refused_image_is_released_immediately(pipeline, image):
    """An outcome holds no reference to its image, even without Python's cyclic garbage collector."""
    image = bytes(bytearray(image))
    before = sys.getrefcount(image)
    gc.disable()

    try:
        outcomes = pipeline.run([[image]]).outcomes
        assert isinstance(outcomes[0], InvalidImage)
        assert sys.getrefcount(image) == before
    finally:
        gc.enable()
