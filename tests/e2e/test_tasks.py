"""All tasks on one real server: answers in both forms, bad input, clients, commands and the gateway."""

import base64
import io
import itertools
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image, ImageFilter
from tritonclient.utils import InferenceServerException

from nereid import RequestRefused
from nereid.base import prometheus_text
from nereid.base.assets import PARCEL_LABEL, REPOSITORY, TEXT_REPOSITORY
from nereid.base.contract import DEADLINE_PARAMETER
from nereid.base.prometheus_text import MetricSamples
from nereid.server.embedded_server import EmbeddedServer
from tests.classifiers import opened
from tests.commands import captured
from tests.detectors import CLASSES, HEADS, KNOWN, SIDE
from tests.e2e.conftest import url
from tests.gateways import check_schema
from tests.labels import BLANK, LABEL, WORDS
from tests.networks import CLIENTS, Arrays, connect, infer, serve
from tests.pictures import BOMB, encode, exif, noise, save
from tests.readers import page, reader
from tests.routes import WATCHDOG_S, wait_until
from tests.supervised import NEREID, image_input, running_gateway
from tests.tables import cases
from tests.tasks import DETECT, READ, TASKS, store_tasks

pytest.importorskip("cv2", reason="opencv is not installed: extra text")
PdfDocument = pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed: extra text").PdfDocument
pytestmark = pytest.mark.slow

PROTOCOLS, FORMS = ("http", "grpc"), ("cpu", "ensemble")
# Each head is decoded by the same code in both forms.
DETECTORS = {"cpu": HEADS, "ensemble": ("yolov8", "detr")}
PARCEL = PARCEL_LABEL.read_bytes()
# Every pair of a task, a kind of client, a protocol and a memory.
WAYS = (
    (("sync", "http", None), ("async", "grpc", "system")),
    (("sync", "http", "system"), ("async", "grpc", None)),
    (("sync", "grpc", None), ("async", "http", "system")),
)
TRANSPORTS = [(task, *way) for task, ways in zip(TASKS, itertools.cycle(WAYS)) for way in ways]
# For what does not depend on the form.
fused = pytest.mark.parametrize("server", ["cpu"], indirect=True)
of_each_task = pytest.mark.parametrize("task", TASKS[1:], ids=str)  # test_bad_input.py has the classifiers
# Several images of a request share a batch in the other tasks.
of_single_images = pytest.mark.parametrize("task", [DETECT, READ], ids=str)


@pytest.fixture(scope="module", params=FORMS)
def server(request, tmp_path_factory) -> Iterator[EmbeddedServer]:
    """A running server of all tasks: pinned models in one process each, or models of every network."""
    # The classifiers are tested in both forms by test_classify.py.
    sources = (REPOSITORY, TEXT_REPOSITORY) if request.param == "cpu" else (TEXT_REPOSITORY,)
    repository = store_tasks(tmp_path_factory.mktemp("tasks"), *DETECTORS[request.param], sources=sources)
    run = tmp_path_factory.mktemp("run")
    with serve(repository, run, profile=request.param, allow_shm=True) as running:
        yield running


def ask(server: EmbeddedServer, model: str, *images: bytes, protocol: str = "grpc", **options: Any) -> Arrays:
    tensor = np.array([[image] for image in images], object)
    return infer(server, model, {"image": tensor}, protocol, **options)


def refusal(server: EmbeddedServer, model: str, *images: bytes, **options: Any) -> str:
    with pytest.raises(InferenceServerException) as raised:
        ask(server, model, *images, **options)
    return str(raised.value.message())


def texts(outputs: Arrays) -> list[str]:
    """Return the lines without their spaces, which the network sometimes leaves out."""
    return [text.decode().replace(" ", "") for text in outputs["text"][0]]


def picture(width: int, height: int, orientation: int = 1, kind: str = "PNG") -> bytes:
    return encode(noise(height, width), kind, exif=exif(orientation))


