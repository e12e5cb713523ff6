"""Pages of PDF files and TIFFs: which are read, what is refused, and PDF files whose text can be searched."""

import io
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.TiffImagePlugin import AppendingTiffWriter

from nereid.base.errors import InvalidImage
from nereid.client.result_kind import Timings
from nereid.tasks.read.result import PageSize, Reading, TextLine
from nereid.vision.imaging import decode
from nereid.vision.imaging.decode import ImageLimits, upright_picture
from tests.pictures import exif, save
from tests.readers import page, reader
from tests.tables import cases

pytest.importorskip("cv2", reason="opencv is not installed: extra text")
pypdfium2 = pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed: extra text")
pdf = pytest.importorskip("nereid.tasks.read.pdf")

WIDE, HIGH = page(("HELLO WORLD 2026",)), page(("second row", "third row"), width=400)
BLANK = Image.new("RGB", (300, 200), "white")
# Sides of a line, in parts of the page.
LEFT, TOP, RIGHT, BOTTOM = 0.1, 0.3, 0.6, 0.6
CATALOGUE, NO_PAGES = b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Kids [] /Count 0 >>"


def document(*images: Image.Image, form: str = "PDF", **options: str) -> bytes:
    first, *more = (image.copy() for image in images)  # a format leaves its options on an image
    return save(first, form, save_all=True, append_images=more, **options)


def written(*objects: bytes, trailer: bytes = b"") -> bytes:
    """Return a PDF file of objects, numbered from 1; the first one is its catalogue."""
    body = b"".join(b"%d 0 obj\n%b\nendobj\n" % numbered for numbered in enumerate(objects, 1))
    return b"%PDF-1.7\n" + body + b"trailer << /Root 1 0 R " + trailer + b" >>\n%%EOF\n"


def endless() -> bytes:
    """Draw forms that draw forms: 10 ** 12 of them."""
    pages = b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"
    drawing, used = b"/Contents 4 0 R /MediaBox [0 0 300 200] ", b"/Resources << /XObject << /F %d 0 R >> >> "
    page = b"<< /Type /Page /Parent 2 0 R " + drawing + used % 5 + b">>"
    content = b"<< /Length 5 >>\nstream\n/F Do\nendstream"
    form = b"<< /Subtype /Form /BBox [0 0 9 9] %b/Length %d >>\nstream\n%b\nendstream"
    calls = b"/F Do " * 10
    forms = [form % (used % (number + 1), len(calls), calls) for number in range(5, 17)]
    return written(CATALOGUE, pages, page, content, *forms, form % (b"", 11, b"0 0 9 9 re f"))


def reading(*lines: TextLine, size_wh: tuple[int, int] = WIDE.size, pages: int = 1) -> Reading:
    source = ("read_text", "1", "", "", "", Timings(0, 0))
    return Reading(lines, (), (), *source, pages=(PageSize(*size_wh),) * pages)


def encrypted() -> bytes:
    key = b"<" + b"00" * 32 + b">"
    lock = b"<< /Filter /Standard /V 1 /R 2 /P -4 /O " + key + b" /U " + key + b" >>"
    return written(CATALOGUE, NO_PAGES, trailer=b"/Encrypt " + lock + b" /ID [<00> <00>]")


@pytest.mark.parametrize("form", ["PDF", "TIFF"])
def test_every_page_is_read_and_tells_its_number(form):
    reads = reader(max_pages=3)

    (lines, other, single) = reads.read([document(WIDE, BLANK, HIGH, form=form), b"no image", save(HIGH)])

    expected = [("HELLO WORLD 2026", 1), ("second row", 3), ("third row", 3)]
    assert [(line.text, line.page) for line in lines] == expected
    assert (str(other)[:14], [line.page for line in single]) == ("invalid image:", [1, 1])
    ratios = [width / height for width, height in reads.files[0].sizes_wh]
    assert ratios == pytest.approx([image.width / image.height for image in (WIDE, BLANK, HIGH)], rel=0.01)
    assert [len(file.sizes_wh) for file in reads.files] == [3, 0, 1]


