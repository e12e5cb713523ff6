"""Clients, the command and the gateway for detection, on a real server with known boxes."""

import asyncio
import csv
import io
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.http
from PIL import Image
from tritonclient.utils import InferenceServerException

from nereid import AsyncDetector, Detection, Detector, Reader, RequestRefused
from nereid.publish.add import AddRequest, add
from nereid.server.run_dir import ServerRecord
from tests.detectors import CLASSES, KNOWN, SIDE, TestDetector
from tests.pictures import noise, save
from tests.publishing import record_of
from tests.routes import serve_routes
from tests.supervised import running_gateway

pytestmark = pytest.mark.slow

NEREID, WATCHDOG_S = str(Path(sys.executable).with_name("nereid")), 60
# Twice the side of the network's input, so every box has twice the size.
PHOTO = save(Image.fromarray(noise(2 * SIDE, 2 * SIDE)))
EXPECTED = [(CLASSES[index], score, [2 * side for side in box]) for box, score, index in KNOWN]


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Iterator[ServerRecord]:
    """A running server of one detector, `cars`."""
    folder = tmp_path_factory.mktemp("detector")
    (folder / "labels.txt").write_text("\n".join(CLASSES) + "\n")
    onnx.save(TestDetector("yolov8").build(), folder / "cars.onnx")
    labels = folder / "labels.txt"
    add(
        folder / "models",
        AddRequest(folder / "cars.onnx", "cars", {"preset": "yolo"}, labels, task="detect"),
        None,
    )
    with serve_routes(
        folder / "models", tmp_path_factory.mktemp("run"), "--model-config-name=cpu"
    ) as running:
        yield record_of(running.server)


def objects(found: Detection) -> list[tuple[str, float, list[float]]]:
    """Return labels, scores and sides of a detection."""
    return [(each.label, each.score, [*each.box]) for each in found.objects]


def same(found: list[Any]) -> bool:
    """Return whether the known objects were found, in pixels of the photo."""
    assert [label for label, _, _ in found] == [label for label, _, _ in EXPECTED]
    numbers = [[score, *box] for _, score, box in found]
    return numbers == [pytest.approx([score, *box], abs=1e-4) for _, score, box in EXPECTED]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_known_objects_are_found(record, protocol):
    """Boxes are in pixels of the photo, best first, with the variant of the route."""
    with Detector(record.url(protocol), protocol, "cars") as detector:
        found = detector.detect(PHOTO, variant="v1")
        with pytest.raises(RequestRefused, match="invalid image: "):
            detector.detect(b"no image")
        with pytest.raises(RequestRefused, match="unknown x-variant 'v9'"):
            detector.detect(PHOTO, variant="v9")

    assert same(objects(found))
    assert (found.model, found.variant, found.reason, found.version) == ("cars", "v1", "variant", "1")


def test_stream_is_searched_from_asyncio(record):
    """Outcomes keep their order; a bad image fails alone."""

    async def run() -> list[str]:
        async with AsyncDetector(record.url("http"), "http", "cars") as detector:
            return [type(each).__name__ async for each in detector.detect_many([PHOTO, b"bad", PHOTO])]

    assert asyncio.run(run()) == ["Detection", "RequestRefused", "Detection"]


def test_reader_does_not_take_a_detector(record):
    """The message has the outputs of the model."""
    with (
        Reader(record.url("grpc"), model="cars") as reader,
        pytest.raises(RequestRefused, match="no output 'text'"),
    ):
        reader.read(PHOTO)


def test_command_prints_and_draws(record, tmp_path):
    """JSON and CSV have the known objects; the drawing has their boxes."""
    (tmp_path / "a.png").write_bytes(PHOTO)
    line = [NEREID, "detect", "--url", record.url("grpc"), "--model", "cars", str(tmp_path / "a.png")]

    def run(*words: str) -> str:
        done = subprocess.run([*line, *words], capture_output=True, text=True, timeout=WATCHDOG_S)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    (document,) = json.loads(run("--json", "--draw", str(tmp_path / "drawn.png")))
    rows = list(csv.DictReader(io.StringIO(run("--csv"))))
    table = run()

    assert same([(each["label"], each["score"], each["box"]) for each in document["objects"]])
    sides = ("left", "top", "right", "bottom")
    assert same([(row["label"], float(row["score"]), [float(row[side]) for side in sides]) for row in rows])
    assert all(label in table for label, _, _ in EXPECTED)
    with Image.open(tmp_path / "drawn.png") as drawn, Image.open(io.BytesIO(PHOTO)) as plain:
        assert drawn.size == plain.size
        assert drawn.tobytes() != plain.tobytes()


def post(address: str, body: bytes) -> tuple[int, Any]:
    """Send an image to a gateway; return the status and the JSON."""
    request = urllib.request.Request(address, body, {"Content-Type": "image/png"})
    try:
        with urllib.request.urlopen(request, timeout=WATCHDOG_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


def test_gateway_finds_objects(record, tmp_path):
    """The endpoint answers; others name it; classes of scores that may be none are refused."""
    words = "--url", record.url("http"), "--model", "cars"
    with running_gateway(tmp_path / "log", *words) as ports:
        base = f"http://127.0.0.1:{ports['http']}"
        status, answer = post(f"{base}/v1/detect", PHOTO)
        _, wrong = post(f"{base}/v1/models/cars/read", PHOTO)
        _, missing = post(f"{base}/predict", PHOTO)
        bad, error = post(f"{base}/v1/detect", b"no image")
        tensor = tritonclient.http.InferInput("image", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[PHOTO]], dtype=object))
        outputs = [tritonclient.http.InferRequestedOutput("score", class_count=2)]
        with (
            tritonclient.http.InferenceServerClient(f"127.0.0.1:{ports['http']}") as client,
            pytest.raises(InferenceServerException, match="needs a fixed length"),
        ):
            client.infer("cars", [tensor], outputs=outputs)

    assert status == 200
    assert same([(each["label"], each["score"], each["box"]) for each in answer["objects"]])
    assert answer["variant"] == "v1"
    assert "model 'cars' finds objects" in wrong["error"]["message"]
    assert "fix: POST /v1/models/cars/detect" in wrong["error"]["message"]
    assert "got: cars finds objects" in missing["error"]["message"]
    assert (bad, error["error"]["code"]) == (400, "invalid_image")