# With the scale from the network's pixels to those of the upright picture; margins are 0 or exact.
PICTURES = {
    "same size": (picture(SIDE, SIDE), lambda box: box),
    "half size": (picture(2 * SIDE, 2 * SIDE), lambda box: box * 2),
    "wide": (picture(2 * SIDE, SIDE), lambda box: (box - [0, 16, 0, 16]) * 2),
    "turned JPEG": (picture(SIDE, 2 * SIDE, 6, "JPEG"), lambda box: (box - [0, 16, 0, 16]) * 2),
    "turned TIFF": (picture(SIDE, 2 * SIDE, 6, "TIFF"), lambda box: (box - [0, 16, 0, 16]) * 2),
}


def test_known_boxes_are_found(server):
    for head, name in itertools.product(DETECTORS[server.options.profile], PICTURES):
        image, transform = PICTURES[name]
        with Image.open(io.BytesIO(image)) as opened_image:
            width, height = (2 * SIDE, SIDE) if "turned" in name else opened_image.size
        boxes = np.array([transform(np.array(box)) for box, _, _ in KNOWN], np.float32)
        boxes = np.clip(boxes, 0, np.array([width, height, width, height], np.float32))
        for protocol in PROTOCOLS:
            outputs = ask(server, head, image, protocol=protocol)

            assert outputs["box"].tolist() == [boxes.tolist()], (head, name, protocol)
            assert outputs["score"].tolist() == [[score for _, score, _ in KNOWN]]
            assert outputs["label"].tolist() == [[CLASSES[index].encode() for _, _, index in KNOWN]]
            assert (outputs["variant"].item(), outputs["version"].item()) == (b"v1", b"1")


