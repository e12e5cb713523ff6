"""Readers and detectors without Triton: results of every form, and responses of another task."""

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from nereid import AsyncDetector, AsyncReader, Detector, Reader
from nereid.base.assets import COFFEE
from nereid.cli.main import app
from nereid.client.client_errors import RequestRefused, Unreachable
from nereid.tasks.detect.result import DetectedObject
from nereid.tasks.read.result import Barcode, Correction, Field, TextLine
from tests.classifiers import Script, opened, serving, tensor_response
from tests.tables import cases

both_ways = pytest.mark.parametrize("way", ["sync", "async"])
PHOTO = COFFEE.read_bytes()
READERS, DETECTORS = (Reader, AsyncReader), (Detector, AsyncDetector)
READ, WAYBILL = ("text", "confidence", "box"), ("text", "confidence", "box", "field")
DETECT = ("box", "score", "label")
CORNERS = ((1.0, 2.0), (5.0, 2.0), (5.0, 4.0), (1.0, 4.0))
FIELD = {"name": "tracking_number", "value": "RA123456785CN"}
FIELD |= {"confidence": 0.5, "box": [[1, 2], [5, 2], [5, 4], [1, 4]]}
FIELD |= {"valid": True, "corrected": [{"position": 3, "from": "O", "to": "0"}]}
MISSING = {"name": "weight", "value": None, "confidence": 0, "box": None, "valid": None, "corrected": []}


def texts(*values: bytes) -> np.ndarray:
    return np.array([values], dtype=object)


def reading(*lines: str, fields: tuple[Any, ...] | None = None) -> bytes:
    tensors = {
        "text": texts(*(line.encode() for line in lines)),
        "confidence": np.full((1, len(lines)), 0.25, np.float32),
        "box": np.tile(np.array(CORNERS, np.float32), (1, len(lines), 1, 1)),
    }
    if fields is not None:
        tensors["field"] = texts(*(json.dumps(field).encode() for field in fields))
    return tensor_response(**tensors)


def detection(*labels: str) -> bytes:
    return tensor_response(
        box=np.tile(np.array([1, 2, 5, 4], np.float32), (1, len(labels), 1)),
        score=np.full((1, len(labels)), 0.75, np.float32),
        label=texts(*(label.encode() for label in labels)),
    )


def scripted(outputs: tuple[str, ...], *steps: Any) -> Script:
    script = Script(*steps)
    script.outputs = outputs
    return script


@both_ways
@pytest.mark.parametrize("lines", [(), ("快递单号", "两行 text")], ids=["none", "chinese"])
def test_lines_are_read(way, lines):
    with serving(scripted(READ, reading(*lines))) as url, opened(way, url, "http", kinds=READERS) as reader:
        result = reader.read(PHOTO)
        many = [photo.lines for photo in reader.read_many([PHOTO] * 3)]

    assert many == [result.lines] * 3
    assert result.lines == tuple(TextLine(line, 0.25, CORNERS) for line in lines)
    assert (result.fields, result.model, result.version, result.image) == ((), "read_text", "1", "")
    assert result.timings.attempts == 1


def test_fields_are_read():
    script = scripted(WAYBILL, reading(fields=(FIELD, MISSING)))
    with serving(script) as url, Reader(url, "http", "read_waybill") as reader:
        result = reader.read(PHOTO)

    assert result.fields == (
        Field("tracking_number", "RA123456785CN", 0.5, CORNERS, True, (Correction(3, "O", "0"),)),
        Field("weight", None, 0.0, None, None),
    )
    assert b'"name":"field"' in script.peers[0][1]


def test_barcodes_are_read():
    bars = {"barcode": texts(b"(00)1"), "symbology": texts(b"GS1-128"), "barcode_box": GOOD["box"]}
    script = scripted((*READ, *bars), tensor_response(**GOOD, **bars))
    with serving(script) as url, Reader(url, "http") as reader:
        result = reader.read(PHOTO)

    assert result.barcodes == (Barcode("(00)1", "GS1-128", ((0.0, 0.0),) * 4),)


@both_ways
@pytest.mark.parametrize("labels", [(), ("cat", "7")], ids=["none", "two"])
def test_objects_are_found(way, labels):
    script = scripted(DETECT, detection(*labels))
    with serving(script) as url, opened(way, url, "http", kinds=DETECTORS) as detector:
        result = detector.detect(PHOTO)
        (again,) = detector.detect_many([PHOTO])

    assert (again.objects, result.model) == (result.objects, "detect")
    assert result.objects == tuple(DetectedObject(label, 0.75, (1.0, 2.0, 5.0, 4.0)) for label in labels)


@cases(
    classifier=(Reader, ("scores",), "no output 'text', 'confidence', 'box', it has: scores"),
    reader=(Detector, READ, "no output 'score', 'label', it has: box, confidence, text"),
)
def test_model_of_another_task_is_refused(kind, outputs, missing):
    script = scripted(outputs, reading())
    with serving(script) as url, kind(url, "http") as client, pytest.raises(RequestRefused, match=missing):
        client.infer(PHOTO)

    assert script.peers == []


@cases(
    read=("read", READ, reading("two"), ["line,,two,0.25,,1 2 5 2 5 4 1 4,,,,1"]),
    detect=("detect", DETECT, detection("cat", "7"), ["cat,0.75,1.0,2.0,5.0,4.0", "7,0.75,1.0,2.0,5.0,4.0"]),
)
def test_command_prints_and_draws_the_results_of_its_task(command, outputs, response, rows, tmp_path):
    drawn = tmp_path / "drawn.png"
    with serving(scripted(outputs, response)) as url:
        words = [command, str(COFFEE), "--url", url, "--protocol", "http", "--csv", "--draw", str(drawn)]
        done = CliRunner().invoke(app, words)

    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()[1:]
    assert all(line.startswith(f"{COFFEE},{row},,1,") for line, row in zip(lines, rows, strict=True)), lines
    assert drawn.is_file()


GOOD = {"text": texts(b"a"), "confidence": np.zeros((1, 1)), "box": np.zeros((1, 1, 4, 2))}


@cases(
    "tensors",
    lengths=GOOD | {"confidence": np.zeros((1, 2))},
    boxes=GOOD | {"box": np.zeros((1, 1, 4))},
    missing={"text": texts(b"a"), "confidence": np.zeros((1, 1))},
    encoding=GOOD | {"text": texts(b"\xff")},
    field=GOOD | {"field": texts(b"{}")},
    json=GOOD | {"field": texts(b"no JSON")},
)
def test_malformed_reading_is_the_networks_fault(tensors):
    script = scripted(WAYBILL, tensor_response(**tensors))
    with serving(script) as url, Reader(url, "http") as reader, pytest.raises(Unreachable):
        reader.read(PHOTO, timeout_s=2)
