"""Image files of all kinds, and random changes of them that are the same each time."""

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.random import Generator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from nereid.base.assets import COFFEE
from nereid.client.result_kind import Timings
from nereid.tasks.read.pdf import searchable
from nereid.tasks.read.result import PageSize, Reading, TextLine
from tests.pictures import save

SIZES = (0, 1, 2, 7, 63, 65, 255, 256, 4_000, 8_000, 16_384, 16_385, 32_767, 65_535)


def good_files() -> dict[str, bytes]:
    """Return a small photo as one file of each kind, by name."""
    image = Image.open(COFFEE).resize((96, 72))
    exif = Image.Exif()
    exif[274] = 6
    wide = Image.fromarray(np.asarray(image)[:, :, 0].astype(np.uint16) * 250)
    palette = image.quantize(32)
    texts = PngInfo()
    for is_packed in (False, True):
        texts.add_text("Comment", "text" * 9, zip=is_packed)
        texts.add_itxt("Title", "text" * 9, zip=is_packed)
    frames: dict[str, Any] = {"save_all": True, "append_images": [palette.rotate(180)]}
    return {
        "png": save(image, "PNG", exif=exif),
        "png with texts": save(image, "PNG", pnginfo=texts, dpi=(72, 72), icc_profile=b"profile" * 9),
        "palette png": save(palette, "PNG", transparency=3),
        "16-bit png": save(wide, "PNG"),
        "rgba png": save(image.convert("RGBA"), "PNG"),
        "jpeg": save(image, "JPEG", quality=90),
        "progressive jpeg": save(image, "JPEG", progressive=True, exif=exif),
        "grey jpeg": save(image.convert("L"), "JPEG", exif=exif),
        "cmyk jpeg": save(image.convert("CMYK"), "JPEG"),
        "progressive cmyk jpeg": save(image.convert("CMYK"), "JPEG", progressive=True, exif=exif),
        "gif": save(palette, "GIF", **frames),
        "bmp": save(image, "BMP"),
        "tiff": save(image, "TIFF", exif=exif),
        "lzw tiff": save(image, "TIFF", compression="tiff_lzw"),
        "jpeg tiff": save(image, "TIFF", compression="jpeg"),
        "webp": save(image, "WEBP", exif=exif),
        "lossless webp": save(image.convert("RGBA"), "WEBP", lossless=True),
    }


def flip_bits(file: bytearray, random: Generator, _files: Sequence[bytes]) -> bytearray:
    """Flip up to 20 bits, every second time of the first 200 bytes, where the structure is."""
    end = random.choice([len(file), min(200, len(file))])
    for offset in random.integers(0, end, random.integers(1, 21)):
        file[offset] ^= 1 << random.integers(0, 8)
    return file


def truncate(file: bytearray, random: Generator, _files: Sequence[bytes]) -> bytearray:
    """Cut the end off."""
    return file[: random.integers(0, len(file))]


def splice(file: bytearray, random: Generator, files: Sequence[bytes]) -> bytearray:
    """Replace the end by the end of another file, or by a part of this file."""
    other = files[random.integers(0, len(files))] if random.integers(0, 2) else bytes(file)
    return file[: random.integers(0, len(file))] + other[random.integers(0, len(other)) :]


def blank(file: bytearray, random: Generator, _files: Sequence[bytes]) -> bytearray:
    """Overwrite a part with one byte."""
    start = random.integers(0, len(file))
    end = min(len(file), start + random.integers(1, 200))
    file[start:end] = bytes([random.choice([0x00, 0xFF, 0x55])]) * (end - start)
    return file


def lie(file: bytearray, random: Generator, _files: Sequence[bytes]) -> bytearray:
    """Write another width, height, length or offset into an intact header."""
    if random.integers(0, 2):
        small, large = (int(size) for size in random.choice(SIZES, 2))
    else:
        small, large = (int(2**exponent) for exponent in random.uniform(0, 15, 2))
    if file[:3] == b"\xff\xd8\xff":
        _lie_in_jpeg(file, random, small, large)
    elif file[:4] == b"\x89PNG":
        _lie_in_png(file, random, small, large)
    elif file[:3] == b"GIF":
        frame = file.find(b"\x2c", 13)
        offset = 6 if random.integers(0, 2) or frame < 0 else frame + 1 + 4 * random.integers(0, 2)
        file[offset : offset + 4] = struct.pack("<HH", small, large)
    elif file[:2] == b"BM":
        field = int(random.choice([10, 14, 18, 22, 28, 30, 34, 46]))
        file[field : field + 4] = struct.pack("<i", int(random.choice([-large, small, large])))
    elif file[:4] == b"%PDF":
        numbers = [*re.finditer(rb"(?<![\d.])\d+", file)]
        start, end = numbers[random.integers(0, len(numbers))].span()
        file[start:end] = b"%d" % random.choice([-small, small, large, 2**31, large * small])
    elif file[:4] == b"RIFF":
        offset = int(random.choice([4, 16, 24, 27, 26, 21]))
        file[offset : offset + 4] = struct.pack("<HH", small, large)
    else:
        _lie_in_tiff(file, random, small, large)
    return file