@cases(
    "image",
    label=PARCEL,
    side=save(page().rotate(90, expand=True)),
    head=save(page().rotate(180)),
    mirrored=save(page().transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
    blurred=save(page().filter(ImageFilter.GaussianBlur(2)), "JPEG", quality=20),
    empty=save(Image.new("RGB", (640, 480), "white")),
    pixel=save(Image.new("RGB", (1, 1))),
)
def test_both_forms_read_as_the_library(server, image):
    """Equal text and boxes; the networks run in equal batches, so that even the confidences are equal."""
    (expected,) = reader().read([image])
    outputs = ask(server, "read_text", image)

    assert isinstance(expected, list)
    assert [text.decode() for text in outputs["text"][0]] == [line.text for line in expected]
    for index, line in enumerate(expected):
        np.testing.assert_allclose(outputs["box"][0][index], line.box, atol=1e-3)
        assert outputs["confidence"][0][index] == pytest.approx(line.confidence, abs=1e-5)


@of_single_images
def test_bad_requests_are_refused(server, task):
    for images, message in (
        ([b""], "invalid image: expected the bytes of an image file"),
        ([b"no image"], "invalid image: expected an image file"),
        ([task.image[:-200]], "invalid image: "),
        ([PARCEL[:3000]], "invalid image: "),
        ([BOMB], "invalid image: expected at most 64000000 pixels"),
        ([task.image] * 2, "invalid request: expected one image per request, got 2"),
    ):
        for protocol in PROTOCOLS:
            assert message in refusal(server, task.model, *images, protocol=protocol)
    assert "one image per request" in refusal(server, f"{task.model}_v1", task.image, task.image)
    late = {DEADLINE_PARAMETER: 1}
    assert "deadline exceeded: " in refusal(server, f"{task.model}_v1", task.image, parameters=late)
    assert ask(server, task.model, task.image)["variant"].item() == b"v1"


@of_single_images
def test_bad_images_do_not_harm_the_requests_of_their_batch(server, task):
    if task is READ:
        good = [save(page((f"LINE {number:03}", "RB123456785GB"))) for number in range(6)]
    else:
        good = [PICTURES[name][0] for name in ("same size", "half size", "wide")] * 4
    images = [*good[:2], b"no image", *good[2:4], LABEL[:3000], *good[4:]]

    def outcome(image: bytes) -> Any:
        try:
            outputs = ask(server, task.model, image)
            return texts(outputs) if task is READ else outputs["box"].tolist()
        except InferenceServerException as error:
            return str(error.message())

    alone = [outcome(image) for image in good]
    with ThreadPoolExecutor(len(images)) as pool:
        outcomes = [*pool.map(outcome, images)]

    bad = [outcomes.pop(index) for index in (5, 2)]
    assert outcomes == alone
    assert len({str(result) for result in alone}) == (6 if task is READ else 3)
    assert all("invalid image: " in message for message in bad)
    if task is DETECT:
        with connect(server) as client:
            stats = client.get_inference_statistics(as_json=True)["model_stats"]
        names = {"yolov8_network", "yolov8_v1"}
        sizes = [model.get("batch_stats", []) for model in stats if model["name"] in names]
        assert max(int(batch["batch_size"]) for group in sizes for batch in group) > 1


@fused
def test_field_that_is_not_found_is_not_an_error(server):
    outputs = ask(server, "read_waybill", BLANK)

    def missing() -> dict[tuple[str, ...], float]:
        page = MetricSamples.parse(prometheus_text.fetch(url(server, "metrics"), WATCHDOG_S))
        return page.sums("nereid_reader_missing_fields_total", "field")

    assert outputs["text"].shape == (1, 0)
    assert {json.loads(text)["value"] for text in outputs["field"][0]} == {None}
    wait_until(lambda: missing().get(("tracking_number",), 0) >= 1, "the count of the required field")
    assert missing().keys() == {("tracking_number",)}


@fused
@pytest.mark.parametrize(("task", "way", "protocol", "memory"), TRANSPORTS, ids=str)
def test_clients_return_the_same_over_every_transport(server, task, way, protocol, memory):
    address = url(server, protocol)
    with opened(way, address, protocol, task.model, kinds=task.kinds, shared_memory=memory) as client:
        one = getattr(client, task.name)(task.image, variant="v1", request_id="mine")
        images = [task.image, b"bad", task.image, BLANK]
        good, bad, again, blank = getattr(client, f"{task.name}_many")(images, route_key="alice")
        for options, message in ({"variant": "v9"}, "unknown x-variant 'v9'"), ({"version": "9"}, "9"):
            with pytest.raises(RequestRefused, match=message):
                getattr(client, task.name)(task.image, **options)

    for result in (one, good, again):
        task.check(result)
    assert (one.model, one.version, one.variant, one.reason) == (task.model, "1", "v1", "variant")
    assert (one.request_id, good.reason) == ("mine", "route-key")
    assert (type(bad), str(bad).startswith("invalid image: ")) == (RequestRefused, True)
    assert task is not READ or blank.lines == ()


def command(server: EmbeddedServer, *words: object) -> "subprocess.CompletedProcess[str]":
    line = [NEREID, str(words[0]), "--url", url(server, "grpc"), *map(str, words[1:])]
    return captured(line, timeout=WATCHDOG_S)


@fused
@of_single_images
def test_command_prints_and_draws(server, task, tmp_path):
    folder, drawn = tmp_path / "images", tmp_path / "drawn"
    folder.mkdir()
    (folder / "good.png").write_bytes(task.image)
    words = task.name, folder, "--model", task.model

    table = command(server, *words, "--draw", drawn)
    (folder / "bad.png").write_bytes(b"bad")
    done = command(server, *words, "--json")
    bad, good = json.loads(done.stdout)

    task.check(good)
    assert bad["error"].startswith("invalid image: ")
    work = {"read": "read", "detect": "searched"}[task.name]
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"error: 1 of 2 images could not be {work}")
    assert (table.returncode, table.stderr, "variant v1 by weight" in table.stdout) == (0, "", True)
    assert all(word in table.stdout for word in (WORDS if task is READ else ("dog", "cat")))
    with Image.open(drawn / "good.png.png") as marked, Image.open(io.BytesIO(task.image)) as plain:
        assert (marked.size, marked.tobytes() == plain.tobytes()) == (plain.size, False)


