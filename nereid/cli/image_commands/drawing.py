"""Images with the boxes and texts of a result drawn on them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from PIL import ExifTags, Image, ImageDraw, ImageFont, ImageOps

from nereid.base.errors import InvalidImage, WrongUsage
from nereid.cli.image_commands.view import Mark
from nereid.cli.options import SUFFIXES
from nereid.vision.imaging.decode import Buffers, Limits, open_image

COLOURS = ("#0b7a8f", "#c2570c", "#6741d9", "#2f7d32", "#c2255c")
BACKGROUND = (255, 255, 255)
# Fonts with Chinese characters, then one with many others; Pillow's own font has only Latin letters.
FONTS = ("NotoSansCJK-Regular.ttc", "DroidSansFallbackFull.ttf", "wqy-zenhei.ttc", "DejaVuSans.ttf")


class Drawings:
    """The images that a command draws.

    Args:
        target: a file for one image, or a folder.
        images: number of images; 0 if it is not known.

    Raises:
        WrongUsage: the target is a file, but several images may come.
    """

    def __init__(self, target: Path, images: int) -> None:
        self._target, self._names = target, Counter[str]()
        self._is_file = target.suffix.lower() in SUFFIXES and not target.is_dir()
        if self._is_file and images != 1:
            raise WrongUsage(f"--draw: '{target}' is a file, expected a folder for several images")

    def draw(self, image: Path, marks: Sequence[Mark]) -> None:
        """Draw boxes and texts on the upright image, and save it; a folder gets PNG files.

        Raises:
            OSError: the image cannot be read again, or the drawing cannot be written.
        """
        if not image.is_file():
            raise OSError(f"'{image}' is not a regular file")
        path = self._target if self._is_file else self._target / self._unique(image.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = _upright(image.read_bytes())
        draw_marks(picture, marks)
        picture.save(path)

    def _unique(self, name: str) -> str:
        """Return the file for an image; images of several folders may have one name."""
        self._names[name] += 1
        count = self._names[name]
        return f"{name}.png" if count == 1 else f"{name}-{count}.png"


def _upright(encoded: bytes) -> Image.Image:
    """Decode a file as the server does, which reads some that Pillow alone refuses."""
    try:
        opened = open_image(encoded, Limits())
        picture = Image.fromarray(opened.pixels(1, BACKGROUND, Buffers()))
    except InvalidImage as error:
        raise OSError(str(error)) from None
    picture.getexif()[ExifTags.Base.Orientation] = opened.orientation
    return ImageOps.exif_transpose(picture)


def draw_marks(picture: Image.Image, marks: Sequence[Mark]) -> None:
    """Draw boxes and their texts on an RGB image, in place."""
    pen, scale = ImageDraw.Draw(picture), max(picture.size)
    width, font = max(1, scale // 500), _font(max(10, scale // 70))
    for place, (corners, text) in enumerate(marks):
        colour = COLOURS[place % len(COLOURS)]
        pen.line([*corners, corners[0]], fill=colour, width=width, joint="curve")
        left = min(max(0.0, min(x for x, _ in corners)), picture.width - 1)
        _, top, _, bottom = pen.textbbox((0, 0), text, font)
        above = min(y for _, y in corners) - bottom - width
        # Inside the image, also for a box at its top.
        at = (left, max(-top, min(above, picture.height - bottom)))
        pen.rectangle(pen.textbbox(at, text, font), fill=colour)
        pen.text(at, text, "white", font)


def _font(size_px: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    for name in FONTS:
        try:
            return ImageFont.truetype(name, size_px)
        except OSError:
            continue
    return ImageFont.load_default(size_px)
