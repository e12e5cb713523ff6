"""Readers with the default networks, and rendered pages for them."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import onnxruntime
from PIL import Image, ImageDraw, ImageFont

from nereid.base.assets import TEXT_REPOSITORY
from nereid.base.errors import ServingError
from nereid.tasks.read.characters import Characters, RecognisedLine
from nereid.tasks.read.reader import Networks, ReadFile, TextReader
from nereid.vision.imaging.decode import ImageLimits
from tests.pictures import save

RECOGNISER = TEXT_REPOSITORY / "text_recognise" / "1" / "model.onnx"
LINES = ("HELLO WORLD 2026", "RB123456785GB", "second row")


@cache
def session(name: str, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # the networks have weights that no operator uses
    return onnxruntime.InferenceSession(str(TEXT_REPOSITORY / name / "1" / "model.onnx"), options)


def networks(threads: int = 1) -> Networks:
    def run(name: str, tensor: Any) -> Any:
        return session(name, threads).run(None, {"x": tensor})

    return Networks(
        lambda tensor: run("text_detect", tensor)[0],
        lambda tensor: run("text_direction", tensor)[0],
        lambda tensor: tuple(run("text_recognise", tensor)),
    )


class LineReader:
    """A reader that returns only each image's lines or its error; `files` is the whole last batch."""

    def __init__(self, inner: TextReader) -> None:
        self._inner = inner
        self.files: list[ReadFile] = []

    def read(self, *arguments: Any) -> list[list[RecognisedLine] | ServingError]:
        self.files = self._inner.read(*arguments)
        return [file.error or file.lines for file in self.files]


def reader(limits: ImageLimits | None = None, other: Networks | None = None, **options: Any) -> LineReader:
    return LineReader(TextReader(other or networks(), Characters.from_file(RECOGNISER), limits, **options))


def page(lines: Sequence[str] = LINES, size_px: int = 32, width: int = 640) -> Image.Image:
    image = Image.new("RGB", (width, 40 + len(lines) * 2 * size_px), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(size_px)
    for index, line in enumerate(lines):
        draw.text((30, 20 + index * 2 * size_px), line, "black", font)
    return image


@cache
def crowded_page() -> bytes:
    """Draw 1,000 words, which a reader takes for lines; the file has 5 kB."""
    image = Image.new("L", (1000, 2000), 255)
    draw = ImageDraw.Draw(image)
    for top in range(4, 1000 * 2, 40):
        for left in range(4, 960, 48):
            draw.text((left, top), "IIII", fill=0)
    return save(image)
