"""Decoding of untrusted image files to RGB pixels, at a reduced size where the format allows it."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from nereid.base.contract import MAX_IMAGE_BYTES
from nereid.base.errors import InvalidImage
from nereid.base.units import format_bytes
from nereid.vision.imaging.formats import jpeg, png
from nereid.vision.imaging.formats.image_header import TIFF_MAGIC


class Buffers:
    """Reusable arrays by name, for one thread at a time."""

    KEPT_BYTES = 16 * 2**20

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
        """Return an uninitialized array, valid until the next `take` of the same name.

        An array of more than `KEPT_BYTES` is not kept, so that a huge image does not occupy memory forever.
        """
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = self._kept.get(name)
        if memory is None or memory.size < size:
            memory = np.empty(size, np.uint8)
            if size <= self.KEPT_BYTES:
                self._kept[name] = memory
        return memory[:size].view(dtype).reshape(shape)


# We check our own limit on every header; Pillow would warn or raise at other sizes.
Image.MAX_IMAGE_PIXELS = None

FORMATS = ("PNG", "WEBP", "BMP", "GIF", "TIFF", "JPEG")
# Factors by which the decoder may shrink a JPEG. Only these have SIMD code in libjpeg-turbo: a 640×427 photo
# decodes faster at 8/8 than at 5/8. Source: docs/architecture.md.
SHRINKS = (1, 2, 4, 8)
# Supported Pillow modes; the others have more than 16 bits per channel or no conversion to RGB.
EIGHT_BIT = frozenset(
    {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"}
)
SIXTEEN_BIT = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
# Rounds 0..65535 to 0..255. Source: libpng, png_do_scale_16_to_8.
TO_EIGHT_BIT = ((np.arange(2**16, dtype=np.uint32) * 255 + 32895) >> 16).astype(np.uint8)
# Pixels per conversion, so that a large image is in memory at most twice.
BAND_PIXELS = 2**20
# glibc keeps the memory of larger images for the next one; see MALLOC_TRIM_THRESHOLD_ in command_line.py.
LARGE_PIXELS = 16_000_000
# Warnings of libjpeg that viewers ignore, about bytes that do not change pixels. Source: its jerror.h.
HARMLESS = re.compile(
    "extraneous bytes before marker|unknown JFIF revision|bad ICC marker|Unknown Adobe color|Invalid SOS"
)
EXIF = b"Exif\0\0"
# TIFF tags; PHOTOMETRIC is PhotometricInterpretation.
IMAGE_WIDTH, IMAGE_LENGTH, BITS_PER_SAMPLE = 256, 257, 258
PHOTOMETRIC, TILE_WIDTH, TILE_LENGTH = 262, 322, 323
SUBFILE_TYPE, REDUCED = 254, 1
# Maximum images of a TIFF that are examined.
MAX_FRAMES = 1000
BLACK_IS_ZERO = 1


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on an image, checked before any pixel is decoded."""

    max_image_bytes: int = MAX_IMAGE_BYTES
    max_image_pixels: int = 64_000_000
    max_image_side_px: int = 16_384

    def __post_init__(self) -> None:
        for name in ("max_image_bytes", "max_image_pixels", "max_image_side_px"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A file with a valid header, whose pixels are decoded on demand.

    `size_wh` and `orientation` (the EXIF tag, 1..8) describe the stored pixels. `colorspace` is RGB (also for
    grey and YCbCr) or CMYK for a JPEG that simplejpeg decodes, and empty for any other file.
    """

    encoded: bytes
    size_wh: tuple[int, int]
    orientation: int
    colorspace: str = ""
    _opened: Image.Image | None = None

    @property
    def pixel_count(self) -> int:
        """Width × height."""
        return self.size_wh[0] * self.size_wh[1]

    @property
    def format(self) -> str:
        """Format of the file, such as `JPEG`."""
        return "JPEG" if self._opened is None else self._opened.format or ""

    @property
    def max_shrink(self) -> int:
        """Largest factor by which the decoder can shrink each side."""
        return max(SHRINKS) if self.colorspace else 1

    def pixels(self, shrink: int, background: tuple[int, ...], buffers: Buffers) -> np.ndarray:
        """Decode to RGB, uint8[ceil(H / shrink), ceil(W / shrink), 3].

        The result is valid until the next call with the same `buffers`.

        Args:
            shrink: one of SHRINKS, up to `max_shrink`; each result averages this many pixels per side.
            background: R, G, B behind transparent pixels.

        Raises:
            InvalidImage: the file is damaged.
        """
        if self._opened is None:
            return _decode_jpeg(self, shrink, buffers)
        try:
            self._opened.load()
            if self._opened.format == "PNG":
                png.check_complete(self.encoded, self._opened)
            return _to_rgb(self._opened, background)
        except InvalidImage:
            raise
        except Exception as error:  # on damaged files Pillow's parsers raise many types
            raise InvalidImage(f"file of {len(self.encoded)} bytes is damaged: {error}") from None


def open_image(
    encoded: bytes, limits: ImageLimits, is_header_enough: bool = False, frame: int = 0
) -> EncodedImage:
    """Read the header of an image file.

    Args:
        is_header_enough: whether to skip decoding and rotating a TIFF's pixels.
        frame: index of an image in a multi-image TIFF, from 0; one of `pages_of`.

    Raises:
        InvalidImage: the file has an unknown format, is damaged, or exceeds `limits`, which are checked
            before any pixel is decoded.
    """
    if not encoded:
        raise InvalidImage(f"expected the bytes of an image file ({', '.join(FORMATS)}), got 0 bytes")
    if len(encoded) > limits.max_image_bytes:
        limit, size = format_bytes(limits.max_image_bytes), format_bytes(len(encoded))
        raise InvalidImage(f"expected at most {limit}, got {size}")
    if encoded.startswith(jpeg.MAGIC):
        return _open_jpeg(encoded, limits)
    got = f"{len(encoded)} bytes starting with {encoded[:8]!r}"
    unknown = f"expected an image file ({', '.join(FORMATS)}), got {got}"
    return _open_other(encoded, limits, unknown, is_header_enough, frame)


def pages_of(encoded: bytes, max_pages: int) -> list[int]:
    """Return the frames that are pages: the first, and in a TIFF all later ones at full resolution.

    Raises:
        InvalidImage: it has more than `max_pages` pages or `MAX_FRAMES` frames.
    """
    pages = [0]
    if not encoded.startswith(TIFF_MAGIC):
        return pages
    try:
        with Image.open(io.BytesIO(encoded), formats=["TIFF"]) as image:
            for frame in range(1, MAX_FRAMES + 1):
                image.seek(frame)
                tags = getattr(image, "tag_v2", {})
                if not tags.get(SUBFILE_TYPE, 0) & REDUCED:
                    pages.append(frame)
                if len(pages) > max_pages:
                    break
    except Exception:  # the last frame was read; viewers also ignore an unreadable directory
        return pages
    limit = f"{max_pages} pages" if len(pages) > max_pages else f"{MAX_FRAMES} images"
    raise InvalidImage(f"expected a TIFF of at most {limit}, got more")


def upright_picture(encoded: bytes, limits: ImageLimits, frame: int = 0) -> Image.Image:
    """Return the upright pixels of an image file at full size, RGB on white.

    Raises:
        InvalidImage: as for `open_image`.
    """
    opened = open_image(encoded, limits, frame=frame)
    picture = Image.fromarray(opened.pixels(1, (255, 255, 255), Buffers()))
    picture.getexif()[ExifTags.Base.Orientation] = opened.orientation
    return ImageOps.exif_transpose(picture)


def read_upright_size(
    encoded: bytes, limits: ImageLimits, applies_orientation: bool = True
) -> tuple[int, int]:
    """Return an image's width and height in pixels, reading only its header.

    Args:
        applies_orientation: whether to apply the EXIF orientation; it is always applied to a TIFF.

    Raises:
        InvalidImage: as for `open_image`.
    """
    image = open_image(encoded, limits, is_header_enough=True)
    width, height = image.size_wh
    return (
        (height, width)
        if image.orientation > 4 and (applies_orientation or image.format == "TIFF")
        else (width, height)
    )


def _open_jpeg(encoded: bytes, limits: ImageLimits) -> EncodedImage:
    exif = _walk_jpeg(encoded)
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(encoded, strict=False)
    except Exception:  # on damaged headers simplejpeg raises ValueError, KeyError and more
        # Pillow supports sampling factors that simplejpeg does not.
        return _open_other(encoded, limits, f"JPEG of {len(encoded)} bytes has no readable header")
    _check_size(width, height, limits)
    orientation = _known_orientation(partial(_read_exif, exif)) if exif else 1
    return EncodedImage(
        encoded, (width, height), orientation, "CMYK" if colorspace in ("CMYK", "YCCK") else "RGB"
    )


def _walk_jpeg(encoded: bytes) -> bytes:
    """Return the payload of a JPEG's EXIF segment.

    Raises:
        InvalidImage: it has too many scans or segments, which cost the decoder time.
    """
    exif, components, scans = b"", None, 0
    for marker, _, payload in jpeg.segments(encoded):
        if marker in jpeg.START_OF_FRAME:
            components = payload[5:6] if marker in jpeg.SEQUENTIAL else None
        elif marker == jpeg.APP1 and payload.startswith(EXIF):
            exif = exif or payload
        elif marker == jpeg.START_OF_SCAN:
            scans += 1
            if payload[:1] == components:  # it has all components, so the decoder reads no other
                break
        if scans > jpeg.MAX_SCANS:
            raise InvalidImage(f"expected at most {jpeg.MAX_SCANS} scans in a JPEG, got {scans} or more")
    return exif


def _read_exif(payload: bytes) -> Image.Exif:
    exif = Image.Exif()
    exif.load(payload)
    return exif


def _known_orientation(read_exif: Callable[[], Image.Exif]) -> int:
    try:
        value: object = read_exif().get(ExifTags.Base.Orientation)
    except Exception:  # pixels are still usable if the metadata is damaged
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _decode_jpeg(image: EncodedImage, shrink: int, buffers: Buffers, plain: bytes = b"") -> np.ndarray:
    """Decode a JPEG, or `plain`, which is the same image without a harmless fault."""
    encoded = plain or image.encoded
    width, height = (-(-side // shrink) for side in image.size_wh)
    memory = buffers.take("pixels", (height * width * len(image.colorspace),), np.uint8)
    # simplejpeg picks the smallest scale that reaches these sizes, which is exactly 1 / shrink.
    options = {"colorspace": image.colorspace, "min_height": height, "min_width": width, "buffer": memory}
    try:
        pixels: np.ndarray = simplejpeg.decode_jpeg(encoded, **options)
    except Exception as error:  # warnings also raise, and damaged files KeyError and more
        if not HARMLESS.search(str(error)):
            raise _damaged(image, error) from None
        try:
            simplejpeg.decode_jpeg_header(encoded)
        except Exception:  # it warned about the header, and decoded nothing
            if plain:
                raise _damaged(image, error) from None
            return _decode_jpeg(image, shrink, buffers, jpeg.without_extras(encoded))
        if not any(marker == jpeg.END_OF_IMAGE for marker, *_ in jpeg.segments(encoded)):
            raise _damaged(image, "it ends too early") from None
        pixels = memory.reshape(height, width, -1)  # complete, because the warning came at the end
    if image.colorspace == "CMYK":  # JPEGs store the complement
        np.subtract(255, pixels, out=pixels)
        return _to_rgb(Image.frombuffer("CMYK", (width, height), pixels, "raw", "CMYK", 0, 1), (0, 0, 0))
    return pixels


def _damaged(image: EncodedImage, error: object) -> InvalidImage:
    return InvalidImage(f"JPEG of {len(image.encoded)} bytes is damaged: {error}")


def _open_other(
    encoded: bytes, limits: ImageLimits, unknown: str, is_header_enough: bool = False, frame: int = 0
) -> EncodedImage:
    """Read a header with Pillow; `unknown` is the error message for an unknown format."""
    if encoded.startswith(png.MAGIC):
        encoded = png.without_extras(encoded)
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        if frame:
            image.seek(frame)
        _check_size(*image.size, limits)
        _check_mode(image)
        size_wh, orientation = image.size, _known_orientation(image.getexif)
        if isinstance(image, TiffImageFile):
            _check_size(image.tag_v2.get(TILE_WIDTH, 1), image.tag_v2.get(TILE_LENGTH, 1), limits)
            # Whether Pillow's size is upright before or only after loading depends on its version.
            size_wh = (image.tag_v2[IMAGE_WIDTH], image.tag_v2[IMAGE_LENGTH])
            if not is_header_enough:
                image.load()  # applies the orientation
                size_wh, orientation = image.size, 1
    except InvalidImage:
        raise
    except Exception as error:  # on damaged files Pillow's parsers raise many types
        if isinstance(error, UnidentifiedImageError):
            raise InvalidImage(unknown) from None
        raise InvalidImage(f"file of {len(encoded)} bytes is damaged: {error}") from None
    return EncodedImage(encoded, size_wh, orientation, _opened=image)


def _check_mode(image: Image.Image) -> None:
    got = f"{image.format} of mode {image.mode}"
    if image.mode not in EIGHT_BIT | SIXTEEN_BIT:
        raise InvalidImage(f"expected 8 or 16 bits per channel in a mode that converts to RGB, got {got}")
    if isinstance(image, TiffImageFile) and image.mode in SIXTEEN_BIT:
        bits, zero = image.tag_v2.get(BITS_PER_SAMPLE, (16,))[0], image.tag_v2.get(PHOTOMETRIC, BLACK_IS_ZERO)
        if bits != 16 or zero != BLACK_IS_ZERO:
            got += f" with {bits} bits and 0 as {'black' if zero == BLACK_IS_ZERO else 'white'}"
            raise InvalidImage(f"expected 8 bits per channel, or 16 with 0 as black, got {got}")


def _to_rgb(image: Image.Image, background: tuple[int, ...]) -> np.ndarray:
    """Convert band by band, which halves the memory needed for a large image."""
    rgb = np.empty((image.height, image.width, 3), np.uint8)
    step = max(1, BAND_PIXELS // image.width)
    for top in range(0, image.height, step):
        band = image.crop((0, top, image.width, min(top + step, image.height)))
        rgb[top : top + step] = (_from_16_bit if image.mode in SIXTEEN_BIT else _flat)(band, background)
    return rgb


def _flat(image: Image.Image, background: tuple[int, ...]) -> np.ndarray:
    if image.has_transparency_data:
        image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), image)
    return np.asarray(image.convert("RGB"))


def _from_16_bit(image: Image.Image, background: tuple[int, ...]) -> np.ndarray:
    levels = np.asarray(image)
    rgb = np.repeat(TO_EIGHT_BIT[levels][:, :, None], 3, axis=2)
    rgb[levels == image.info.get("transparency", -1)] = background
    return rgb


def _check_size(width: int, height: int, limits: ImageLimits) -> None:
    if width * height > limits.max_image_pixels:
        raise InvalidImage(f"expected at most {limits.max_image_pixels} pixels, got {width} x {height}")
    if max(width, height) > limits.max_image_side_px:
        raise InvalidImage(
            f"expected at most {limits.max_image_side_px} pixels a side, got {width} x {height}"
        )
