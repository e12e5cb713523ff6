"""Barcodes on pages, drawn by ZXing and read by the reader."""

import numpy as np
import pytest
import zxingcpp
from PIL import Image, ImageFilter

from nereid.tasks.read.barcodes import find_barcodes
from nereid.tasks.read.line_images import UprightDecoder, UprightImage
from nereid.tasks.read.result import Barcode
from nereid.tasks.read.stages import StageTimes
from nereid.vision.imaging.decode import ImageLimits
from tests.pictures import save
from tests.readers import page, reader
from tests.tables import cases

GS1 = "(00)340123450000000018(10)AB-12"
# A number of each symbology, as carriers print it.
PRINTED = {
    "Code 128": ("Code128", "1Z999AA10123456784"),
    "Code 39": ("Code39", "RB123456785GB"),
    "ITF": ("ITF", "00340123450000000018"),
    "EAN-13": ("EAN13", "4006381333931"),
    "GS1-128": ("Code128", GS1),
    "PDF417": ("PDF417", "7995312744830201"),
    "Data Matrix": ("DataMatrix", "JD014600012345678901"),
    "GS1 DataMatrix": ("DataMatrix", GS1),
    "QR Code": ("QRCode", "https://example.com/运单"),
    "Aztec": ("Aztec", "hello"),
}


def bars(kind: str, text: str, scale: int = 3) -> Image.Image:
    options = {"gs1": True} if text == GS1 else {}
    made = zxingcpp.create_barcode(text, getattr(zxingcpp.BarcodeFormat, kind), **options)
    return Image.fromarray(np.array(zxingcpp.write_barcode_to_image(made, scale=scale)))


def label(symbol: Image.Image) -> Image.Image:
    sheet = page(["HELLO WORLD 2026"], width=1100)
    tall = Image.new("RGB", (1100, sheet.height + symbol.height + 60), "white")
    tall.paste(sheet)
    tall.paste(symbol, (150, sheet.height))
    return tall


def upright(sheet: Image.Image) -> UprightImage:
    return UprightDecoder(ImageLimits())(save(sheet), StageTimes())


@pytest.mark.parametrize("symbology", PRINTED)
def test_every_symbology_is_read_in_every_direction(symbology):
    kind, text = PRINTED[symbology]
    sheet = label(bars(kind, text))
    for turn in range(4):
        (barcode,) = find_barcodes(upright(sheet.rotate(90 * turn, expand=True)))
        assert (barcode.symbology, barcode.text) == (symbology, text)


@pytest.mark.parametrize("symbology", ["Code 128", "GS1-128"])
def test_blurred_code_128_is_read_in_every_direction(symbology):
    kind, text = PRINTED[symbology]
    sheet = label(bars(kind, text))
    (sharp,), blurred = find_barcodes(upright(sheet)), sheet.filter(ImageFilter.GaussianBlur(2.5))
    assert not zxingcpp.read_barcodes(blurred)
    for turn in range(4):
        (barcode,) = find_barcodes(upright(blurred.rotate(90 * turn, expand=True)))
        assert (barcode.symbology, barcode.text) == (symbology, text)
    (barcode,) = find_barcodes(upright(blurred))
    np.testing.assert_allclose(barcode.box, sharp.box, atol=20)


@pytest.mark.parametrize("blur_px", [0, 3])
def test_bars_without_a_right_check_symbol_are_not_read(blur_px):
    """Of bars at random, and of those of a number of which one symbol is another."""
    draw = np.random.default_rng(1)
    symbol = np.array(bars("Code128", "RB123456785GB", 4))
    at = 10 * 4 + 11 * 4 * 5
    wrong = symbol.copy()
    wrong[:, at : at + 44] = symbol[:, at + 44 : at + 88]
    random = np.repeat(draw.integers(0, 2, 200, np.uint8) * 255, 4)[None].repeat(200, axis=0)
    for pixels in (wrong, random):
        sheet = label(Image.fromarray(pixels)).filter(ImageFilter.GaussianBlur(blur_px))
        assert not find_barcodes(upright(sheet))


def test_corners_are_those_of_the_symbol_in_the_original():
    symbol = bars("Code128", "1Z999AA10123456784", 8)
    sheet = Image.new("RGB", (3000, 4000), "white")
    sheet.paste(symbol, (500, 3000))

    (barcode,) = find_barcodes(upright(sheet))

    (left, top), (right, bottom) = barcode.box.min(axis=0), barcode.box.max(axis=0)
    quiet = 10 * 8  # modules at each side of Code 128
    assert [left, right] == pytest.approx([500 + quiet, 500 + symbol.width - quiet], abs=16)
    assert [top, bottom] == pytest.approx([3000, 3000 + symbol.height], abs=16)


def test_only_pages_that_have_bars_and_are_searched_have_barcodes():
    marked = save(label(bars("QRCode", "hello")))
    reads, plain = reader(reads_barcodes=True), reader()

    (lines, _, _) = reads.read([marked, save(page()), b"no image"])
    plain.read([marked])

    assert [line.text for line in lines] == ["HELLO WORLD 2026"]
    assert [[barcode.text for barcode in file.barcodes] for file in reads.files] == [["hello"], [], []]
    assert plain.files[0].barcodes == []


@cases(
    linear=("GS1-128", GS1, {"00": "340123450000000018", "10": "AB-12"}),
    long_identifiers=("GS1 DataMatrix", "(420)90210(8008)1", {"420": "90210", "8008": "1"}),
    parentheses_in_a_value=("GS1 QR Code", "(10)A(B)C(21)7", {"10": "A(B)C", "21": "7"}),
    another_symbology=("QR Code", "(00)12", {}),
)
def test_values_of_gs1_are_named(symbology, text, elements):
    assert Barcode(text, symbology, ()).elements == elements
