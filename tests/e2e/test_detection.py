"""The next version of a detector on the real server, in both forms."""

import io
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http
from PIL import Image

from nereid.errors import OperationFailed
from nereid.publish.add import AddRequest, add
from nereid.publish.examination.examine import Gates
from nereid.publish.publisher import publish, retire, rollback
from nereid.publish.remove import remove
from nereid.repository.check import check
from tests.detectors import KNOWN, SIDE, TestDetector, add_detector, moved
from tests.publishing import record_of
from tests.routes import serve_routes

pytestmark = pytest.mark.nightly(minutes=3)

OUTPUTS = ("box", "score", "label")
CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}
# By the server's profile, the form of a pinned model.
FORMS = {"": "ensemble", "--model-config-name=cpu": "fused"}


def picture(width: int, height: int, orientation: int = 1, kind: str = "PNG") -> bytes:
    """Return a picture of noise as a file."""
    pixels = np.random.default_rng(5).integers(0, 256, (height, width, 3)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, kind, exif=exif)
        return file.getvalue()


def detect(client, protocol: str, model: str, *images: bytes, headers=None):
    """Send one request with some images; return the tensors of the response."""
    tensor = CLIENTS[protocol].InferInput("image", [len(images), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(images, object).reshape(-1, 1))
    result = client.infer(model, [tensor], headers=headers)
    return {name: result.as_numpy(name) for name in (*OUTPUTS, "variant", "version")}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository with a detector."""
    return add_detector(tmp_path_factory.mktemp("detectors"))


@pytest.fixture(scope="module", params=FORMS, ids=FORMS.values())
def site(request, repository, tmp_path_factory):
    """A running server in one of the two forms: its record and clients."""
    with serve_routes(repository, tmp_path_factory.mktemp("run"), *request.param.split()) as running:
        record = record_of(running.server)
        with (
            tritonclient.http.InferenceServerClient(record.url("http"), concurrency=8) as by_http,
            tritonclient.grpc.InferenceServerClient(record.url("grpc")) as by_grpc,
        ):
            yield record, {"http": by_http, "grpc": by_grpc}


def test_next_version_is_published_split_and_taken_back(site, tmp_path):
    """A detector of another exporter becomes version 2, gets a share, and goes; no request fails."""
    record, clients = site
    repository = Path(record.repository)
    first, second = TestDetector("detr_sigmoid"), TestDetector("detr_sigmoid", moved(), batch=1)
    onnx.save(first.build(), tmp_path / "first.onnx")
    later = second.build()
    for old, new in (("logits", "scores_of_classes"), ("pred_boxes", "places")):
        rename(later, old, new)
    onnx.save(later, tmp_path / "second.onnx")
    name = f"grown{record.pid}"  # a name's versions are never used again
    request = AddRequest(
        tmp_path / "first.onnx", name, {"preset": "rtdetr"}, task="detect", head="detr_sigmoid", instances=1
    )
    add(repository, request, record)

    with pytest.raises(
        OperationFailed, match=r"object in coffee\.jpg: expected '1' 1\.00 at .*accept-change"
    ):
        publish(repository, name, tmp_path / "second.onnx", record)
    gates = Gates(is_change_accepted=True, max_slowdown=1000)
    done = publish(repository, name, tmp_path / "second.onnx", record, gates, share=0.5)

    assert (done.version, done.pinned) == (2, (f"{name}_v2",))
    # The smaller box moves by a quarter of its width: its IoU is 0.6.
    assert done.report.difference == pytest.approx(0.4)
    image = picture(SIDE, SIDE)
    for variant, version, objects in (("v1", b"1", KNOWN), ("v2", b"2", moved())):
        found = detect(clients["grpc"], "grpc", name, image, headers={"x-variant": variant})
        assert found["box"][0].tolist() == [list(box) for box, _, _ in objects]
        assert found["label"].tolist() == [[b"1", b"0"]]
        assert found["version"].item() == version
    shares = [detect(clients["http"], "http", name, image)["version"].item() for _ in range(60)]
    assert {b"1", b"2"} == set(shares)
    rollback(repository, name, record)
    retire(repository, name, 2, record)
    assert {detect(clients["grpc"], "grpc", name, image)["version"].item() for _ in range(10)} == {b"1"}
    assert [each for each in check(repository) if each.verdict != "ok" and each.model.startswith(name)] == []
    parts = ("_network", "_preprocess", "_boxes", "_v1", "")
    assert remove(repository, name, record) == tuple(f"{name}{part}" for part in parts)


def rename(model: onnx.ModelProto, old: str, new: str) -> None:
    """Give an output of a network another name."""
    for output in model.graph.output:
        if output.name == old:
            output.name = new
    for node in model.graph.node:
        for position, name in enumerate(node.output):
            if name == old:
                node.output[position] = new
