"""Results on a terminal, in CSV and on drawings; the options of the commands."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from nereid.cli.image_commands.drawing import OutputFiles, draw, draw_marks
from nereid.cli.image_commands.outcomes import Outcomes, printing
from nereid.cli.image_commands.view import View
from nereid.cli.main import app
from nereid.client.client_errors import RequestRefused
from nereid.client.result_kind import Timings
from nereid.tasks.detect.result import DetectedObject, Detection
from nereid.tasks.detect.view import VIEW as OBJECTS
from nereid.tasks.read.result import Barcode, Correction, Field, Reading, TextLine
from nereid.tasks.read.view import VIEW as TEXTS
from tests.pictures import png_chunk, save
from tests.tables import cases

BOX = ((10.0, 20.0), (50.0, 20.0), (50.0, 40.0), (10.0, 40.0))
SOURCE = ("model", "1", "v1", "weight", "id", Timings(1, 2), "a.jpg")
FIELDS = (
    Field("number", "RA100", 0.5, BOX, True, (Correction(3, "O", "0"),), "label+checksum", "DHL", True),
    Field("weight", None, 0.0, None, None),
    Field("code", "12", 0.25, tuple((x + 0.05, y - 0.05) for x, y in BOX), False),
)
BARCODES = (Barcode("7", "ITF", tuple((x, y + 50) for x, y in BOX)),)
READING = Reading((TextLine("a [red]b", 0.5, BOX),), FIELDS, BARCODES, *SOURCE)
EMPTY = Reading((), (), (), *SOURCE)
DETECTION = Detection((DetectedObject("cat", 0.5, (1.0, 2.0, 30.0, 40.5)),), *SOURCE)


def printed(capsys: Any, form: Any, view: View, *results: Any) -> str:
    with printing(form, view) as write:
        for result in results:
            write("a.jpg", result)
    text: str = capsys.readouterr().out
    return text


def rows(text: str) -> list[dict[str, str]]:
    others = {"image", "variant", "version", "latency_ms", "error"}
    reader = csv.DictReader(io.StringIO(text))
    return [{name: value for name, value in row.items() if name not in others} for row in reader]


def test_csv_has_lines_and_fields(capsys):
    line, number, weight, code, bars, empty = rows(printed(capsys, "csv", TEXTS, READING, EMPTY))

    flat = "10 20 50 20 50 40 10 40"
    about = {"entry": "line", "name": "", "text": "a [red]b", "confidence": "0.5", "valid": "", "box": flat}
    proof = {"proof": "label+checksum", "carrier": "DHL", "certain": "yes"}
    about["page"] = "1"
    assert line == {**about, **dict.fromkeys(proof, "")}
    about |= {"entry": "field", "name": "number", "text": "RA100", "valid": "yes"}
    assert number == {**about, **proof}
    assert (weight["text"], weight["box"], weight["valid"], code["valid"]) == ("", "", "", "no")
    shown = [bars[name] for name in ("entry", "name", "text", "box")]
    assert shown == ["barcode", "ITF", "7", "10 70 50 70 50 90 10 90"]
    assert {*empty.values()} == {""}


def test_csv_has_objects(capsys):
    (row, empty) = rows(printed(capsys, "csv", OBJECTS, DETECTION, Detection((), *SOURCE)))

    sides = {"left": "1.0", "top": "2.0", "right": "30.0", "bottom": "40.5"}
    assert row == {"label": "cat", "score": "0.5", **sides}
    assert {*empty.values()} == {""}


@pytest.mark.parametrize("view", [TEXTS, OBJECTS], ids=["texts", "objects"])
def test_error_fills_one_row(capsys, view):
    (row,) = csv.DictReader(io.StringIO(printed(capsys, "csv", view, RequestRefused("why"))))

    assert {name: value for name, value in row.items() if value} == {"image": "a.jpg", "error": "why"}


def test_field_is_drawn_instead_of_its_line():
    assert [text for _, text in TEXTS.marks(READING)] == ["7", "number: RA100", "code: 12"]
    assert [text for _, text in TEXTS.marks(replace(READING, fields=FIELDS[2:]))] == ["7", "code: 12"]
    assert TEXTS.marks(EMPTY) == []


def test_marks_are_drawn_inside_of_the_image():
    picture = Image.new("RGB", (200, 100), "white")
    outside = ((-20.0, -30.0), (300.0, -30.0), (300.0, 5.0), (-20.0, 5.0))

    draw_marks(picture, [(outside, "top"), (BOX, "快递")])
    for size in ((1, 1), (3, 2000)):
        draw_marks(Image.new("RGB", size), [(BOX, "text"), (((0.0, 0.0),) * 4, "")])

    assert picture.getpixel((199, 99)) == (255, 255, 255)
    assert picture.getpixel((10, 30)) != (255, 255, 255)
    assert len(picture.crop((0, 0, 40, 20)).getcolors()) > 2


def test_images_of_one_name_have_their_own_drawings(tmp_path):
    drawings = OutputFiles("--draw", tmp_path / "out", (".png",), 2)

    for folder in ("a", "b"):
        image = tmp_path / folder / "x.jpg"
        image.parent.mkdir()
        Image.new("RGB", (60, 60)).save(image)
        draw(image, [(BOX, "")], drawings.path_of(image))

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["x.jpg-2.png", "x.jpg.png"]


def test_picture_is_drawn_whatever_its_texts_are(tmp_path):
    """Pillow refuses the file for a chunk that changes no pixel, and the server reads it."""
    encoded = save(Image.new("RGB", (60, 60), "lime"))
    (tmp_path / "x.png").write_bytes(encoded[:33] + png_chunk(b"cHRM", b"short") + encoded[33:])

    draw(tmp_path / "x.png", [], tmp_path / "out.png")

    with Image.open(tmp_path / "out.png") as drawn:
        assert drawn.getcolors() == [(3600, (0, 255, 0))]


def test_image_that_is_gone_is_a_failure(tmp_path, capsys):
    drawings = OutputFiles("--draw", tmp_path / "out", (".png",), 2)
    savers = [lambda image, outcome: drawings.path_of(image)]
    outcomes = Outcomes(lambda images: [READING], lambda name, outcome: None, savers)

    assert outcomes.all_of([Path("a.jpg")], "reading") == 1
    assert "a.jpg: 'a.jpg' is not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["classify", "read", "detect"])
@cases(
    nothing=([], "nothing to {}: expected IMAGE or DIR, or --watch DIR"),
    formats=(["a.jpg", "--json", "--csv"], "--json, --jsonl and --csv exclude each other"),
    endless=(["--watch", ".", "--json"], "--json cannot be combined with --watch; fix: --jsonl"),
    no_image=(["tests", "--url", "localhost"], "'tests' has no image"),
    url=(["docs/page-read.png", "--url", "localhost"], "--url must be HOST:PORT"),
)
def test_wrong_usage_is_named(words, message, command, root, monkeypatch):
    monkeypatch.chdir(root)

    done = CliRunner().invoke(app, [command, *words])

    assert (done.exit_code, message.format(command) in done.stderr) == (2, True)
