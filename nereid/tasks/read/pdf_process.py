"""The process that opens PDF files for `pdf.py`, so that native code parses untrusted files within limits.

Stdin holds a line of JSON and the file. Stdout gets JSON lines, each followed by the number of `bytes` it
states: a page as RGB, or the file with text. A line with `error` is the last one.
"""

import ctypes
import io
import itertools
import json
import math
import os
import resource
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pypdfium2
from pypdfium2 import raw

# Width of every character of the font, as a fraction of its height.
CHARACTER_WIDTH = 0.5
UNITS_PER_EM = 1000
# Maximum entries in one block of a CMap. Source: Adobe Technical Note 5014.
MAX_BLOCK = 100
# Resolution of a page made from an image.
IMAGE_DPI = 200
JPEG_QUALITY = 90

Part = tuple[dict[str, Any], bytes]


def rendered(pdf: pypdfium2.PdfDocument, max_pages: int, side_px: int) -> Iterator[Part]:
    """Yield each page as RGB, uint8[H, W, 3], with a longer side of `side_px`.

    Raises:
        ValueError: the file has no pages, or more than `max_pages`.
    """
    count = len(pdf)
    if not 1 <= count <= max_pages:
        raise ValueError(f"expected a PDF of 1 to {max_pages} pages, got {count}")
    pdf.init_forms()
    for page in pdf:
        bitmap = page.render(scale=side_px / max(*page.get_size(), 1e-3), rev_byteorder=True)
        rows, length = memoryview(bitmap.buffer), 3 * bitmap.width
        starts = range(0, bitmap.height * bitmap.stride, bitmap.stride)
        pixels = b"".join(rows[start : start + length] for start in starts)
        yield {"size_wh": (bitmap.width, bitmap.height)}, pixels
        bitmap.close()
        page.close()


def pages_of_image(encoded: bytes, count: int) -> pypdfium2.PdfDocument:
    """Return a PDF whose pages are an image file's pages."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each thread reserves address space
    from nereid.vision.imaging.decode import ImageLimits, pages_of, upright_picture

    # A reader has checked the image against its own limits.
    pdf, unlimited = pypdfium2.PdfDocument.new(), ImageLimits(*[sys.maxsize] * 3)
    for frame in pages_of(encoded, count):
        picture, jpeg = upright_picture(encoded, unlimited, frame), io.BytesIO()
        picture.save(jpeg, "JPEG", quality=JPEG_QUALITY)
        width, height = (side * 72 / IMAGE_DPI for side in picture.size)
        page, image = pdf.new_page(width, height), pypdfium2.PdfImage.new(pdf)
        image.load_jpeg(jpeg)
        image.set_matrix(pypdfium2.PdfMatrix().scale(width, height))
        page.insert_obj(image)
        page.gen_content()
    return pdf


def add_text(pdf: pypdfium2.PdfDocument, pages: Sequence[Mapping[str, Any]]) -> Part:
    """Add invisible lines of text to each page and return the file.

    Args:
        pdf: the document.
        pages: for each page, `size_wh` in pixels and `lines`: text and corners in these pixels, clockwise
            from the text's top left.
    """
    characters = sorted({character for page in pages for text, _ in page["lines"] for character in text})
    codes = {character: code for code, character in enumerate(characters, 1)}
    font = _font(pdf, characters)
    for page, about in zip(pdf, pages, strict=False):
        present = page.get_textpage()
        for text, corners in about["lines"]:
            if not text or not all(map(math.isfinite, itertools.chain(*corners))):
                continue
            page_corners = [_to_page_position(page, about["size_wh"], corner) for corner in corners]
            sides = (f(xs) for f in (min, max) for xs in zip(*page_corners, strict=True))
            if present.get_text_bounded(*sides).strip():  # the file already contains this line's text
                continue
            _insert(pdf, page, font, [codes[character] for character in text], page_corners)
        page.gen_content()
    target = io.BytesIO()
    pdf.save(target)
    return {}, target.getvalue()


def _to_page_position(
    page: pypdfium2.PdfPage, size_wh: tuple[int, int], corner: Sequence[float]
) -> tuple[float, float]:
    """Convert a position on a rendered page to the page's own coordinates."""
    x, y = ctypes.c_double(), ctypes.c_double()
    raw.FPDF_DeviceToPage(page, 0, 0, *size_wh, 0, *map(round, corner), x, y)
    return x.value, y.value


def _insert(
    pdf: pypdfium2.PdfDocument,
    page: pypdfium2.PdfPage,
    font: Any,
    codes: Sequence[int],
    page_corners: Sequence[tuple[float, float]],
) -> None:
    (left, top), _, (right, low), (x, y) = page_corners
    width = CHARACTER_WIDTH * len(codes)
    text = raw.FPDFPageObj_CreateTextObj(pdf, font, 1.0)
    raw.FPDFText_SetCharcodes(text, (ctypes.c_uint32 * len(codes))(*codes), len(codes))
    raw.FPDFTextObj_SetTextRenderMode(text, raw.FPDF_TEXTRENDERMODE_INVISIBLE)
    matrix = raw.FS_MATRIX((right - x) / width, (low - y) / width, left - x, top - y, x, y)
    raw.FPDFPageObj_SetMatrix(text, matrix)
    raw.FPDFPage_InsertObject(page, text)


