"""The real server, started once per profile for all tests that only ask it things."""

import contextlib
import io
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from nereid.base import prometheus_text
from nereid.base.assets import REPOSITORY, TEXT_REPOSITORY
from nereid.base.prometheus_text import MetricSamples
from nereid.repository.repository_index import unused_models
from nereid.server.embedded_server import EmbeddedServer
from tests.networks import serve
from tests.routes import WATCHDOG_S

TOKEN = "a-token-for-tests"
# What the two sample photos show, as indices of ImageNet's classes.
ESPRESSO, CATS = 967, {281, 282, 285}


def url(server: EmbeddedServer, protocol: str) -> str:
    return f"{server.options.host}:{getattr(server.options.ports, protocol)}"


def metric(address: str, name: str, **labels: str) -> float:
    """Return the sum of a metric on the page of an address."""
    return MetricSamples.parse(prometheus_text.fetch(address, WATCHDOG_S)).total(name, labels)


def group_members(leader: int) -> list[int]:
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader and fields[0] != "Z":
                members.append(int(stat.parent.name))
    return members


def start(tmp_path_factory, profile: str, allow_shm: bool = False) -> EmbeddedServer:
    """Build a server of the repository on free ports, with the models a profile leaves out unless asked."""
    flags = [f"--load-model={name}" for name in sorted(unused_models(REPOSITORY, profile))]
    run = tmp_path_factory.mktemp(profile)
    return serve(REPOSITORY, run, *flags, log=print, profile=profile, token=TOKEN, allow_shm=allow_shm)


@pytest.fixture(scope="session")
def both_profiles(tmp_path_factory):
    """Two running servers, by profile; the one of `cpu` allows shared memory."""
    with (
        start(tmp_path_factory, "cpu", allow_shm=True) as fused,
        start(tmp_path_factory, "ensemble") as ensemble,
    ):
        yield {"cpu": fused, "ensemble": ensemble}


@pytest.fixture(scope="session")
def fused(both_profiles):
    """The running server of `cpu`."""
    return both_profiles["cpu"]


@pytest.fixture(scope="session")
def text_server(tmp_path_factory):
    """A running server of the text models; it allows shared memory."""
    pytest.importorskip("cv2", reason="opencv is not installed: extra text")
    run = tmp_path_factory.mktemp("text")
    with serve(TEXT_REPOSITORY, run, log=print, profile="cpu", allow_shm=True) as running:
        yield running


@pytest.fixture(scope="session", params=["cpu", "ensemble"])
def server(request, both_profiles):
    """A running server, once in each shape of the repository."""
    return both_profiles[request.param]


@pytest.fixture(params=["http", "grpc"])
def protocol(request):
    return request.param


@pytest.fixture(scope="session")
def reference():
    """Scores as anybody would compute them: Pillow and plain ONNX Runtime, nothing of ours.

    `reference(encoded, version)` gives float32[1000].
    """
    sessions = {
        version: onnxruntime.InferenceSession(REPOSITORY / "efficientnet_lite0" / version / "model.onnx")
        for version in ("1", "2")
    }

    def score(encoded: bytes, version: str) -> np.ndarray:
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        # As torchvision's Resize(256) and CenterCrop(224).
        size = [int(256 * side / min(image.size)) for side in image.size]
        left, top = (round((side - 224) / 2) for side in size)
        crop = image.resize(size, Image.Resampling.BILINEAR).crop((left, top, left + 224, top + 224))
        pixels = (np.asarray(crop, np.float32) - 127) / 128
        return sessions[version].run(None, {"input": pixels.transpose(2, 0, 1)[None]})[0][0]

    return score
