"""CUDA shared memory: the caller copies the image to the GPU, and the result is the same."""

import numpy as np
import pytest

from nereid.base.assets import COFFEE
from nereid.client.shared_memory import NoCuda, cuda_library
from tests.classifiers import WAYS, opened
from tests.e2e.conftest import start, url

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def server(cupy, tmp_path_factory):
    try:
        cuda_library()
    except NoCuda as error:
        pytest.skip(str(error))
    with start(tmp_path_factory, "gpu", allow_shm=True) as running:
        yield running


@pytest.mark.parametrize(("way", "protocol"), WAYS)
def test_scores_are_those_of_what_is_sent(server, way, protocol):
    """Two requests through one region have exactly the result of a plain request."""
    with opened(way, url(server, protocol), protocol, "classify_v1") as classifier:
        sent = classifier.scores(COFFEE)

    with opened(way, url(server, protocol), protocol, "classify_v1", shared_memory="cuda") as classifier:
        for _ in range(2):
            np.testing.assert_array_equal(classifier.scores(COFFEE), sent, strict=True)