def test_thumbnail_in_a_tiff_is_no_page():
    target = io.BytesIO()
    with AppendingTiffWriter(target, True) as tiff:
        for image, subfile in ((WIDE, 0), (WIDE.resize((64, 8)), 1), (HIGH, 0)):
            image.copy().save(tiff, "TIFF", tiffinfo={254: subfile})
            tiff.newFrame()
    reads = reader(max_pages=2)

    (lines,) = reads.read([target.getvalue()])

    assert ([line.page for line in lines], len(reads.files[0].sizes_wh)) == ([1, 2, 2], 2)


def test_tiff_of_many_images_is_refused(monkeypatch):
    monkeypatch.setattr(decode, "MAX_FRAMES", 2)

    with pytest.raises(InvalidImage, match="a TIFF of at most 2 images, got more"):
        decode.pages_of(document(BLANK, BLANK, BLANK, form="TIFF"), 20)


def test_reader_of_images_reads_the_first_page_of_a_tiff_and_no_pdf():
    first, refused = reader().read([document(WIDE, HIGH, form="TIFF"), document(WIDE)])

    assert [line.text for line in first] == ["HELLO WORLD 2026"]
    assert "expected an image file" in str(refused)


def damaged(index: int) -> bytes:
    """Return a TIFF of three pages with other data in one of them."""
    file = document(WIDE, HIGH, WIDE, form="TIFF", compression="tiff_lzw")
    with Image.open(io.BytesIO(file)) as image:
        image.seek(index)
        (offset, *_) = image.tag_v2[273]
    return file[:offset] + b"\xff" * 64 + file[offset + 64 :]


FOUR = (BLANK, BLANK, BLANK, BLANK)
LATE = "page 2: expected text that is read within 0.001 s"


@cases(
    pdf_of_many_pages=(document(*FOUR), {}, "expected a PDF of 1 to 3 pages, got 4"),
    tiff_of_many_pages=(document(*FOUR, form="TIFF"), {}, "a TIFF of at most 3 pages, got more"),
    no_page=(written(CATALOGUE, NO_PAGES), {}, "PDF: Failed to load document"),
    encrypted=(encrypted(), {}, "password"),
    damaged=(b"%PDF-1.7\n" + bytes(300), {}, "PDF: Failed to load document"),
    large=(b"%PDF-1.7\n" + bytes(9_000_000), {}, "expected at most 8 MiB"),
    endless=(endless(), {}, "opens within 2 s a page and 8192 MiB, but its process was killed by SIGKILL"),
    second_page=(damaged(1), {}, "page 2: file of"),
    third_page=(damaged(2), {}, "page 3: file of"),
    lines_of_a_page=(document(WIDE, HIGH), {"max_lines": 1}, "page 2: expected at most 1"),
    time_of_a_page=(document(BLANK, BLANK), {"max_read_s": 0.001}, LATE),
)
def test_document_that_is_refused(content, limits, message, monkeypatch):
    monkeypatch.setattr(pdf, "MAX_PAGE_S", 2)
    monkeypatch.setattr(pdf, "MAX_BYTES", 2**33)  # a fast machine needs 1 GiB for the endless one within 2 s

    (error,) = reader(ImageLimits(max_image_bytes=8 * 2**20), max_pages=3, **limits).read([content])

    assert isinstance(error, InvalidImage)
    assert message in str(error)


@cases(
    memory_is_bounded=("MAX_BYTES", 2**20, "MemoryError|and 1 MiB, but its process was killed by SIG"),
    no_fault_of_the_file=("_PROCESS", Path("/no.py"), "the process that opens PDF files ended with status 2"),
)
def test_process_that_fails_is_named(name, value, reason, monkeypatch):
    monkeypatch.setattr(pdf, name, value)

    (error,) = reader(max_pages=1).read([document(WIDE)])

    assert re.search(reason, str(error)), error


