"""Labels with text for tests: large black letters on white."""

from PIL import Image, ImageDraw, ImageFont

from tests.pictures import save

WORDS = ["EXPRESS PARCEL", "RA123456785CN", "Weight 2.50 kg"]


def label(*words: str) -> Image.Image:
    picture = Image.new("RGB", (900, 500), "white")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(48)
    for index, word in enumerate(words):
        pen.text((60, 40 + 140 * index), word, fill="black", font=font)
    return picture


LABEL, BLANK = save(label(*WORDS)), save(label())