def _font(pdf: pypdfium2.PdfDocument, characters: Sequence[str]) -> Any:
    """Return a font whose codes, starting at 1, map to the characters; its glyphs are boxes."""
    entries = [
        f"<{code:04X}> <{character.encode('utf-16-be').hex()}>"
        for code, character in enumerate(characters, 1)
    ]
    blocks = [entries[start : start + MAX_BLOCK] for start in range(0, len(entries), MAX_BLOCK)]
    meanings = "\n".join("\n".join((f"{len(block)} beginbfchar", *block, "endbfchar")) for block in blocks)
    cmap = f"""/CIDInit /ProcSet findresource begin
12 dict begin
begincmap
/CIDSystemInfo << /Registry (Adobe) /Ordering (UCS) /Supplement 0 >> def
/CMapName /Adobe-Identity-UCS def
/CMapType 2 def
1 begincodespacerange
<0000> <FFFF>
endcodespacerange
{meanings}
endcmap
CMapName currentdict /CMap defineresource pop
end
end
"""
    font, glyphs = _bytes(_box_font()), _bytes(bytes(2) + b"\0\1" * len(characters))
    return raw.FPDFText_LoadCidType2Font(pdf, font, len(font), cmap.encode() + b"\0", glyphs, len(glyphs))


def _bytes(content: bytes) -> Any:
    return (ctypes.c_uint8 * len(content)).from_buffer_copy(content)


def _box_font() -> bytes:
    """Return a TrueType font with an empty glyph and a box. Source: OpenType 1.9, `glyf` to `maxp`.

    Readers skip rotated text whose glyphs have no extent.
    """
    width = int(CHARACTER_WIDTH * UNITS_PER_EM)
    head = struct.pack(
        ">IIIIHHQQhhhhHHhhh",
        *(0x10000, 0x10000, 0, 0x5F0F3CF5, 0, UNITS_PER_EM, 0, 0),
        *(0, 0, width, UNITS_PER_EM, 0, 8, 2, 1, 0),
    )
    points = [0, width, 0, -width, 0, 0, UNITS_PER_EM, 0]
    box = struct.pack(">5hHH4b8h", 1, 0, 0, width, UNITS_PER_EM, 3, 0, *[1] * 4, *points) + bytes(2)
    tables = {
        b"glyf": box,
        b"head": head,
        b"hhea": struct.pack(">I3hH11hH", 0x10000, UNITS_PER_EM, 0, 0, width, *[0] * 11, 1),
        b"hmtx": struct.pack(">Hhh", width, 0, 0),
        b"loca": struct.pack(">III", 0, 0, len(box)),
        b"maxp": struct.pack(">I14H", 0x10000, 2, 4, 1, 0, 0, 1, *[0] * 8),
    }
    directory = struct.pack(">IHHHH", 0x10000, len(tables), 64, 2, 16 * len(tables) - 64)
    start, body = 12 + 16 * len(tables), b""
    for name, table in tables.items():
        padded = table + bytes(-len(table) % 4)
        total = sum(struct.unpack(f">{len(padded) // 4}I", padded)) % 2**32
        directory += struct.pack(">4sIII", name, total, start + len(body), len(table))
        body += padded
    return directory + body


def parts_of(request: Mapping[str, Any], encoded: bytes) -> Iterator[Part]:
    """Yield the parts of the response."""
    if "pages" not in request:
        yield from rendered(pypdfium2.PdfDocument(encoded), request["max_pages"], request["side_px"])
        return
    pages = request["pages"]
    pdf = pypdfium2.PdfDocument(encoded) if request["is_pdf"] else pages_of_image(encoded, len(pages))
    yield add_text(pdf, pages)


def main() -> None:
    """Answer the request on stdin."""
    request = json.loads(sys.stdin.buffer.readline())
    encoded = sys.stdin.buffer.read()
    for limit, most in (
        (resource.RLIMIT_AS, request["max_bytes"]),
        (resource.RLIMIT_CPU, request["max_s"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # library output must not reach the response
    try:
        for about, content in parts_of(request, encoded):
            _write(out, about | {"bytes": len(content)}, content)
    except Exception as error:
        _write(out, {"error": (str(error) or type(error).__name__)[:1000]})


def _write(out: Any, about: Mapping[str, Any], content: bytes = b"") -> None:
    out.writelines(itertools.chain((json.dumps(about).encode(), b"\n"), (content,)))
    out.flush()


if __name__ == "__main__":
    main()
