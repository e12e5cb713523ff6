"""Decoding of every format, and the error message for every kind of bad file."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps, PngImagePlugin

from nereid.base.assets import COFFEE
from nereid.base.errors import InvalidImage
from nereid.vision.imaging.decode import Buffers, ImageLimits, open_image, read_upright_size
from nereid.vision.imaging.formats.jpeg import MAX_SCANS
from tests.pictures import PNG_MAGIC, encode, gradient, png_chunk, save
from tests.tables import cases, rows

# A smooth picture survives JPEG's rounding to within this many levels.
LOSSY_LEVELS = 6
WHITE, MAGENTA = (255, 255, 255), (200, 0, 100)
# With which a picture comes back within LOSSY_LEVELS.
BEST = {"PNG": {}, "WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}


def decode(encoded, shrink=1, background=WHITE, limits=None):
    return open_image(encoded, limits or ImageLimits()).pixels(shrink, background, Buffers())


def segment(marker, payload):
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def exif_block(orientation, byte_order="<", field_type=3, count=1):
    mark = {"<": b"II*\0\x08\0\0\0", ">": b"MM\0*\0\0\0\x08"}[byte_order]
    value = struct.pack(byte_order + "HH", orientation, 0)
    return mark + struct.pack(byte_order + "HHHI", 1, 274, field_type, count) + value + bytes(4)


def png(samples, color_type, *chunks):
    """Build a PNG of uint8 or uint16[H, W, C] samples, of a kind that Pillow does not write."""
    height, width = samples.shape[:2]
    depth = samples.dtype.itemsize * 8
    rows = samples.astype(samples.dtype.newbyteorder(">")).reshape(height, -1)
    body = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    written = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(body)), (b"IEND", b"")]
    return PNG_MAGIC + b"".join(png_chunk(*chunk) for chunk in written)


def tiff(entries, data, order="<"):
    """Build a TIFF from {tag: (type, value)}; its pixels, `data`, are one strip or one tile."""
    offset, length = (324, 325) if 322 in entries else (273, 279)
    entries = entries | {offset: (4, 8), length: (4, len(data))}
    fields = [
        struct.pack(f"{order}HHIHH" if kind == 3 else f"{order}HHII", tag, kind, 1, value, *[0] * (kind == 3))
        for tag, (kind, value) in sorted(entries.items())
    ]
    header = struct.pack(order + "2sHI", b"II" if order == "<" else b"MM", 42, 8 + len(data))
    return header + data + struct.pack(order + "H", len(fields)) + b"".join(fields) + bytes(4)


# Size 2 x 2, 16 bits per sample, not compressed, 0 is black, one sample per pixel, two rows in the strip.
GREY_16 = {256: (3, 2), 257: (3, 2), 258: (3, 16), 259: (3, 1), 262: (3, 1), 277: (3, 1), 278: (3, 2)}


@cases(
    png=("PNG", {}),
    bmp=("BMP", {}),
    tiff=("TIFF", {}),
    lzw_tiff=("TIFF", {"compression": "tiff_lzw"}),
    webp=("WEBP", BEST["WEBP"]),
    jpeg=("JPEG", BEST["JPEG"]),
    progressive_jpeg=("JPEG", BEST["JPEG"] | {"progressive": True}),
)
@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 5), (40, 60)], ids=["1x1", "odd", "40x60"])
def test_pixels_come_back(image_format, options, height, width):
    pixels = gradient(height, width)

    image = open_image(encode(pixels, image_format, **options), ImageLimits())
    decoded = image.pixels(1, WHITE, Buffers())

    assert (decoded.shape, decoded.dtype) == ((height, width, 3), np.uint8)
    assert (image.size_wh, image.orientation) == ((width, height), 1)
    assert image.max_shrink == (8 if image_format == "JPEG" else 1)
    tolerance = LOSSY_LEVELS if image_format == "JPEG" else 0
    np.testing.assert_allclose(decoded.astype(int), pixels, atol=tolerance)


def test_first_frame_of_a_gif_is_its_picture():
    red, blue = (Image.new("RGB", (6, 4), color) for color in ("red", "blue"))

    decoded = decode(save(red, "GIF", save_all=True, append_images=[blue]))

    np.testing.assert_array_equal(decoded, np.full((4, 6, 3), (255, 0, 0)))


@pytest.mark.parametrize(
    "kind",
    [
        *("JPEG L", "PNG 1", "PNG L", "PNG LA", "PNG P", "PNG RGBA", "GIF P", "BMP 1", "BMP P"),
        *("TIFF 1", "TIFF L", "TIFF P", "TIFF CMYK", "TIFF YCbCr", "WEBP RGBA"),
    ],
)
@pytest.mark.parametrize("level", [0, 255], ids=["black", "white"])
def test_other_colour_modes_become_rgb(kind, level):
    pixels = np.full((8, 8, 3), level, np.uint8)
    image_format, mode = kind.split()

    decoded = decode(encode(pixels, image_format, mode=mode))

    np.testing.assert_allclose(decoded.astype(int), pixels, atol=LOSSY_LEVELS)


@pytest.mark.parametrize("grey", ["RGB", "L"], ids=["colour", "grey"])
@pytest.mark.parametrize("kind", ["adobe", "plain", "ycck"])
def test_cmyk_jpeg_has_the_right_colours(kind, grey):
    """Inks are stored inverted, as Adobe does, with its marker or without; YCCK is a transform on top."""
    rgb = np.asarray(Image.new("RGB", (16, 16), (180, 60, 30)).convert(grey).convert("RGB"))
    inks = np.concatenate([255 - rgb, np.zeros((16, 16, 1), np.uint8)], axis=2)
    if kind == "ycck":  # Pillow stores 255 - x; the decoder's CMY, inverted as Adobe's are, is 255 - RGB(ycc)
        inks[:, :, :3] = 255 - np.asarray(Image.fromarray(255 - rgb).convert("YCbCr"))
    encoded = save(Image.fromarray(inks, "CMYK"), "JPEG", quality=100)
    adobe = encoded.index(b"\xff\xeeAdobe".replace(b"\xee", b"\xee\x00\x0e"))
    if kind == "plain":
        encoded = encoded[:adobe] + encoded[adobe + 16 :]
    if kind == "ycck":
        encoded = encoded[: adobe + 15] + b"\x02" + encoded[adobe + 16 :]
    assert simplejpeg.decode_jpeg_header(encoded)[2] == ("YCCK" if kind == "ycck" else "CMYK")

    np.testing.assert_allclose(decode(encoded).astype(int), rgb, atol=LOSSY_LEVELS)


RAMP16 = np.arange(65536, dtype=np.uint16).reshape(256, 256)
LARGE_16 = GREY_16 | dict.fromkeys((256, 257, 278), (3, 256))


@cases(
    "encoded",
    png=save(Image.fromarray(RAMP16), "PNG"),
    tiff=save(Image.fromarray(RAMP16), "TIFF"),
    big_endian_tiff=tiff(LARGE_16, RAMP16.astype(">u2").tobytes(), ">"),
)
def test_sixteen_bit_grey_is_scaled(encoded):
    """65535 is white: levels are rounded to eight bits, neither clipped nor taken modulo 256."""
    expected = np.rint(RAMP16 / 65535 * 255)

    np.testing.assert_array_equal(decode(encoded), np.repeat(expected[:, :, None], 3, axis=2))


@cases(("color_type", "channels"), rgb=(2, 3), grey_and_alpha=(4, 2), rgba=(6, 4))
def test_sixteen_bit_colours_are_scaled(color_type, channels):
    """A colour PNG of 16 bits comes within the one level that cutting off the low byte costs."""
    levels = np.random.default_rng(0).integers(0, 65536, (9, 7, channels), dtype=np.uint16)
    if channels != 3:
        levels[:, :, -1] = 65535

    decoded = decode(png(levels, color_type))

    colors = levels[:, :, : channels - (channels != 3)]
    np.testing.assert_allclose(decoded, np.broadcast_to(colors / 65535 * 255, (9, 7, 3)), atol=1)


@cases("background", white=WHITE, black=(0, 0, 0), magenta=MAGENTA)
@rows(("PNG", "RGBA"), ("PNG", "LA"), ("TIFF", "RGBA"), ("WEBP", "RGBA"))
def test_transparent_pixels_show_the_background(image_format, mode, background):
    """Alpha mixes the picture with the background; one level is the rounding of alpha_composite."""
    random = np.random.default_rng(0).integers(0, 256, (16, 16, len(mode)), dtype=np.uint8)
    random[0, :, -1], random[1, :, -1] = 0, 255
    options = {"lossless": True, "exact": True} if image_format == "WEBP" else {}

    decoded = decode(save(Image.fromarray(random, mode), image_format, **options), background=background)

    alpha = random[:, :, -1:] / 255
    np.testing.assert_allclose(decoded, random[:, :, :-1] * alpha + background * (1 - alpha), atol=1)


def test_premultiplied_pixels_show_the_background():
    """The colours of a TIFF with associated alpha are already multiplied by alpha."""
    written = save(Image.new("RGBA", (4, 4), (100, 50, 0, 128)), "TIFF")
    straight, premultiplied = (struct.pack("<HHIH", 338, 3, 1, kind) for kind in (2, 1))
    assert straight in written

    decoded = decode(written.replace(straight, premultiplied), background=MAGENTA)

    expected = np.array((100, 50, 0)) + np.array(MAGENTA) * (1 - 128 / 255)
    np.testing.assert_allclose(decoded, np.broadcast_to(expected, (4, 4, 3)), atol=2)


PALETTE = Image.new("P", (2, 1))
PALETTE.putpalette([10, 20, 30, 200, 100, 50])
PALETTE.putdata([1, 0])


def keyed(color_type, samples, *key):
    return png(samples[None], color_type, (b"tRNS", struct.pack(f">{len(key)}H", *key)))


@cases(
    palette_png=(save(PALETTE, "PNG", transparency=0), [(200, 100, 50), MAGENTA]),
    palette_gif=(save(PALETTE, "GIF", transparency=0), [(200, 100, 50), MAGENTA]),
    rgb=(keyed(2, np.uint8([(1, 2, 3), (4, 5, 6)]), 1, 2, 3), [MAGENTA, (4, 5, 6)]),
    grey=(keyed(0, np.uint8([[7], [9]]), 7), [MAGENTA, (9, 9, 9)]),
    grey_of_16_bits=(keyed(0, np.uint16([[0], [1000], [65535]]), 1000), [(0, 0, 0), MAGENTA, WHITE]),
)
def test_transparent_colour_shows_the_background(encoded, expected):
    np.testing.assert_array_equal(decode(encoded, background=MAGENTA), [expected])


@pytest.mark.parametrize("image_format", ["TIFF", "PNG", "WEBP"])
def test_orientation_in_xmp_leaves_size_and_pixels_alike(image_format):
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", xmp.decode())
    options = {"TIFF": {"tiffinfo": {700: xmp}}, "PNG": {"pnginfo": info}, "WEBP": {"xmp": xmp}}

    image = open_image(encode(gradient(16, 24), image_format, **options[image_format]), ImageLimits())

    assert image.pixels(1, WHITE, Buffers()).shape[1::-1] == image.size_wh


EXIF = segment(0xE1, b"Exif\0\0" + exif_block(6))
XMP = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>")


@cases(
    "header",
    alone=EXIF,
    big_endian=segment(0xE1, b"Exif\0\0" + exif_block(6, ">")),
    after_XMP=XMP + EXIF,
    before_XMP=EXIF + XMP,
    after_fill_bytes=b"\xff\xff" + EXIF,
    after_a_comment=segment(0xFE, b"a comment") + EXIF,
)
@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_orientation_of_a_jpeg_is_found(mode, header):
    encoded = encode(gradient(8, 8), "JPEG", mode=mode)

    assert open_image(encoded[:2] + header + encoded[2:], ImageLimits()).orientation == 6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_size_is_that_of_the_turned_image(orientation):
    plain = encode(gradient(8, 24), "JPEG")
    turned = plain[:2] + segment(0xE1, b"Exif\0\0" + exif_block(orientation)) + plain[2:]

    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(turned))).size
    assert read_upright_size(turned, ImageLimits()) == expected


@cases(
    "garbage",
    empty=b"",
    one_byte=b"\0",
    no_byte_order=b"nonsense",
    directory_outside=b"II*\0\xff\xff\xff\x7f",
    directory_cut_short=exif_block(6)[:14],
    value_outside=b"II*\0\x08\0\0\0" + struct.pack("<HHHII", 1, 274, 3, 99, 0x7FFFFFFF),
    orientation_0=exif_block(0),
    orientation_9=exif_block(9),
    unknown_type=exif_block(6, field_type=200),
    text=exif_block(0x3636, field_type=2, count=2),
    directory_in_a_circle=b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
)
@pytest.mark.parametrize("image_format", BEST)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data", "ignore:Metadata Warning", "ignore:Possibly corrupt")
@pytest.mark.filterwarnings("ignore:Truncated File Read", "ignore:Tag data larger")
def test_garbage_exif_is_ignored(image_format, garbage):
    pixels = gradient(16, 16)
    encoded = encode(pixels, image_format, exif=b"Exif\0\0" + garbage, **BEST[image_format])

    image = open_image(encoded, ImageLimits())

    assert image.orientation == 1
    np.testing.assert_allclose(image.pixels(1, WHITE, Buffers()).astype(int), pixels, atol=LOSSY_LEVELS)


@cases(
    "chunk",
    text=(b"zTXt", b"Comment\0\0no zlib"),
    long_text=(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2**21))),
    international=(b"iTXt", b"key\0\1\0\0\0no zlib"),
    profile=(b"iCCP", b"name\0\0no zlib"),
    colours=(b"cHRM", b"short"),
)
def test_damaged_chunk_of_a_png_that_changes_no_pixel_does_no_harm(chunk):
    pixels = gradient(16, 16)
    whole = png(pixels, 2, chunk)
    # With a wrong checksum, too.
    broken = whole.replace(chunk[0] + chunk[1][:4], chunk[0] + b"\xff\xff\xff\xff", 1)

    for encoded in (whole, broken):
        np.testing.assert_array_equal(decode(encoded), pixels)


def odd_grey(bits, zero):
    return tiff(GREY_16 | {258: (3, bits), 262: (3, zero)}, bytes(2 * bits // 4))


@cases(
    empty=(b"", r"expected the bytes of an image file \(PNG, .*\), got 0 bytes"),
    text=(b"hello world", r"expected an image file .* got 11 bytes starting with b'hello wo'"),
    jpeg_without_header=(b"\xff\xd8\xff", "JPEG of 3 bytes has no readable header"),
    truncated=(COFFEE.read_bytes()[:20_000], "JPEG of 20000 bytes is damaged: Premature end of JPEG"),
    # Pillow has no levels for these modes, does not rescale 12 bits, and does not invert 16.
    F=(save(Image.new("F", (4, 4)), "TIFF"), "8 or 16 bits per channel .*, got TIFF of mode F$"),
    LAB=(save(Image.new("LAB", (4, 4)), "TIFF"), "got TIFF of mode LAB$"),
    bits_12=(odd_grey(12, 1), "got TIFF of mode I;16 with 12 bits and 0 as black"),
    white_as_0=(odd_grey(16, 0), "or 16 with 0 as black, .* with 16 bits and 0 as white"),
    tile=(
        tiff(GREY_16 | {258: (3, 8), 259: (3, 8), 322: (4, 20_000), 323: (4, 10_000)}, b""),
        "at most 64000000 pixels, got 20000 x 10000",
    ),
)
def test_bad_file_is_refused(encoded, message):
    with pytest.raises(InvalidImage, match=message):
        decode(encoded)


@pytest.mark.parametrize("image_format", ["PNG", "BMP", "TIFF", "WEBP", "GIF", "JPEG", "JPEG CMYK", "JPEG L"])
def test_truncated_file_is_refused(image_format):
    """A JPEG is refused even if it ends with the end marker: libjpeg would add grey pixels."""
    name, _, mode = image_format.partition(" ")
    encoded = encode(gradient(256, 256), name, mode=mode or "RGB")

    for tail in (b"", b"\xff\xd9"):
        with pytest.raises(InvalidImage, match=r"is damaged|expected an image file"):
            decode(encoded[: len(encoded) // 2] + tail)


@cases(
    bytes=((60, 100), ImageLimits(max_image_bytes=99), r"expected at most 99 bytes, got [\d.]+ \w+$"),
    pixels=((60, 100), ImageLimits(max_image_pixels=5_999), "at most 5999 pixels, got 100 x 60$"),
    width=((60, 100), ImageLimits(max_image_side_px=99), "at most 99 pixels a side, got 100 x 60$"),
    height=((100, 60), ImageLimits(max_image_side_px=99), "at most 99 pixels a side, got 60 x 100$"),
)
@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP"])
def test_limits_are_checked_on_the_header(size, limits, message, image_format):
    good = encode(gradient(*size), image_format)
    middle = len(good) // 2

    with pytest.raises(InvalidImage, match=message):
        open_image(good[:middle] + b"\x55" * 48 + good[middle + 48 :], limits)
    assert decode(good, limits=ImageLimits(len(good), 6_000, 100)).shape == (*size, 3)


def repeated(encoded, scans):
    last_scan = encoded[encoded.rindex(b"\xff\xda") : -2]
    return encoded[:-2] + last_scan * (scans - encoded.count(b"\xff\xda")) + encoded[-2:]


def non_interleaved(pixels):
    planes = [save(Image.fromarray(pixels[:, :, channel]), "JPEG", quality=95) for channel in range(3)]
    # Without the JFIF header: it would say that the components are YCbCr.
    tables = planes[0][:2] + planes[0][planes[0].index(b"\xff\xdb") : planes[0].index(b"\xff\xc0")]
    huffman = planes[0][planes[0].index(b"\xff\xc4") : planes[0].rindex(b"\xff\xda")]
    size = struct.pack(">HH", *pixels.shape[:2])
    frame = segment(0xC0, b"\x08" + size + b"\x03" + b"".join(bytes((i, 0x11, 0)) for i in b"RGB"))
    scans = [
        segment(0xDA, bytes((1, name, 0, 0, 63, 0))) + plane[plane.rindex(b"\xff\xda") + 10 : -2]
        for name, plane in zip(b"RGB", planes, strict=True)
    ]
    return tables + frame + huffman + b"".join(scans) + b"\xff\xd9"


@pytest.mark.parametrize("kind", ["progressive", "non-interleaved", "progressive cmyk"])
def test_jpeg_of_too_many_scans_is_refused(kind):
    """Each scan costs a pass over the whole image, so scans are counted before any is decoded."""
    pixels = gradient(16, 24)
    one = encode(pixels, "JPEG", mode="CMYK" if kind.endswith("cmyk") else "RGB", progressive=True)
    if kind == "non-interleaved":
        one = non_interleaved(pixels)
        np.testing.assert_allclose(decode(one).astype(int), pixels, atol=LOSSY_LEVELS)

    open_image(repeated(one, MAX_SCANS), ImageLimits())
    with pytest.raises(InvalidImage, match="expected at most 32 scans in a JPEG, got 33"):
        open_image(repeated(one, MAX_SCANS + 1), ImageLimits())


@cases("marker", stuffing=0x00, TEM=0x01, RST0=0xD0, RST7=0xD7)
def test_scans_cannot_be_hidden_behind_a_marker_without_length(marker):
    """These markers have no length; reading one there would find a fake frame."""
    many = repeated(encode(gradient(16, 16), "JPEG", progressive=True), MAX_SCANS + 1)
    sham = segment(0xC0, bytes((8, 0, 16, 0, 16, 3)) + bytes(9)) + segment(0xDA, b"\x03" + bytes(9))
    # A reader that takes the next marker, 0xFFFE, for a length jumps into the second comment.
    first = bytes((0xFF, marker)) + segment(0xFE, bytes(60_000))
    second = segment(0xFE, bytes(2 + 0xFFFE - len(first) - 4) + sham)

    with pytest.raises(InvalidImage, match="expected at most 32 scans in a JPEG, got"):
        open_image(many[:2] + first + second + many[2:], ImageLimits())


def insert(encoded: bytes, marker: int, more: bytes) -> bytes:
    offset = encoded.index(bytes([0xFF, marker]))
    return encoded[:offset] + more + encoded[offset:]


HARMLESS = {
    "before_the_scan": lambda good: insert(good, 0xDA, b"\x12\x34\x56"),
    "a_short_segment": lambda good: insert(good, 0xDB, b"\xff\xe5\0\1"),
    "a_profile_behind_the_frame": lambda good: insert(good, 0xC4, b"\xff\xe2\0\x12ICC_PROFILE\0\1\1xx"),
    "broken_EXIF": lambda good: insert(good, 0xDB, b"\xff\xe1\0\x10Exif\0\0garbage!"),
    "an_unknown_revision": lambda good: good.replace(b"JFIF\0\1", b"JFIF\0\3", 1),
    "an_unknown_transform": lambda good: insert(good, 0xDB, b"\xff\xee\0\x0eAdobe\0d\0\0\0\0\7"),
}


@cases(
    "change",
    **HARMLESS,
    before_the_end=lambda good: good[:-2] + b"\0\0" + good[-2:],
    before_the_end_and_a_film=lambda good: good[:-2] + bytes(99) + good[-2:] + b"\0\xff\xda\0\2",
    behind_the_end=lambda good: good + b"junk",
    # Phones append films to their photos, and films contain bytes that look like scans.
    a_film_behind_the_end=lambda good: good + b"\0\2" + b"\xff\xda\0\2" * 100,
)
@pytest.mark.parametrize("shrink", [1, 4])
@pytest.mark.parametrize("is_progressive", [False, True], ids=["sequential", "progressive"])
def test_bytes_outside_the_image_data_are_ignored(change, shrink, is_progressive):
    """Some cameras and editors write such JPEGs, and every viewer shows them."""
    good = encode(gradient(64, 80), "JPEG", quality=95, progressive=is_progressive)

    np.testing.assert_array_equal(decode(change(good), shrink=shrink), decode(good, shrink=shrink))


@pytest.mark.parametrize(("extra", "is_kept"), [(0, True), (1, False)])
def test_huge_buffer_is_not_kept(extra, is_kept):
    buffers = Buffers()

    huge = buffers.take("a", (Buffers.KEPT_BYTES + extra,), np.uint8)

    assert np.shares_memory(huge, buffers.take("a", (8,), np.uint8)) is is_kept


def test_junk_inside_a_damaged_jpeg_does_not_excuse_the_damage():
    """Junk before the end is harmless; between scans it must not hide that the rest is missing."""
    good = encode(gradient(256, 256), "JPEG", progressive=True)
    table = good.index(b"\xff\xc4", good.index(b"\xff\xda"))

    with pytest.raises(InvalidImage, match="is damaged"):
        decode(good[:table] + bytes(3) + good[table : table + 200])


@cases("change", **HARMLESS)
def test_harmless_header_does_not_hide_missing_pixels(change):
    good = change(encode(gradient(256, 256), "JPEG", quality=95))

    with pytest.raises(InvalidImage, match="is damaged"):
        decode(good[: len(good) * 2 // 3] + b"\xff\xd9")


def test_cmyk_jpeg_is_decoded_scaled():
    encoded = encode(gradient(128, 160), "JPEG", mode="CMYK", quality=95)

    expected = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"), float)
    expected = expected.reshape(32, 4, 40, 4, 3).mean((1, 3))
    np.testing.assert_allclose(decode(encoded, shrink=4), expected, atol=2)


@pytest.mark.parametrize("factors", [(0x22, 0x21, 0x11), (0x31, 0x11, 0x11)], ids=["22 21 11", "31 11 11"])
def test_unusual_sampling_is_decoded(factors):
    """Pillow decodes the sampling factors that simplejpeg does not support."""
    encoded = bytearray(save(Image.new("RGB", (64, 64), (100, 150, 200)), "JPEG", subsampling="4:4:4"))
    frame = encoded.index(b"\xff\xc0")
    encoded[frame + 11 : frame + 20 : 3] = bytes(factors)

    reference = np.asarray(Image.open(io.BytesIO(bytes(encoded))).convert("RGB"))
    np.testing.assert_array_equal(decode(bytes(encoded)), reference)


@cases(
    segments=("JPEG", 2, b"\xff\xfe\x00\x02", "at most 4096 segments in a JPEG, got 4097 or more"),
    chunks=("PNG", 33, png_chunk(b"abCd", b""), "at most 65536 chunks in a PNG, got 65537 or more"),
)
def test_file_of_too_many_parts_is_refused(image_format, offset, part, message):
    """Millions of empty parts take seconds to read and hold no pixels."""
    good = encode(gradient(16, 16), image_format)

    with pytest.raises(InvalidImage, match=f"expected {message}"):
        decode(good[:offset] + part * 70_000 + good[offset:])


def test_large_transparent_image_is_converted_band_by_band():
    """A band is converted at a time, so that a pixel needs about 7 bytes at the peak, not 17."""
    image = open_image(save(Image.new("RGBA", (4_000, 4_000), (10, 20, 30, 128)), "PNG"), ImageLimits())
    image.pixels(1, WHITE, Buffers())

    tracemalloc.start()
    pixels = image.pixels(1, WHITE, Buffers())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert tuple(pixels[-1, -1]) == (132, 137, 142)
    assert peak < 1.5 * pixels.nbytes


# By kind, the number of its colour type, samples per pixel, and bits per sample.
SAMPLES = {
    "grey": (0, 1, (1, 2, 4, 8, 16)),
    "rgb": (2, 3, (8, 16)),
    "palette": (3, 1, (1, 4, 8)),
    "grey and alpha": (4, 2, (8, 16)),
    "rgba": (6, 4, (8, 16)),
}
# The passes of Adam7, from the specification's own picture of eight by eight pixels.
PICTURE = ("16462646", "77777777", "56565656", "77777777", "36463646", "77777777", "56565656", "77777777")


def short_png(size, kind: str, depth: int, is_interlaced: bool, missing: int, value: int) -> bytes:
    """Return a file whose last stored rows are missing, with all bytes of the others of one value."""
    (color_type, samples, _), (width, height) = SAMPLES[kind], size
    stored = [width * samples * depth] * height  # bits of each stored row, without its filter
    if is_interlaced:
        passes = ((number, PICTURE[y % 8]) for number in "1234567" for y in range(height))
        counts = [sum(row[x % 8] == number for x in range(width)) for number, row in passes]
        stored = [count * samples * depth for count in counts if count]
    data = b"".join(b"\0" + bytes([value]) * -(-bits // 8) for bits in stored[: len(stored) - missing])
    header = struct.pack(">IIBBBBB", *size, depth, color_type, 0, 0, is_interlaced)
    palette = png_chunk(b"PLTE", bytes(range(256)) * 3) if kind == "palette" else b""
    packed = zlib.compress(data)
    parts = [png_chunk(b"IDAT", packed[:20]), png_chunk(b"IDAT", packed[20:])]
    return PNG_MAGIC + png_chunk(b"IHDR", header) + palette + b"".join(parts) + png_chunk(b"IEND", b"")


@pytest.mark.parametrize("is_interlaced", [False, True], ids=["plain", "interlaced"])
@pytest.mark.parametrize("size", [(1, 1), (5, 3), (8, 8), (33, 20), (3, 41)])
@pytest.mark.parametrize(
    ("kind", "depth"), [(kind, depth) for kind, (*_, depths) in SAMPLES.items() for depth in depths]
)
def test_missing_rows_are_refused(kind, depth, size, is_interlaced):
    for value in (0, 0xFF):
        whole, cut = (short_png(size, kind, depth, is_interlaced, missing, value) for missing in (0, 1))

        assert decode(whole).shape == (size[1], size[0], 3)
        with pytest.raises(InvalidImage, match="is damaged: "):
            decode(cut)
