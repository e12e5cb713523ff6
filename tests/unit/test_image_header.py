"""The cost of an image before it is decoded: no file gets it cheaper than it says."""

import struct

import pytest
from PIL import Image

from loadtest.attack.image_mutations import mutated_files
from nereid.base.assets import COFFEE
from nereid.base.errors import InvalidImage
from nereid.vision.imaging.decode import ImageLimits, open_image
from nereid.vision.imaging.formats.image_header import UNKNOWN_COST, estimate_header_cost, read_header
from tests.pictures import PNG_MAGIC, png_chunk, save
from tests.tables import cases

MAX_PIXELS, SIDE = 64_000_000, 3000
JPEG = b"\xff\xd8\xff"


def large(image_format: str, **options) -> bytes:
    return save(Image.new("L", (SIDE, SIDE)), image_format, **options)


def insert(encoded: bytes, before: bytes, more: bytes) -> bytes:
    return encoded.replace(before, more + before, 1)


FAR_FRAME = b"," + struct.pack("<HH", SIDE - 2, SIDE - 2)
SMALL_FRAME = save(Image.new("P", (2, 2)), "GIF").replace(b",\0\0\0\0", FAR_FRAME)
INTERLACED = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 4000, 4000, 8, 0, 0, 0, 1))
TINY_HEADER = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
PADDING = b"\xff\xfe\xff\xff" + bytes(65_533)


@cases(
    a_GIF_with_a_small_screen=(large("GIF")[:6] + struct.pack("<HH", 1, 1) + large("GIF")[10:], 9),
    a_GIF_with_a_frame_far_from_the_corner=(SMALL_FRAME, 9),
    a_GIF_behind_comments=(insert(large("GIF"), b",\0\0", b"!\xfe\1x\0" * 99), 9),
    a_PNG_whose_text_comes_first=(insert(large("PNG"), b"\0\0\0\rIHDR", png_chunk(b"tEXt", TINY_HEADER)), 9),
    a_PNG_with_two_headers=(insert(large("PNG"), b"\0\0\0\rIHDR", png_chunk(b"IHDR", TINY_HEADER)), 9),
    a_JPEG_behind_1_MiB=(insert(large("JPEG"), b"\xff\xdb", PADDING * 17), 1),
    a_progressive_JPEG_behind_1_MiB=(
        insert(large("JPEG", progressive=True), b"\xff\xdb", PADDING * 17),
        9_000_000 * 6 // 8_000_000,
    ),
    a_JPEG_behind_junk=(insert(large("JPEG"), b"\xff\xdb", bytes(2**17)), UNKNOWN_COST),
    a_BMP_upside_down=(large("BMP")[:22] + struct.pack("<i", -SIDE) + large("BMP")[26:], 9),
    a_TIFF=(large("TIFF"), UNKNOWN_COST),
    a_TIFF_with_its_mark_reversed=(b"II\0*" + large("TIFF")[4:], UNKNOWN_COST),
    a_WebP=(large("WEBP"), 9),
    a_lossless_WebP=(large("WEBP", lossless=True), 9),
    a_WebP_with_a_profile=(large("WEBP", icc_profile=b"profile"), 9),
)
def test_file_costs_what_the_decoder_finds(encoded, expected):
    assert open_image(encoded, ImageLimits()).size_wh == (SIDE, SIDE)

    assert estimate_header_cost(read_header(encoded), MAX_PIXELS) == expected
    assert estimate_header_cost(read_header(memoryview(encoded)), MAX_PIXELS) == expected


@cases(
    photo=(COFFEE.read_bytes(), 1),
    interlaced=(PNG_MAGIC + INTERLACED + png_chunk(b"IDAT", b""), 32),
    too_large=(b"BM" + bytes(12) + struct.pack("<IHH", 12, 60_000, 60_000) + bytes(8), 1),
    no_image=(b"no image", 1),
    no_frame=(JPEG + b" without a size", UNKNOWN_COST),
    GIF_that_goes_on=(b"GIF89a" + bytes(7) + b"!\xfe" + b"\1x" * 2**20, UNKNOWN_COST),
    cut_WebP=(large("WEBP")[:20], UNKNOWN_COST),
    scans_of_32=(
        JPEG + b"\xc2\0\x0b\x08\x10\0\x10\0\1\1\x11\0" + b"\xff\xda\0\2" * 99,
        4096 * 4096 * 32 // 8_000_000,
    ),
)
def test_file_that_no_decoder_has_seen_costs_enough(encoded, expected):
    """Unknown is large, unless it is certain that no decoder opens it."""
    assert estimate_header_cost(read_header(encoded), MAX_PIXELS) == expected


@pytest.mark.filterwarnings("ignore")
def test_changed_file_hides_no_pixels():
    opened = 0
    for name, encoded in mutated_files(800):
        try:
            width, height = open_image(encoded, ImageLimits()).size_wh
        except InvalidImage:
            continue
        header, opened = read_header(encoded), opened + 1
        assert header, name
        assert header.size_wh is None or header.size_wh[0] * header.size_wh[1] >= width * height, name
    assert opened > 400