@fused
def test_document_is_read_page_by_page_and_searched(server, gateway, tmp_path):
    label, blank = (Image.open(io.BytesIO(image)) for image in (LABEL, BLANK))
    for form in ("tiff", "pdf"):
        document = save(label, form.upper(), save_all=True, append_images=[blank, label.copy()])
        (tmp_path / f"scan.{form}").write_bytes(document)

    status, answer = gateway.json("/v1/waybill", (tmp_path / "scan.tiff").read_bytes())
    kind, made = gateway.send("/v1/read?format=pdf", (tmp_path / "scan.pdf").read_bytes())[1:]
    done = command(server, "read", tmp_path, "--json", "--pdf", tmp_path / "out")

    numbers = [(field["page"], field["value"]) for field in answer["fields"] if field["valid"]]
    assert (status, numbers, len(answer["pages"])) == (200, [(1, WORDS[1]), (3, WORDS[1])], 3)
    assert kind == "application/pdf"
    for reading in json.loads(done.stdout):
        assert [(line["page"], line["text"]) for line in reading["lines"]] == [
            (number, word) for number in (1, 3) for word in WORDS
        ]
    for searchable in (made, *(path.read_bytes() for path in (tmp_path / "out").iterdir())):
        texts = [page.get_textpage().get_text_range().splitlines() for page in PdfDocument(searchable)]
        assert texts == [WORDS, [], WORDS]


def test_image_does_not_wait_for_documents(server):
    label = Image.open(io.BytesIO(LABEL))
    document = save(label, "TIFF", save_all=True, append_images=[label.copy() for _ in range(5)])

    with ThreadPoolExecutor(4) as pool:  # more documents than processes
        # Not the route, which waits for a variant for 30 s only.
        reads = [pool.submit(ask, server, "read_text_v1", document) for _ in range(4)]
        wait_until(lambda: all(read.running() for read in reads))
        answer = ask(server, "read_text", LABEL)
        done = [read.done() for read in reads]
        pages = [read.result()["page"].ravel().tolist() for read in reads]

    assert [word.decode() for word in answer["text"].ravel()] == WORDS
    assert done == [False] * 4
    assert pages == [[number for number in range(1, 7) for _ in WORDS]] * 4


@dataclass(frozen=True, slots=True)
class Gateway:
    ports: dict[str, int]

    def send(self, path: str, body: bytes | None = None, kind: str = "image/png") -> Any:
        address = f"http://127.0.0.1:{self.ports['http']}{path}"
        # A document takes seconds, so the default of 10 s is too little on a busy machine.
        headers = {"Content-Type": kind, "X-Request-Timeout-Ms": "30000"}
        method = "POST" if body else "GET"
        answer = httpx.request(method, address, content=body, headers=headers, timeout=WATCHDOG_S)
        return answer.status_code, answer.headers["content-type"], answer.content

    def json(self, path: str, body: bytes | None = None, **options: str) -> tuple[int, Any]:
        status, _, text = self.send(path, body, **options)
        return status, json.loads(text)


@pytest.fixture(scope="module")
def gateway(server, tmp_path_factory) -> Iterator[Gateway]:
    """A gateway of models without a classifier, that knows only the address of their server."""
    models = "read_text", "read_text_v1", "read_waybill", "yolov8", "faces"
    words = "--url", url(server, "http"), *(word for name in models for word in ("--model", name))
    log = tmp_path_factory.mktemp("gateway") / "log"
    with running_gateway(log, *words, "--grpc-port", "0") as ports:
        yield Gateway(ports)
    assert "Traceback" not in log.read_text()


