"""The whole server on a GPU: the right class, and no tensor of the ensemble on the host."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput

from nereid.base import prometheus_text
from nereid.base.assets import CHELSEA, COFFEE, REPOSITORY
from nereid.base.prometheus_text import MetricSamples
from nereid.client.client_errors import RequestRefused
from nereid.tasks.classify.client import Classifier
from tests.e2e.conftest import ESPRESSO, start, url
from tests.networks import parameter, serve
from tests.routes import wait_until

pytestmark = pytest.mark.gpu

# The backend hands its metrics on twice a second; this is ten times that and more.
PATIENCE_S = 10.0
OVERLAPS = {"in turn": "false", "overlapping": "true"}
RUNS, FROM_HOST = "nereid_onnxruntime_run_seconds_count", "nereid_onnxruntime_host_inputs_total"


@pytest.fixture(scope="module")
def server(cupy, tmp_path_factory):
    with start(tmp_path_factory, "gpu_ensemble") as running:
        yield running


def total(server, name: str) -> float:
    return MetricSamples.parse(prometheus_text.fetch(url(server, "metrics"), PATIENCE_S)).total(name)


def wait_for_runs(server, count: float) -> None:
    """Wait until the metrics page counts this many runs of networks, and so all earlier runs."""
    wait_until(lambda: total(server, RUNS) >= count, f"{count} runs", PATIENCE_S)


@pytest.mark.parametrize("model", ["imagenet_preprocess", "efficientnet_lite0"])
def test_instances_are_on_the_gpu(server, model):
    groups = httpx.get(f"http://{url(server, 'http')}/v2/models/{model}/config").json()["instance_group"]

    assert {group["kind"] for group in groups} == {"KIND_GPU"}


def test_tensors_stay_on_the_gpu(server):
    """The coffee photo is espresso, and every input of the network is on its device."""
    before = total(server, RUNS)

    with Classifier(url(server, "http"), "http") as classifier:
        answers = [classifier.classify(COFFEE) for _ in range(5)]
    wait_for_runs(server, before + 5)

    assert {answer.labels[0].index for answer in answers} == {ESPRESSO}
    assert total(server, FROM_HOST) == 0


def test_tensor_of_a_client_is_counted(server):
    """It comes through the host; otherwise the zero of the test above would prove nothing."""
    tensor = InferInput("input", [1, 3, 224, 224], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 3, 224, 224), np.float32))
    runs, before = total(server, RUNS), total(server, FROM_HOST)

    with InferenceServerClient(url(server, "http")) as client:
        client.infer("efficientnet_lite0", [tensor], model_version="1")
    wait_for_runs(server, runs + 1)

    assert total(server, FROM_HOST) == before + 1


def test_scores_of_one_process_are_those_of_the_ensemble(server, tmp_path_factory):
    """Profile `gpu` decodes and computes in one process, with the same kernels."""
    with Classifier(url(server, "http"), "http") as classifier:
        expected = [classifier.scores(photo, version="1") for photo in (COFFEE, CHELSEA)]

    with start(tmp_path_factory, "gpu") as fused, Classifier(url(fused, "http"), "http") as classifier:
        for photo, scores in zip((COFFEE, CHELSEA), expected, strict=True):
            np.testing.assert_allclose(classifier.scores(photo, version="1"), scores, atol=0.001)


@pytest.fixture(scope="module", params=["ensemble", "in turn", "overlapping"])
def batching(request, server, tmp_path_factory):
    """A running server of an ensemble, or of one process in which batches take turns or overlap."""
    if request.param == "ensemble":
        yield server
        return
    repository = tmp_path_factory.mktemp("repository") / "models"
    shutil.copytree(REPOSITORY, repository)
    config = repository / "classify_v1" / "configs" / "gpu.pbtxt"
    config.write_text(config.read_text() + parameter("overlap_batches", OVERLAPS[request.param]))
    with serve(repository, tmp_path_factory.mktemp("run"), profile="gpu") as running:
        yield running


def test_requests_of_mixed_batches_have_their_own_results(batching):
    """Photos and bytes that are no image, together: each has the result that it has alone."""
    images = [COFFEE.read_bytes(), CHELSEA.read_bytes(), b"no image"]

    def ask(image: bytes):
        with Classifier(url(batching, "http"), "http") as classifier:
            try:
                return classifier.classify(image, version="1").labels[0]
            except RequestRefused as error:
                return str(error)

    alone = [ask(image) for image in images]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, images * 60))

    for index, answer in enumerate(answers):
        expected = alone[index % len(images)]
        if isinstance(expected, str):
            assert answer == expected
        else:
            # In a batch cuDNN may choose another algorithm.
            assert (answer.index, answer.score) == (expected.index, pytest.approx(expected.score, abs=0.01))
