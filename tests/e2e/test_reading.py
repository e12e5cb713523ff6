"""Text is read by the real server: both forms, HTTP and gRPC, bad input, shared batches, bounded memory."""

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from PIL import Image, ImageFilter
from tritonclient.utils import InferenceServerException

from nereid import metrics_page
from nereid.assets import PARCEL_LABEL, TEXT_REPOSITORY
from nereid.contract import BOX, CONFIDENCE, DEADLINE_PARAMETER, FIELD, IMAGE, TEXT, VARIANT
from nereid.server.command_line import ServerOptions
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.ports import Ports, free_ports
from nereid.server.supervision.process_usage import memory_bytes
from nereid.triton import stub_processes
from tests.e2e.conftest import url
from tests.readers import LINES, encoded, page
from tests.routes import WATCHDOG_S, wait_until
from tests.tables import cases

pytestmark = pytest.mark.slow

LABEL = PARCEL_LABEL.read_bytes()
CLIENTS: dict[str, ModuleType] = {"http": tritonclient.http, "grpc": tritonclient.grpc}
EXPECTED = [line.replace(" ", "") for line in LINES]


def running(folder: Path, profile: str) -> EmbeddedServer:
    """Build a server of the text repository on free ports."""
    options = ServerOptions(repository=TEXT_REPOSITORY, profile=profile, ports=Ports(*free_ports(3)))
    return EmbeddedServer(options, folder, os.environ)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory) -> Iterator[EmbeddedServer]:
    """A running server whose reader has its networks in its own process."""
    with running(tmp_path_factory.mktemp("cpu"), "cpu") as server:
        yield server


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[EmbeddedServer]:
    """A running server whose networks are models."""
    with running(tmp_path_factory.mktemp("ensemble"), "ensemble") as server:
        yield server


@pytest.fixture(params=["in_process", pytest.param("served", marks=pytest.mark.slow)])
def server(request) -> EmbeddedServer:
    """A running server, in each form."""
    found: EmbeddedServer = request.getfixturevalue(request.param)
    return found


def read(
    server: EmbeddedServer,
    *images: bytes,
    protocol: str = "http",
    model: str = "read_text",
    outputs: Sequence[str] = (TEXT, CONFIDENCE, BOX),
    **options: Any,
) -> dict[str, np.ndarray]:
    """Send one request; returns its outputs by name, without the batch dimension."""
    module = CLIENTS[protocol]
    tensor = module.InferInput(IMAGE, [len(images), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[image] for image in images], object))
    address, patience = f"127.0.0.1:{getattr(server.options.ports, protocol)}", {}
    if (
        protocol == "http"
    ):  # its client gives up after a minute, which a large page may need on a busy machine
        patience["network_timeout"] = 10 * WATCHDOG_S
    with module.InferenceServerClient(address, **patience) as client:
        result = client.infer(model, [tensor], **options)
    return {name: result.as_numpy(name)[0] for name in outputs}


