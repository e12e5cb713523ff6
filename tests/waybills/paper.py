"""A sheet of paper that notes what is printed on it, and where."""

from dataclasses import dataclass, field
from functools import cache
from random import Random

import numpy as np
import zxingcpp
from PIL import Image, ImageDraw, ImageFont

FONTS = {
    "sans": "LiberationSans-Regular.ttf",
    "bold": "LiberationSans-Bold.ttf",
    "narrow": "LiberationSansNarrow-Regular.ttf",
    "mono": "LiberationMono-Bold.ttf",
    "wide": "DejaVuSans.ttf",
    "wide-bold": "DejaVuSans-Bold.ttf",
    "wide-mono": "DejaVuSansMono.ttf",
    "serif": "LiberationSerif-Regular.ttf",
    "chinese": "wqy-zenhei.ttc",
}


def missing_fonts() -> str:
    """Name the first font that is not installed; empty if all are."""
    for name in FONTS:
        try:
            font(name, 8)
        except OSError:
            return FONTS[name]
    return ""


@cache
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(FONTS[name], size)


@dataclass(frozen=True, slots=True)
class Printed:
    """A line of text, and its corners float64[4, 2] clockwise from the text's top left, in pixels."""

    text: str
    box: np.ndarray


@dataclass(slots=True)
class Paper:
    """A grey sheet; `lines` are its text, and `ignored` the corners of marks whose text does not count.

    Its bars look like bars, and say nothing until `print_numbers`.
    """

    width: int
    height: int
    ink: int = 20
    lines: list[Printed] = field(default_factory=list)
    ignored: list[np.ndarray] = field(default_factory=list)
    numbered: list[tuple[int, int, int, int, str]] = field(default_factory=list)
    image: Image.Image = field(init=False)

    def __post_init__(self) -> None:
        self.image = Image.new("L", (self.width, self.height), 252)

    @property
    def draw(self) -> ImageDraw.ImageDraw:
        return ImageDraw.Draw(self.image)

    def text(
        self, x: float, y: float, text: str, name: str = "sans", size: int = 24, ink: int | None = None
    ) -> float:
        """Print a line with its top left at a place; returns the y of the next line."""
        face = font(name, size)
        left, top, right, bottom = face.getbbox(text)
        self.draw.text((x, y), text, fill=self.ink if ink is None else ink, font=face)
        self.lines.append(Printed(text, rectangle(x + left, y + top, x + right, y + bottom)))
        return y + size * 1.25

    def centered(self, y: float, text: str, name: str = "sans", size: int = 24) -> float:
        return self.text((self.width - font(name, size).getlength(text)) / 2, y, text, name, size)

    def rule(self, y: float, width: int = 3) -> None:
        self.draw.line((20, y, self.width - 20, y), fill=self.ink, width=width)

    def upright_rule(self, x: float, top: float, bottom: float) -> None:
        self.draw.line((x, top, x, bottom), fill=self.ink, width=2)

    def block(self, x: float, y: float, text: str, size: int) -> None:
        width = font("chinese", size).getlength(text)
        self.draw.rectangle((x, y, x + width + size, y + size * 1.4), fill=self.ink)
        self.text(x + size / 2, y + size * 0.1, text, "chinese", size, ink=250)

    def bars(self, x: float, y: float, width: float, height: float, draw: Random, number: str = "") -> None:
        pen, left = self.draw, x
        if number:
            self.numbered.append((int(x), int(y), int(width), int(height), number))
        while left < x + width:
            bar = draw.choice((2, 2, 4, 6))
            pen.rectangle((left, y, min(left + bar, x + width) - 1, y + height), fill=self.ink)
            left += bar + draw.choice((2, 2, 4, 6))

    def print_numbers(self) -> None:
        """Print the bars of Code 128 or GS1-128 where those of a number are."""
        for x, y, width, height, number in self.numbered:
            options = {"gs1": True} if number.startswith("(") else {}
            made = zxingcpp.create_barcode(number, zxingcpp.BarcodeFormat.Code128, **options)
            modules = np.array(zxingcpp.write_barcode_to_image(made))[0]
            levels = np.where(np.repeat(modules, width // len(modules)) < 128, self.ink, 252).astype(np.uint8)
            self.draw.rectangle((x, y, x + width, y + height), fill=252)
            self.image.paste(Image.fromarray(np.tile(levels, (height, 1))), (x, y))

    def squares(self, x: float, y: float, size: int, draw: Random) -> None:
        cells = np.array([[draw.random() < 0.5 for _ in range(size // 6)] for _ in range(size // 6)])
        cells[:, 0] = cells[-1, :] = True
        levels = np.where(cells, self.ink, 252).astype(np.uint8).repeat(6, 0).repeat(6, 1)
        self.image.paste(Image.fromarray(levels), (int(x), int(y)))


def rectangle(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    """Return the corners float64[4, 2] of a rectangle, clockwise from the top left."""
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], np.float64)
