"""From an encoded image to RGB pixels: no larger than asked for, and never trusting the file."""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, UnidentifiedImageError

from python_backend.buffers import Buffers
from python_backend.errors import InvalidImage

# Our own limit is checked on every header; Pillow's would only warn and raise in between.
Image.MAX_IMAGE_PIXELS = None

JPEG_MAGIC = b"\xff\xd8\xff"
FORMATS = ("PNG", "WEBP", "BMP", "GIF", "TIFF", "JPEG")
# By how much the decoder may shrink a JPEG. Only these have SIMD code in libjpeg-turbo: a 640×427 photo
# decodes faster at 8/8 than at 5/8. Source: loadtest/results/pieces.json.
SHRINKS = (1, 2, 4, 8)
# Encoders write about ten; each costs a walk over the whole image.
MAX_SCANS = 32
# What libjpeg says of files that any viewer shows without a word.
HARMLESS = "extraneous bytes before marker"
# Pillow's modes; others have more than 16 bits per channel or no way to RGB.
EIGHT_BIT = frozenset(
    {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"}
)
SIXTEEN_BIT = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
START_OF_SCAN = 0xDA
APP1 = 0xE1
EXIF = b"Exif\0\0"
WITHOUT_LENGTH = frozenset({0x00, 0x01, *range(0xD0, 0xDA)})
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
SEQUENTIAL = frozenset({0xC0, 0xC1})


@dataclass(frozen=True, slots=True)
class Limits:
    """What an image may cost before any pixel of it is decoded."""

    max_image_bytes: int = 32 * 2**20
    max_image_pixels: int = 64_000_000
    max_image_side_px: int = 16_384

    def __post_init__(self) -> None:
        for name in ("max_image_bytes", "max_image_pixels", "max_image_side_px"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A file whose header was found good, and its pixels on demand.

    `size_wh` and `orientation` (the EXIF tag, 1..8) are those of the pixels as they are stored; `max_shrink`
    is how much smaller per side the decoder can make them.
    """

    encoded: bytes
    size_wh: tuple[int, int]
    orientation: int
    max_shrink: int
    _opened: Image.Image | None = None

    def pixels(self, shrink: int, background: tuple[int, ...], buffers: Buffers) -> np.ndarray:
        """Decode to RGB, uint8[ceil(H / shrink), ceil(W / shrink), 3].

        It is valid until the next call with the same `buffers`.

        Args:
            shrink: one of SHRINKS, up to `max_shrink`: each pixel is the average of that many per side.
            background: R, G, B that transparent pixels are laid over.

        Raises:
            InvalidImage: the file is damaged.
        """
        if self._opened is None:
            return _decode_jpeg(self.encoded, self.size_wh, shrink, buffers)
        try:
            return _to_rgb(self._opened, background)
        except Exception as error:  # on damaged files Pillow raises whatever its parsers run into
            raise InvalidImage(f"file of {len(self.encoded)} bytes is damaged: {error}") from None


def open_image(encoded: bytes, limits: Limits) -> EncodedImage:
    """Read the header of an image file.

    Raises:
        InvalidImage: not an image of a known format, or beyond `limits`; no pixel was decoded.
    """
    if not encoded:
        raise InvalidImage(f"expected the bytes of an image file ({', '.join(FORMATS)}), got 0 bytes")
    if len(encoded) > limits.max_image_bytes:
        raise InvalidImage(f"expected at most {limits.max_image_bytes} bytes, got {len(encoded)}")
    if encoded[:3] == JPEG_MAGIC:
        return _open_jpeg(encoded, limits)
    return _open_other(encoded, limits, orientation=0)


def _open_jpeg(encoded: bytes, limits: Limits) -> EncodedImage:
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(encoded, strict=False)
    except Exception:  # on damaged headers simplejpeg raises ValueError, KeyError and more
        raise InvalidImage(f"JPEG of {len(encoded)} bytes has no readable header") from None
    _check_size(width, height, limits)
    segments = list(_segments(encoded))
    _check_scans(encoded, segments)
    orientation = _orientation(segments)
    if colorspace in ("CMYK", "YCCK"):
        return _open_other(encoded, limits, orientation)
    return EncodedImage(encoded, (width, height), orientation, max(SHRINKS))


def _segments(encoded: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield marker and payload of a JPEG's segments, up to and with the first scan's header."""
    place, marker = 2, 0
    while marker != START_OF_SCAN and encoded[place : place + 1] == b"\xff" and place + 4 <= len(encoded):
        marker = encoded[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        if marker in WITHOUT_LENGTH:  # nothing that is of interest here follows in an honest file
            return
        end = place + 2 + int.from_bytes(encoded[place + 2 : place + 4])
        yield marker, encoded[place + 4 : end]
        place = end


def _check_scans(encoded: bytes, segments: Sequence[tuple[int, bytes]]) -> None:
    """Refuse a JPEG that makes the decoder walk over the whole image many times."""
    frame, header = next(((m, payload) for m, payload in segments if m in START_OF_FRAME), (0, b""))
    scan = next((payload for marker, payload in segments if marker == START_OF_SCAN), b"")
    if frame in SEQUENTIAL and scan[:1] == header[5:6]:  # all components are in the first scan
        return
    scans = encoded.count(bytes((0xFF, START_OF_SCAN)))
    if scans > MAX_SCANS:
        raise InvalidImage(f"expected at most {MAX_SCANS} scans in a JPEG, got {scans}")


def _orientation(segments: Sequence[tuple[int, bytes]]) -> int:
    for marker, payload in segments:
        if marker == APP1 and payload.startswith(EXIF):
            return _known_orientation(partial(_read_exif, payload))
    return 1


def _read_exif(payload: bytes) -> Image.Exif:
    exif = Image.Exif()
    exif.load(payload)
    return exif


def _known_orientation(read_exif: Callable[[], Image.Exif]) -> int:
    try:
        value: object = read_exif().get(ExifTags.Base.Orientation)
    except Exception:  # damaged metadata are no reason to refuse good pixels
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _decode_jpeg(encoded: bytes, size_wh: tuple[int, int], shrink: int, buffers: Buffers) -> np.ndarray:
    width, height = (-(-side // shrink) for side in size_wh)
    memory = buffers.take("pixels", (height * width * 3,), np.uint8)
    # simplejpeg picks the smallest scale that keeps these sizes, which is exactly 1 / shrink.
    options = {"min_height": height, "min_width": width, "buffer": memory}
    try:
        try:
            pixels: np.ndarray = simplejpeg.decode_jpeg(encoded, "RGB", **options)
        except ValueError as error:
            if HARMLESS not in str(error):
                raise
            pixels = simplejpeg.decode_jpeg(encoded, "RGB", **options, strict=False)
    except Exception as error:  # on damaged files simplejpeg raises ValueError, KeyError and more
        raise InvalidImage(f"JPEG of {len(encoded)} bytes is damaged: {error}") from None
    return pixels


def _open_other(encoded: bytes, limits: Limits, orientation: int) -> EncodedImage:
    """Read a header with Pillow; an `orientation` of 0 is to be read, too."""
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        _check_size(*image.size, limits)
        if image.mode not in EIGHT_BIT | SIXTEEN_BIT:
            got = f"{image.format} of mode {image.mode}"
            raise InvalidImage(f"expected 8 or 16 bits per channel of a colour that has RGB, got {got}")
        if image.format == "TIFF":  # which Pillow turns upright as it decodes
            image.load()
            orientation = 1
        orientation = orientation or _known_orientation(image.getexif)
    except InvalidImage:
        raise
    except UnidentifiedImageError:
        got = f"{len(encoded)} bytes starting with {encoded[:8]!r}"
        raise InvalidImage(f"expected an image file ({', '.join(FORMATS)}), got {got}") from None
    except Exception as error:  # on damaged files Pillow raises whatever its parsers run into
        raise InvalidImage(f"file of {len(encoded)} bytes is damaged: {error}") from None
    return EncodedImage(encoded, image.size, orientation, 1, image)


def _to_rgb(image: Image.Image, background: tuple[int, ...]) -> np.ndarray:
    if image.mode in SIXTEEN_BIT:
        levels = np.asarray(image).astype(np.uint32)
        # Rounds 0..65535 to 0..255. Source: libpng, png_do_scale_16_to_8.
        grey = ((levels * 255 + 32895) >> 16).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), image)
    return np.asarray(image.convert("RGB"))


def _check_size(width: int, height: int, limits: Limits) -> None:
    if width * height > limits.max_image_pixels:
        raise InvalidImage(f"expected at most {limits.max_image_pixels} pixels, got {width} x {height}")
    if max(width, height) > limits.max_image_side_px:
        raise InvalidImage(
            f"expected at most {limits.max_image_side_px} pixels a side, got {width} x {height}"
        )
