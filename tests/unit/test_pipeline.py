"""Batches of encoded images: one outcome per request, rows where they belong, buffers reused."""

import numpy as np
import pytest

from clients.samples import CHELSEA, COFFEE
from python_backend.decode import Limits
from python_backend.errors import InvalidConfig, InvalidImage
from python_backend.model_config import ModelConfig
from python_backend.pipeline import Pipeline
from python_backend.transform import Transform

TRANSFORM = Transform(256, 224, (127.0, 127.0, 127.0), (128.0, 128.0, 128.0))
A, B, BAD = COFFEE.read_bytes(), CHELSEA.read_bytes(), b"not an image"


@pytest.fixture
def pipeline() -> Pipeline:
    """A pipeline for batches of up to 4 images."""
    return Pipeline(TRANSFORM, Limits(), 4)


@pytest.fixture
def alone(pipeline):
    """What each image gives on its own."""
    return {image: pipeline.run([[image]]).tensor[0].copy() for image in (A, B)}


def test_rows_follow_the_requests(pipeline, alone):
    """Several requests of several images fill one contiguous tensor, in order."""
    batch = pipeline.run([[A], [B, A]])

    assert batch.outcomes == [slice(0, 1), slice(1, 3)]
    np.testing.assert_array_equal(batch.tensor, np.stack([alone[A], alone[B], alone[A]]))
    assert batch.tensor.flags.c_contiguous


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_bad_request_fails_alone(pipeline, alone, place):
    """A broken image in one request leaves the others' rows right and without a gap."""
    requests = [[A], [B]]
    requests.insert(place, [BAD])

    batch = pipeline.run(requests)

    assert isinstance(batch.outcomes.pop(place), InvalidImage)
    assert batch.outcomes == [slice(0, 1), slice(1, 2)]
    np.testing.assert_array_equal(batch.tensor, np.stack([alone[A], alone[B]]))


def test_request_with_bad_images_names_every_index(pipeline):
    """A request of several images fails whole, and says which of them to leave out."""
    (outcome,) = pipeline.run([[BAD, A, b""]]).outcomes

    assert str(outcome).startswith(
        "invalid image: 2 of 3 images cannot be used: image 0: expected an image file"
    )
    assert "; image 2: expected the bytes of an image file" in str(outcome)


@pytest.mark.parametrize("requests", [[], [[BAD]], [[]]], ids=["no request", "only a bad one", "no image"])
def test_empty_batch_is_empty(pipeline, requests):
    """Nothing good to prepare gives a tensor without rows."""
    assert pipeline.run(requests).tensor.shape == (0, 3, 224, 224)


def test_batch_buffer_is_reused(pipeline):
    """No batch allocates a tensor: each is a view of the same memory."""
    first, second = pipeline.run([[A]]).tensor, pipeline.run([[B], [A]]).tensor

    assert np.shares_memory(first, second)


def test_repository_model_describes_this_pipeline(root, alone):
    """The model in the repository gives the same tensor as the parameters it is documented with."""
    config = ModelConfig.from_file(root / "model_repository" / "imagenet_preprocess", 1)

    np.testing.assert_array_equal(Pipeline.from_config(config).run([[A]]).tensor[0], alone[A])


def test_output_dims_must_be_what_the_parameters_produce(root, tmp_path):
    """A config whose dims contradict its crop fails the load and says both."""
    folder = tmp_path / "wrong"
    folder.mkdir()
    text = (root / "model_repository" / "imagenet_preprocess" / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(text.replace("[ 3, 224, 224 ]", "[ 3, 299, 299 ]"))

    with pytest.raises(InvalidConfig, match=r"parameters produce \[3, 224, 224\], dims say \[3, 299, 299\]"):
        Pipeline.from_config(ModelConfig.from_file(folder, 1))