@fused
@of_each_task
def test_gateway_answers_every_kind_of_body(gateway, task):
    boundary = b"--x\r\nContent-Disposition: form-data; name=file; filename=a.png\r\n\r\n"
    form, named = boundary + task.image + b"\r\n--x--\r\n", f"/v1/models/{task.model}/{task.name}"
    document = json.dumps({"image": base64.b64encode(task.image).decode()}).encode()

    answers = [
        gateway.json(f"/v1/{task.name}", task.image),
        gateway.json(f"/v1/{task.name}", form, kind="multipart/form-data; boundary=x"),
        gateway.json(f"{named}?route_key=alice", document, kind="application/json"),
    ]

    for status, answer in answers:
        assert status == 200
        task.check(answer)
        assert (answer["model"], answer["variant"], answer["version"]) == (task.model, "v1", "1")
        assert answer["timings_ms"]["inference"] > 0
    assert [answer["reason"] for _, answer in answers] == ["weight", "weight", "route-key"]
    labels = f'endpoint="/v1/{task.name}",model="{task.model}",outcome="ok",variant="v1"'
    assert f"nereid_gateway_images_total{{{labels}}}" in gateway.send("/metrics")[2].decode()
    # The live view has whole seconds.
    wait_until(lambda: gateway.json(f"/v1/models/{task.model}/live")[1]["outcomes"], "the live view")


@fused
def test_gateway_reads_fields_and_old_encodings(gateway):
    status, answer = gateway.json("/v1/waybill", LABEL)
    kind, body = gateway.send("/v1/waybill?encoding=gbk", LABEL)[1:]
    lines = gateway.json("/v1/models/read_waybill/read", LABEL)[1]

    fields = {field["name"]: field for field in answer["fields"]}
    number = fields["tracking_number"]
    assert (status, answer["model"]) == (200, "read_waybill")
    assert (number["value"], number["valid"], number["corrected"]) == (WORDS[1], True, [])
    assert (number["proof"], number["carrier"], number["certain"]) == ("checksum", "EMS", False)
    assert gateway.json("/v1/fields")[0] == 404  # the gateway has no repository
    assert np.allclose(number["box"], answer["lines"][1]["box"], atol=0.1)
    assert kind == "application/json; charset=gbk"
    assert json.loads(body.decode("gbk"))["fields"] == answer["fields"]
    READ.check(lines)
    assert gateway.json("/v1/models/read_text_v1/read", LABEL)[1]["variant"] == ""
    assert gateway.json("/v1/read", BLANK)[1]["lines"] == []


@fused
def test_outputs_of_any_length_cross_the_v2_protocol(gateway, protocol):
    """NVIDIA's own client gets three lines, none, and an error of one image per request.

    Triton would end if it sorted texts, or the confidences of an image without text.
    """
    client, tensor = CLIENTS[protocol], partial(image_input, protocol)

    with client.InferenceServerClient(f"127.0.0.1:{gateway.ports[protocol]}") as connection:
        label, blank = (connection.infer("read_text", [tensor(image)]) for image in (LABEL, BLANK))
        with pytest.raises(InferenceServerException, match="one image per request"):
            connection.infer("read_text", [tensor(LABEL, LABEL)])
        for name, reason in (("text", "needs numbers, got BYTES"), ("confidence", "needs a fixed length")):
            outputs = [client.InferRequestedOutput(name, class_count=2)]
            with pytest.raises(InferenceServerException, match=f"classification {reason}"):
                connection.infer("read_text", [tensor(BLANK)], outputs=outputs)
        for names in (("text",), ("confidence", "box"), ("text", "confidence", "box")):
            outputs = [client.InferRequestedOutput(name) for name in names]
            nothing = connection.infer("read_text", [tensor(BLANK)], outputs=outputs)
            assert [nothing.as_numpy(name).size for name in names] == [0] * len(names)

    words = [word if isinstance(word, str) else word.decode() for word in label.as_numpy("text")[0]]
    assert words == WORDS
    assert (label.as_numpy("box").shape, label.as_numpy("confidence").shape) == ((1, 3, 4, 2), (1, 3))
    shapes = [blank.as_numpy(name).shape for name in ("text", "confidence", "box")]
    assert shapes == [(1, 0), (1, 0), (1, 0, 4, 2)]
    assert gateway.json("/v1/read", BLANK)[0] == 200


@fused
def test_schemathesis_finds_no_fault(gateway, tmp_path):
    address = f"http://127.0.0.1:{gateway.ports['http']}"
    check_schema(address, tmp_path, "--include-path-regex", "read|waybill|detect|embed|models")
