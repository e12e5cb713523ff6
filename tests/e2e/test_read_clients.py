"""Clients and commands that read text, on a real server: both protocols, formats, drawings, bad images."""

import asyncio
import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nereid import AsyncReader, Detector, Reader, RequestRefused
from nereid.assets import COFFEE
from nereid.server.embedded_server import EmbeddedServer
from tests.e2e.conftest import url
from tests.labels import BLANK, LABEL, WORDS, label
from tests.pictures import save
from tests.routes import WATCHDOG_S

pytestmark = pytest.mark.slow

pytest.importorskip("cv2", reason="opencv is not installed: extra text")
NEREID = str(Path(sys.executable).with_name("nereid"))
both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


@pytest.fixture
def images(tmp_path) -> Path:
    """A folder with a label, a blank image, a damaged and an empty one."""
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "label.png").write_bytes(LABEL)
    (folder / "blank.png").write_bytes(BLANK)
    return folder


def command(server: EmbeddedServer, *words: object, name: str = "read") -> "subprocess.CompletedProcess[str]":
    """Run `nereid read` on a server."""
    line = [NEREID, name, "--url", url(server, "grpc"), *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=WATCHDOG_S)


@both_protocols
@pytest.mark.parametrize("shared_memory", [None, "system"])
def test_lines_are_read_in_order(text_server, protocol, shared_memory):
    """Lines, boxes and the variant are the same over both protocols, and through shared memory."""
    with Reader(url(text_server, protocol), protocol, shared_memory=shared_memory) as reader:
        found = reader.read(LABEL, route_key="alice")

    assert [line.text for line in found.lines] == WORDS
    assert (found.model, found.version, found.variant, found.reason) == ("read_text", "1", "v1", "route-key")
    for place, line in enumerate(found.lines):
        assert 0.8 < line.confidence <= 1
        (left, top), _, (right, bottom), _ = line.box
        assert 40 < left < 70
        assert 30 + 140 * place < top < bottom < 130 + 140 * place
        assert 300 < right < 600


@both_protocols
def test_image_without_text_has_no_lines(text_server, protocol):
    """Empty outputs cross both protocols; no text is not an error."""
    with Reader(url(text_server, protocol), protocol) as reader:
        assert reader.read(BLANK).lines == ()


@both_protocols
def test_fields_of_a_document_are_read(text_server, protocol):
    """The checksum proves the number; a missing field has no value, without an error."""
    with Reader(url(text_server, protocol), protocol, "read_waybill") as reader:
        found, blank = reader.read(LABEL), reader.read(BLANK)

    fields = {field.name: field for field in found.fields}
    number = fields["tracking_number"]
    assert (number.value, number.valid, number.corrected) == (WORDS[1], True, ())
    assert np.allclose(number.box, found.lines[1].box, atol=0.1)
    assert number.confidence == pytest.approx(found.lines[1].confidence, abs=0.05)
    assert {field.name for field in blank.fields} == {*fields}
    assert {field.value for field in blank.fields} == {None}


@both_protocols
@pytest.mark.parametrize(
    ("image", "options", "message"),
    [
        (b"no image", {}, "invalid image: "),
        (b"", {}, "invalid image: "),
        (LABEL[:2000], {}, "invalid image: "),
        (LABEL, {"variant": "v9"}, "unknown x-variant 'v9'"),
        (LABEL, {"version": "9"}, "9"),
    ],
    ids=["no image", "empty", "truncated", "variant", "version"],
)
def test_bad_requests_are_refused(text_server, protocol, image, options, message):
    """Each is the caller's fault, and the server goes on."""
    with Reader(url(text_server, protocol), protocol) as reader:
        with pytest.raises(RequestRefused, match=message):
            reader.read(image, **options)
        assert len(reader.read(LABEL).lines) == 3


def test_other_models_are_refused(text_server):
    """A model of another task, and one that does not exist, are named."""
    address = url(text_server, "grpc")
    with Detector(address, model="read_text") as other, pytest.raises(RequestRefused, match="no output"):
        other.detect(LABEL)
    with Reader(address, model="nothing") as unknown, pytest.raises(RequestRefused, match="nothing"):
        unknown.read(LABEL)


@both_protocols
def test_stream_is_read_from_asyncio(text_server, protocol):
    """Outcomes keep their order; a bad image fails alone."""

    async def run() -> list[str]:
        async with AsyncReader(url(text_server, protocol), protocol) as reader:
            images = [LABEL, b"bad", BLANK, LABEL]
            return [
                type(each).__name__ if isinstance(each, Exception) else f"{len(each.lines)}"
                async for each in reader.read_many(images)
            ]

    assert asyncio.run(run()) == ["3", "RequestRefused", "0", "3"]