def _lie_in_png(file: bytearray, random: Generator, small: int, large: int) -> None:
    """Change the size in the header, or data or checksum of any other chunk."""
    offsets, offset = [], 33
    while offset + 12 <= len(file):
        offsets.append(offset)
        offset += 12 + int.from_bytes(file[offset : offset + 4])
    if random.integers(0, 2) or not offsets:
        file[16:24] = struct.pack(">II", small, large)
        if random.integers(0, 3) == 0:
            file[24 + random.integers(0, 5)] = random.integers(0, 17)
        file[29:33] = struct.pack(">I", zlib.crc32(file[12:29]))
        return
    offset = int(random.choice(offsets))
    end = offset + 8 + int.from_bytes(file[offset : offset + 4])
    if end > offset + 8:
        file[offset + 8 + random.integers(0, end - offset - 8)] ^= random.integers(1, 256)
    if random.integers(0, 2):
        file[end : end + 4] = struct.pack(">I", zlib.crc32(file[offset + 4 : end]))


def _lie_in_jpeg(file: bytearray, random: Generator, small: int, large: int) -> None:
    """Change the size in the frame header, or the length of any segment."""
    offsets, offset = [], 2
    while offset + 4 <= len(file) and file[offset] == 0xFF and file[offset + 1] != 0xDA:
        offsets.append(offset)
        offset += 2 + int.from_bytes(file[offset + 2 : offset + 4])
    frames = [offset for offset in offsets if 0xC0 <= file[offset + 1] <= 0xC2]
    if frames and random.integers(0, 2):
        file[frames[0] + 5 : frames[0] + 9] = struct.pack(">HH", small, large)
    else:
        offset = int(random.choice(offsets))
        file[offset + 2 : offset + 4] = struct.pack(">H", small)


def _lie_in_tiff(file: bytearray, random: Generator, small: int, large: int) -> None:
    """Change the count, the type or the value of any field."""
    order = "<" if file[:2] == b"II" else ">"
    (directory,) = struct.unpack_from(order + "I", file, 4)
    (count,) = struct.unpack_from(order + "H", file, directory)
    entry = directory + 2 + 12 * int(random.integers(0, count))
    kind = random.integers(0, 4)
    if kind == 0:
        struct.pack_into(order + "I", file, entry + 4, large)
    elif kind == 1:
        struct.pack_into(order + "H", file, entry + 2, int(random.integers(0, 14)))
    else:
        struct.pack_into(order + "I", file, entry + 8, int(random.choice([small, large, 2**31, 2**32 - 1])))


# For files of any kind.
Change = Callable[[bytearray, Generator, Sequence[bytes]], bytearray]


@cache
def good_documents() -> dict[str, bytes]:
    """Return files of two pages, by name."""
    image = Image.open(COFFEE).resize((96, 72))
    pages: dict[str, Any] = {"save_all": True, "append_images": [image.rotate(180)]}
    tiff = save(
        image, "TIFF", compression="tiff_lzw", **pages
    )  # first: the other leaves options on the images
    plain = save(image, "PDF", **pages)
    box = (4.0, 4.0), (90.0, 4.0), (90.0, 20.0), (4.0, 20.0)
    size, source = PageSize(2500, 1875), ("m", "1", "", "", "", Timings(0, 0))
    lines = TextLine("coffee 咖啡", 0.9, box, 1), TextLine("cup", 0.9, box, 2)
    return {
        "pdf": plain,
        "pdf with text": searchable(plain, Reading(lines, (), (), *source, pages=(size, size))),
        "tiff of pages": tiff,
    }


ANY_FILE: Sequence[Change] = (flip_bits, flip_bits, truncate, splice, blank)
MUTATIONS: Sequence[Change] = (*ANY_FILE, lie, lie)


def mutated_files(count: int) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of that many files, the same ones each time."""
    good = good_files()
    names, files = list(good), list(good.values())
    random = np.random.default_rng(0)
    for index in range(count):
        mutate = MUTATIONS[index // len(names) % len(MUTATIONS)]
        name = names[index % len(names)]
        yield f"{index}: {name}, {mutate.__name__}", bytes(mutate(bytearray(good[name]), random, files))
