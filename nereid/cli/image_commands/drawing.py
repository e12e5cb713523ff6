"""Images with the boxes and text of a result drawn on them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from nereid.base.errors import InvalidImage, WrongUsage
from nereid.cli.image_commands.view import Mark
from nereid.vision.imaging.decode import ImageLimits, upright_picture

COLOURS = ("#0b7a8f", "#c2570c", "#6741d9", "#2f7d32", "#c2255c")
# Fonts with Chinese characters, then one with many others; Pillow's own font has only Latin letters.
FONTS = ("NotoSansCJK-Regular.ttc", "DroidSansFallbackFull.ttf", "wqy-zenhei.ttc", "DejaVuSans.ttf")


class OutputFiles:
    """The files that a command writes for its images.

    Args:
        option: the option that names the target.
        target: a file for one image, or a folder.
        suffixes: suffixes that mark the target as a file; in a folder, files get the first one.
        images: number of images; 0 if unknown.

    Raises:
        WrongUsage: the target is a file, but there may be several images.
    """

    def __init__(self, option: str, target: Path, suffixes: Sequence[str], images: int) -> None:
        self._target, self._suffix, self._names = target, suffixes[0], Counter[str]()
        self._is_file = target.suffix.lower() in suffixes and not target.is_dir()
        if self._is_file and images != 1:
            raise WrongUsage(f"{option}: '{target}' is a file, expected a folder for several images")

    def path_of(self, image: Path) -> Path:
        """Return the path of an image's file, and create its folder.

        Raises:
            OSError: the image cannot be read again, or the folder cannot be created.
        """
        if not image.is_file():
            raise OSError(f"'{image}' is not a regular file")
        self._names[image.name] += 1
        count = self._names[image.name]  # images in different folders may have the same name
        name = f"{image.name}{'' if count == 1 else f'-{count}'}{self._suffix}"
        path = self._target if self._is_file else self._target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def draw(image: Path, marks: Sequence[Mark], path: Path) -> None:
    """Draw boxes and text on an upright image, and save it.

    Raises:
        OSError: the image cannot be read again, or the drawing cannot be written.
    """
    try:  # as the server decodes it, which reads some files that Pillow alone refuses
        picture = upright_picture(image.read_bytes(), ImageLimits())
    except InvalidImage as error:
        raise OSError(f"cannot be drawn: {error}") from None
    draw_marks(picture, marks)
    picture.save(path)


def draw_marks(picture: Image.Image, marks: Sequence[Mark]) -> None:
    """Draw boxes and their text on an RGB image, in place."""
    pen, scale = ImageDraw.Draw(picture), max(picture.size)
    width, font = max(1, scale // 500), _font(max(10, scale // 70))
    for index, (corners, text) in enumerate(marks):
        colour = COLOURS[index % len(COLOURS)]
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