def texts(outputs: dict[str, np.ndarray]) -> list[str]:
    """Return the lines without their spaces, which the network sometimes leaves out."""
    return [text.decode().replace(" ", "") for text in outputs[TEXT]]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_lines_are_read_over_each_protocol(server, protocol):
    """The route passes on text, confidence and boxes, and the variant."""
    found = read(server, encoded(page()), protocol=protocol, outputs=(TEXT, CONFIDENCE, BOX, VARIANT))

    assert texts(found) == EXPECTED
    assert (found[CONFIDENCE].dtype, found[BOX].shape) == (np.float32, (3, 4, 2))
    assert found[VARIANT].tolist() == [b"v1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "image",
    [
        LABEL,
        encoded(page().rotate(90, expand=True)),
        encoded(page().rotate(180)),
        encoded(page().transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
        encoded(page().filter(ImageFilter.GaussianBlur(2)), "JPEG", quality=20),
        encoded(Image.new("RGB", (640, 480), "white")),
        encoded(Image.new("RGB", (1, 1))),
    ],
    ids=["label", "side", "head", "mirrored", "blurred", "empty", "pixel"],
)
def test_both_forms_answer_equally(in_process, served, image):
    """Equal text and boxes; the networks run in equal batches, so that even the confidences are equal."""
    one, other = (read(server, image) for server in (in_process, served))

    assert one[TEXT].tolist() == other[TEXT].tolist()
    assert (one[BOX] == other[BOX]).all()
    np.testing.assert_allclose(one[CONFIDENCE], other[CONFIDENCE], atol=1e-5)


def bomb() -> bytes:
    """Return the header of a PNG of 20,000 x 20,000 pixels."""
    body = b"IHDR" + (20_000).to_bytes(4) * 2 + b"\x08\x02\x00\x00\x00"
    header = (13).to_bytes(4) + body + zlib.crc32(body).to_bytes(4)
    return b"\x89PNG\r\n\x1a\n" + header + bytes(4) + b"IDAT" + zlib.crc32(b"IDAT").to_bytes(4)


BAD = {
    "empty": (b"", "invalid image: expected the bytes of an image file"),
    "text": (b"no image", "invalid image: expected an image file"),
    "cut": (encoded(page())[:400], "invalid image: "),
    "bomb": (bomb(), "invalid image: expected at most 64000000 pixels"),
    "cut_jpeg": (LABEL[:3000], "invalid image: "),
}


@cases(("image", "reason"), BAD)
def test_bad_image_is_refused(server, image, reason):
    """The error names what was expected."""
    with pytest.raises(InferenceServerException) as raised:
        read(server, image)

    assert reason in raised.value.message()


@pytest.mark.parametrize("model", ["read_text", "read_text_v1"])
def test_two_images_in_a_request_are_refused(in_process, model):
    """They would have different numbers of lines."""
    with pytest.raises(InferenceServerException) as raised:
        read(in_process, LABEL, LABEL, model=model)

    assert "invalid request: expected one image per request, got 2" in raised.value.message()


def test_expired_request_is_refused(in_process):
    """Its client no longer waits."""
    with pytest.raises(InferenceServerException) as raised:
        read(in_process, LABEL, model="read_text_v1", parameters={DEADLINE_PARAMETER: 1})

    assert "deadline exceeded: " in raised.value.message()


def test_bad_images_do_not_harm_the_requests_of_their_batch(server):
    """Requests that wait are read together; each good one gets its own lines."""
    images = [encoded(page((f"LINE {number:03}", "RB123456785GB"))) for number in range(6)]
    images[2:2], images[5:5] = [b"no image"], [LABEL[:3000]]

    def outcome(image: bytes) -> list[str] | str:
        try:
            return texts(read(server, image, model="read_text_v1"))
        except InferenceServerException as error:
            return str(error.message())

    with ThreadPoolExecutor(len(images)) as pool:
        outcomes = [*pool.map(outcome, images)]

    good = [each for each in outcomes if isinstance(each, list)]
    assert good == [[f"LINE{number:03}", "RB123456785GB"] for number in range(6)]
    assert all("invalid image: " in each for each in outcomes if isinstance(each, str))
    assert len(outcomes) == len(good) + 2


def readers(server: EmbeddedServer) -> set[int]:
    """Return the processes of the model that reads."""
    found = stub_processes.find(server.pid, TEXT_REPOSITORY)
    return {stub.process.pid for stub in found if stub.model == "read_text_v1"}


@pytest.mark.slow
def test_memory_stays_bounded(server):
    """Large, empty, noisy and crowded images leave no memory behind, and do not end the process."""
    noise = np.random.default_rng(5).integers(0, 2, (1500, 1500), np.uint8) * 255
    dots = np.full((2000, 2000), 255, np.uint8)
    dots[::12, ::12] = dots[1::12, ::12] = 0
    crowded = page(["x1 y2 z3 " * 20] * 60, 12, 1400)
    images = [
        encoded(Image.new("RGB", (7900, 7900), "white")),
        encoded(Image.new("RGB", (16_384, 1), "white")),
        encoded(Image.fromarray(noise)),
        encoded(Image.fromarray(dots)),
        encoded(crowded),
    ]
    stubs = readers(server)

    def used() -> int:
        return sum(map(memory_bytes, stubs))

    for image in [*images, *images]:  # each instance gets some of them
        read(server, image, model="read_text_v1")
    before = used()
    for image in images:
        read(server, image, model="read_text_v1")

    assert used() - before < len(stubs) * 200 * 2**20
    # The activations of an image of 4 megapixels, which ONNX Runtime keeps for the next one.
    assert used() < len(stubs) * 2000 * 2**20
    assert readers(server) == stubs


def test_waybill_has_its_fields(in_process):
    """The lines come as from the reader without fields, and each field is one JSON object."""
    outputs = (TEXT, CONFIDENCE, BOX, FIELD)
    lines = read(in_process, LABEL)
    waybill = read(in_process, LABEL, model="read_waybill", outputs=outputs)

    fields = {each["name"]: each for each in map(json.loads, waybill[FIELD])}
    tracking = fields["tracking_number"]
    assert waybill[TEXT].tolist() == lines[TEXT].tolist()
    assert (tracking["value"], tracking["valid"]) == ("RB123456785GB", True)
    assert np.array(tracking["box"]).shape == (4, 2)
    assert {"name", "value", "confidence", "box", "valid", "corrected"} == tracking.keys()


def test_field_that_is_not_found_is_not_an_error(in_process):
    """Its value is null."""
    blank = encoded(Image.new("RGB", (640, 480), "white"))
    found = read(in_process, blank, model="read_waybill", outputs=(TEXT, FIELD))

    assert len(found[TEXT]) == 0
    assert {json.loads(each)["value"] for each in found[FIELD]} == {None}
    wait_until(lambda: missing_fields(in_process)["tracking_number"] >= 1, "the count of the required field")
    assert missing_fields(in_process).keys() == {"tracking_number"}


def missing_fields(server: EmbeddedServer) -> dict[str, float]:
    """Return how often each required field was missing, from the metrics page."""
    page = metrics_page.fetch(url(server, "metrics"), WATCHDOG_S)
    return Counter(
        {
            each.labels["field"]: each.value
            for each in metrics_page.parse(page)
            if each.name == "nereid_reader_missing_fields_total"
        }
    )