def test_command_prints_a_table(text_server, images):
    """The table has text, confidence and place; for a blank image it says so, without a failure."""
    done = command(text_server, images)

    assert (done.returncode, done.stderr) == (0, "")
    assert all(word in done.stdout for word in [*WORDS, "no text", "variant v1 by weight"])


def test_formats_have_every_line(text_server, images):
    """JSON and CSV have the same lines; an image without text has one row with empty cells."""
    (images / "bad.png").write_bytes(b"bad")

    documents = json.loads(command(text_server, images, "--json").stdout)
    done = command(text_server, images, "--csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))

    assert [Path(each["image"]).name for each in documents] == ["bad.png", "blank.png", "label.png"]
    assert documents[0]["error"].startswith("invalid image: ")
    assert documents[1]["lines"] == []
    assert [line["text"] for line in documents[2]["lines"]] == WORDS
    assert [(Path(row["image"]).name, row["entry"], row["text"]) for row in rows] == [
        ("bad.png", "", ""),
        ("blank.png", "", ""),
        *(("label.png", "line", word) for word in WORDS),
    ]
    corners = [point for point in documents[2]["lines"][0]["box"] for point in point]
    assert [float(each) for each in rows[2]["box"].split()] == pytest.approx(corners, rel=1e-4)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "error: 1 of 3 images could not be read")


def test_command_prints_fields(text_server, images, tmp_path):
    """The table and CSV have the fields, too; a blank image fails nothing."""
    words = (images, "--model", "read_waybill")
    done = command(text_server, *words, "--draw", tmp_path / "drawn")
    rows = list(csv.DictReader(io.StringIO(command(text_server, *words, "--csv").stdout)))

    assert (done.returncode, done.stderr) == (0, "")
    line = next(line for line in done.stdout.splitlines() if "tracking_number" in line and WORDS[1] in line)
    assert "yes" in line
    assert done.stdout.count("not found") > 1
    found = {
        row["name"]: (row["text"], row["valid"])
        for row in rows
        if row["entry"] == "field" and "label" in row["image"]
    }
    assert found["tracking_number"] == (WORDS[1], "yes")
    assert len(list((tmp_path / "drawn").iterdir())) == 2


def test_boxes_are_drawn(text_server, images, tmp_path):
    """A folder gets a picture of each image, a file one picture; boxes are where the text is."""
    (images / "turned.jpg").write_bytes(save(label(*WORDS).rotate(90, expand=True), "JPEG"))

    done = command(text_server, images, "--draw", tmp_path / "drawn")
    one = command(text_server, images / "label.png", "--draw", tmp_path / "one.webp")

    assert (done.returncode, one.returncode) == (0, 0)
    names = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert names == ["blank.png.png", "label.png.png", "turned.jpg.png"]
    with Image.open(tmp_path / "drawn" / "label.png.png") as drawn, Image.open(io.BytesIO(LABEL)) as plain:
        assert drawn.size == plain.size
        assert drawn.tobytes() != plain.tobytes()
        assert drawn.getpixel((899, 499)) == (255, 255, 255)
    with Image.open(tmp_path / "drawn" / "blank.png.png") as drawn:
        assert drawn.convert("L").getextrema() == (255, 255)
    with Image.open(tmp_path / "one.webp") as drawn:
        assert drawn.size == (900, 500)


def test_wrong_usage_of_drawings_is_named(text_server, images, tmp_path):
    """One file cannot hold several drawings; a folder that cannot be written fails each image."""
    done = command(text_server, images, "--draw", tmp_path / "one.png")
    (tmp_path / "taken").write_text("")
    blocked = command(text_server, images / "label.png", "--draw", tmp_path / "taken")

    assert (done.returncode, "expected a folder for several images" in done.stderr) == (2, True)
    assert (blocked.returncode, "cannot be drawn: " in blocked.stderr) == (1, True)


def test_command_names_a_wrong_model(text_server, images):
    """The server's message has the model that it does not serve."""
    done = command(text_server, images / "label.png", "--model", "nothing")

    assert (done.returncode, "'nothing'" in done.stderr) == (1, True)


def test_detect_on_a_reader_names_the_outputs(text_server):
    """`nereid detect` does not take boxes of text for objects."""
    done = command(text_server, COFFEE, "--model", "read_text", name="detect")

    assert done.returncode == 1
    assert "model 'read_text' has no output 'score', 'label'" in done.stderr