def test_directory_that_cannot_be_read_ends_a_tiff():
    file = bytearray(document(WIDE, form="TIFF"))
    (directory,) = struct.unpack_from("<I", file, 4)
    (entries,) = struct.unpack_from("<H", file, directory)
    struct.pack_into("<I", file, directory + 2 + 12 * entries, len(file) + 99)

    (lines,) = reader(max_pages=3).read([bytes(file)])

    assert [line.text for line in lines] == ["HELLO WORLD 2026"]


def turned(encoded_pdf: bytes) -> bytes:
    made = pypdfium2.PdfDocument(encoded_pdf)
    made[0].set_rotation(90)
    made.save(target := io.BytesIO())
    return target.getvalue()


@cases(
    image=(save(WIDE), WIDE.size, 1),
    turned_image=(save(WIDE, "JPEG", exif=exif(6)), WIDE.size[::-1], 1),
    tiff=(document(WIDE, HIGH, form="TIFF"), WIDE.size, 2),
    pdf=(document(WIDE), WIDE.size, 1),
    turned_pdf=(turned(document(WIDE)), WIDE.size[::-1], 1),
)
def test_text_of_a_searchable_pdf_is_where_it_was_read(content, size_wh, count):
    corners = (LEFT, TOP), (RIGHT, TOP), (RIGHT, BOTTOM), (LEFT, BOTTOM)
    box = tuple((x * size_wh[0], y * size_wh[1]) for x, y in corners)
    lines = [TextLine(f"快递 A7 ☕ {number}", 1.0, box, number) for number in range(1, count + 1)]

    made = pypdfium2.PdfDocument(pdf.searchable(content, reading(*lines, size_wh=size_wh, pages=count)))

    assert len(made) == count
    for sheet, line in zip(made, lines, strict=True):
        texts = sheet.get_textpage()
        assert texts.get_text_range() == line.text
        begin, end = (texts.get_charbox(index, loose=True) for index in (0, texts.count_chars() - 1))
        left, right = sorted((begin, end))[0][0], max(begin[2], end[2])
        bottom, top = min(begin[1], end[1]), max(begin[3], end[3])
        picture = sheet.render(scale=1).to_pil()
        if sheet.get_rotation():
            high = sheet.get_height()
            (left, right), (bottom, top) = (bottom, top), (high - right, high - left)
        box = left / picture.width, top / picture.height, right / picture.width, bottom / picture.height
        assert box == pytest.approx((LEFT, 1 - TOP, RIGHT, 1 - BOTTOM), abs=0.02)


def test_pixels_of_a_searchable_pdf_are_those_of_the_image():
    made = pypdfium2.PdfDocument(pdf.searchable(save(WIDE), reading()))

    shown = made[0].render(scale=WIDE.width / made[0].get_width()).to_pil().convert("L")

    expected = upright_picture(save(WIDE), ImageLimits()).convert("L").resize(shown.size)
    assert np.abs(np.asarray(shown, float) - np.asarray(expected, float)).mean() < 4


def test_image_becomes_a_pdf_if_a_reader_with_higher_limits_read_it():
    large = Image.new("L", (8200, 8200), "white")
    assert large.width * large.height > ImageLimits().max_image_pixels

    made = pypdfium2.PdfDocument(pdf.searchable(save(large, "JPEG"), reading(size_wh=large.size)))

    assert made[0].get_size() == pytest.approx((8200 * 72 / 200,) * 2)


def test_text_is_not_added_twice():
    line = TextLine("word", 1.0, ((9.0, 9.0), (99.0, 9.0), (99.0, 29.0), (9.0, 29.0)))
    empty, endless = replace(line, text=""), replace(line, box=((float("nan"),) * 2,) * 4)
    result = reading(line, empty, endless)

    twice = pdf.searchable(pdf.searchable(save(WIDE), result), result)

    assert pypdfium2.PdfDocument(twice)[0].get_textpage().get_text_range() == "word"


@cases(
    no_pages=(save(WIDE), 0, "no output 'page_size'"),
    damaged=(b"%PDF-1.7 nothing", 1, "Failed to load document"),
)
def test_what_cannot_become_a_pdf_is_named(content, pages, message):
    with pytest.raises(InvalidImage, match=message):
        pdf.searchable(content, reading(pages=pages))
