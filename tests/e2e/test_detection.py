"""Detectors on the real server: known boxes bit for bit, in both forms and over both protocols."""

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http
from PIL import Image
from tritonclient.utils import InferenceServerException

from nereid.errors import OperationFailed
from nereid.publish.add import AddRequest, add
from nereid.publish.examination.examine import Gates
from nereid.publish.publisher import publish, retire, rollback
from nereid.publish.remove import remove
from nereid.repository.check import check
from tests.detectors import CLASSES, HEADS, KNOWN, SIDE, TestDetector, moved
from tests.publishing import record_of
from tests.routes import serve_routes

pytestmark = pytest.mark.slow

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


# With the scale from the network's pixels to those of the upright picture; margins are 0 or exact.
PICTURES = {
    "same size": (picture(SIDE, SIDE), lambda box: box),
    "half size": (picture(2 * SIDE, 2 * SIDE), lambda box: box * 2),
    "wide": (picture(2 * SIDE, SIDE), lambda box: (box - [0, 16, 0, 16]) * 2),
    "turned JPEG": (picture(SIDE, 2 * SIDE, 6, "JPEG"), lambda box: (box - [0, 16, 0, 16]) * 2),
    "turned TIFF": (
        picture(SIDE, 2 * SIDE, 6, "TIFF"),
        lambda box: (box - [0, 16, 0, 16]) * 2,
    ),
}


def expected(objects, place, size_wh) -> dict[str, np.ndarray]:
    """Return the tensors of a response, by a plain computation."""
    width, height = size_wh
    boxes = np.array([place(np.array(box)) for box, _, _ in objects], np.float32).reshape(-1, 4)
    boxes = np.clip(boxes, 0, np.array([width, height, width, height], np.float32))
    labels = np.array([CLASSES[index].encode() for _, _, index in objects], object)
    return {
        "box": boxes[None],
        "score": np.array([[score for _, score, _ in objects]], np.float32),
        "label": labels[None],
    }


def detect(client, protocol: str, model: str, *images: bytes, headers=None):
    """Send one request with some images; return the tensors of the response."""
    tensor = CLIENTS[protocol].InferInput("image", [len(images), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(images, object).reshape(-1, 1))
    result = client.infer(model, [tensor], headers=headers)
    return {name: result.as_numpy(name) for name in (*OUTPUTS, "variant", "version")}


def same(found, wanted) -> None:
    """Check that tensors are equal to the last bit."""
    for name, array in wanted.items():
        assert found[name].tolist() == array.tolist(), name


def upright_size(name: str) -> tuple[int, int]:
    """Return width and height of a picture as people see it."""
    with Image.open(io.BytesIO(PICTURES[name][0])) as image:
        width, height = image.size
        return (2 * SIDE, SIDE) if "turned" in name else (width, height)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository with a detector of each head."""
    folder = tmp_path_factory.mktemp("detectors")
    (folder / "labels.txt").write_text("\n".join(CLASSES) + "\n")
    for head in HEADS:
        onnx.save(TestDetector(head, batch=1 if head == "detr" else None).build(), folder / f"{head}.onnx")
        request = AddRequest(
            folder / f"{head}.onnx",
            head,
            {"preset": "yolo"},
            folder / "labels.txt",
            task="detect",
            # The others are found by their names and shapes.
            head=head if head in ("yolox", "detr", "detr_sigmoid") else "",
            instances=1,
        )
        add(folder / "models", request, None)
    return folder / "models"


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


@pytest.mark.parametrize("protocol", CLIENTS)
@pytest.mark.parametrize("head", HEADS)
def test_known_boxes_are_found(site, head, protocol):
    """Every head, form and protocol gives the known objects of every picture, bit for bit."""
    _, clients = site
    for name, (encoded, place) in PICTURES.items():
        wanted = expected(KNOWN, place, upright_size(name))

        found = detect(clients[protocol], protocol, head, encoded)

        same(found, wanted)
        assert (found["variant"].item(), found["version"].item()) == (b"v1", b"1")


def test_both_forms_return_the_same_bits(repository, tmp_path):
    """Heads with logarithms and exponentials give equal bits from the ensemble and from one process."""
    found = []
    for number, flags in enumerate(FORMS):
        with serve_routes(repository, tmp_path / str(number), *flags.split()) as running:
            record = record_of(running.server)
            with tritonclient.grpc.InferenceServerClient(record.url("grpc")) as client:
                found.append(
                    {
                        (head, name): {k: v.tolist() for k, v in detect(client, "grpc", head, each).items()}
                        for head in HEADS
                        for name, (each, _) in PICTURES.items()
                    }
                )

    assert found[0] == found[1]


@pytest.mark.parametrize("protocol", CLIENTS)
def test_bad_requests_are_refused(site, protocol):
    """Two images, no image and a damaged image have their own messages, and the next request is answered."""
    _, clients = site
    good = PICTURES["same size"][0]
    for images, message in (
        ([good, good], "invalid request: expected one image per request, got 2"),
        ([b""], "invalid image: expected the bytes of an image file"),
        ([b"no image"], "invalid image: expected an image file"),
        ([good[:-200]], "invalid image: "),
    ):
        with pytest.raises(InferenceServerException, match=message):
            detect(clients[protocol], protocol, "yolov8", *images)

    assert detect(clients[protocol], protocol, "yolov8", good)["score"].shape == (1, 2)


def test_requests_share_batches(site):
    """Requests that arrive together each get their own objects, and a bad one among them fails alone."""
    _, clients = site
    images = [PICTURES["same size"][0], PICTURES["half size"][0], b"no image"] * 8

    def send(encoded: bytes):
        try:
            return detect(clients["grpc"], "grpc", "nms", encoded)["box"].tolist()
        except InferenceServerException as error:
            return str(error)

    with ThreadPoolExecutor(len(images)) as pool:
        found = list(pool.map(send, images))

    boxes = np.array([box for box, _, _ in KNOWN])
    assert found[0::3] == [[boxes.tolist()]] * 8
    assert found[1::3] == [[(boxes * 2).tolist()]] * 8
    assert all("invalid image: expected an image file" in each for each in found[2::3])
    counts = clients["grpc"].get_inference_statistics(as_json=True)["model_stats"]
    loaded = {each["name"] for each in counts if each.get("batch_stats")}
    name = "nms_network" if "nms_network" in loaded else "nms_v1"
    (stats,) = [each for each in counts if each["name"] == name]
    assert max(int(each["batch_size"]) for each in stats["batch_stats"]) > 1


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
    image = PICTURES["same size"][0]
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
