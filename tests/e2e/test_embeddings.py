"""A network of embeddings on a real server: added, called in every way, published, and shadowed by cosine."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from nereid import Embedder
from nereid.base.assets import CHELSEA, COFFEE
from nereid.base.contract import EMBEDDING
from tests.embedders import DIMS, convolutional, embeddings, small
from tests.networks import CLIENTS
from tests.routes import store_adding, wait_until
from tests.supervised import Served, image_input, serving

pytestmark = pytest.mark.slow
PHOTOS = small(COFFEE), small(CHELSEA)
PUBLISH = "--max-slowdown", "1000"  # the machine that tests is busy


@dataclass(frozen=True)
class Faces:
    """A server to which a network of embeddings was added, and the folder of its files."""

    served: Served
    folder: Path

    @property
    def files(self) -> list[str]:
        return [str(self.folder / f"{name}.png") for name in ("coffee", "chelsea")]

    def shadow(self, name: str, **labels: str) -> float:
        return self.served.triton_metric(f"nereid_route_shadow_{name}", route="faces", **labels)


@pytest.fixture(scope="module", params=["cpu", "ensemble"])
def faces(request, tmp_path_factory) -> Iterator[Faces]:
    folder = tmp_path_factory.mktemp(request.param)
    store_adding(folder / "models", "net", 1)  # a server needs a model
    onnx.save(convolutional(), folder / "faces.onnx")
    for name, photo in zip(("coffee", "chelsea"), PHOTOS, strict=True):
        (folder / f"{name}.png").write_bytes(photo)
    with serving(folder / "models", folder / "run", "--profile", request.param) as served:
        how = "--task", "embed", "--preprocess", "resize=exact", "--preprocess", f"scale={1 / 255}"
        done = served.run("add", str(folder / "faces.onnx"), "--name", "faces", *how, "--yes")
        assert f"{DIMS} dimensions, length 1" in done.stderr
        yield Faces(served, folder)


def test_every_client_gets_the_vectors_of_the_network(faces, protocol):
    """Nereid's client, one image at a time and in batches, and NVIDIA's."""
    address = f"127.0.0.1:{faces.served.ports[protocol]}"
    with Embedder(address, protocol, "faces") as embedder:
        one = embedder.embed(PHOTOS[0], variant="v1")
        many = list(embedder.embed_many([*PHOTOS, b"bad"], batch_size=3))
    with CLIENTS[protocol].InferenceServerClient(address) as client:
        theirs = client.infer("faces", [image_input(protocol, *PHOTOS)]).as_numpy(EMBEDDING)

    expected = embeddings(convolutional(), *PHOTOS)
    vectors = np.stack([one.vector, many[0].vector, many[1].vector, *theirs])
    np.testing.assert_allclose(vectors, expected[[0, 0, 1, 0, 1]], atol=1e-5)  # FP32
    assert (vectors.dtype, theirs.shape, theirs.dtype) == (np.float32, (2, DIMS), np.float32)
    assert (one.model, one.version, one.variant, one.reason) == ("faces", "1", "v1", "variant")
    assert "invalid image: " in str(many[2])


def test_command_prints_dims_and_all_numbers(faces):
    words = "embed", *faces.files, "--model", "faces"
    table = faces.served.run(*words).stdout
    results = json.loads(faces.served.run(*words, "--json").stdout)
    lines = faces.served.run(*words, "--jsonl").stdout.splitlines()
    rows = faces.served.run(*words, "--csv").stdout.splitlines()

    expected = embeddings(convolutional(), *PHOTOS)
    np.testing.assert_allclose([result["vector"] for result in results], expected, atol=1e-5)
    assert [json.loads(line)["vector"] for line in lines] == [result["vector"] for result in results]
    assert (str(DIMS) in table, "variant v1 by weight" in table) == (True, True)
    assert f"{expected[0][0]:.3f}" in table
    assert rows[0].startswith("image,dims,vector,")
    name, dims, numbers, *_ = rows[1].split(",")
    assert (name, dims) == (faces.files[0], str(DIMS))
    np.testing.assert_allclose([float(number) for number in numbers.split()], expected[0], atol=1e-5)


def test_next_version_is_refused_or_shadowed_by_its_cosine(faces):
    """The mean distance of the shadow is that of both networks, computed without a server."""
    near, far = convolutional(noise=0.02), convolutional(seed=2)
    for name, made in (("near", near), ("far", far)):
        onnx.save(made, faces.folder / f"{name}.onnx")

    refused = faces.served.nereid("publish", "faces", str(faces.folder / "far.onnx"), *PUBLISH)
    faces.served.run("publish", "faces", str(faces.folder / "near.onnx"), *PUBLISH)
    document = json.loads((faces.served.repository / "faces.route.json").read_text())
    (model,) = (variant["model"] for variant in document["variants"] if variant["name"] == "v2")
    shadow = {"name": "next", "model": model, "version": 1, "percent": 100}
    (route := faces.folder / "route.json").write_text(
        json.dumps(document | {"shadows": [shadow], "shadow_max_in_flight": 16})
    )
    faces.served.run("route", "set", "--file", str(route), "--model", "faces")
    address = f"127.0.0.1:{faces.served.ports['grpc']}"
    with Embedder(address, model="faces") as embedder:
        answers = [embedder.embed(PHOTOS[0]) for _ in range(5)]
    wait_until(lambda: faces.shadow("requests_total", outcome="agreed") == 5, "five comparisons")
    wait_until(lambda: faces.shadow("score_distance_count") == 5, "their distances")

    (old,), (new,) = (embeddings(network, PHOTOS[0]) for network in (convolutional(), near))
    assert refused.returncode == 1
    assert "expected a cosine of at least 0.9 with the current version's" in refused.stderr
    assert {answer.variant for answer in answers} == {"v1"}
    distance = faces.shadow("score_distance_sum") / 5
    assert distance == pytest.approx((1 - old @ new) / 2, abs=1e-6)  # FP32
    assert distance > 0
