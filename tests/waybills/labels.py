"""Pages of text as photos, and labels with the numbers of a public collection as scans."""

from pathlib import Path
from random import Random

from nereid.base.assets import TEXT_REPOSITORY
from nereid.tasks.read.fields.specification import carrier_formats, read_specification
from tests.pictures import save
from tests.waybills import words
from tests.waybills.decoys import HEIGHT, LEADING, page
from tests.waybills.generator import Waybill, photo
from tests.waybills.paper import Paper

FIELDS = TEXT_REPOSITORY / "read_waybill_v1" / "waybill.json"
FORMS = carrier_formats(read_specification(FIELDS).fields[0])
# Carriers and numbers of the collection, as they are written there.
ROWS = Path(__file__).with_name("collection.txt").read_text().splitlines()[1:]
COLLECTION = [(row.partition("|")[0], number) for row in ROWS for number in row.split("|")[1:]]
FACES = ("sans", "bold", "narrow", "wide", "serif")
# Pixels of a printed page for one of its text.
SCALE = 1.5


def page_photo(seed: int) -> Waybill:
    """Return a photo of `decoys.page`: some have bars of the number, and some those of another one."""
    made, draw = page(seed, FORMS), Random(f"photo {seed}")
    bottom = SCALE * max(float(line.box[2, 1]) for line in made.lines) + LEADING
    right = SCALE * max(float(line.box[1, 0]) for line in made.lines)
    paper, face = Paper(max(round(right), 900), round(bottom) + 200, draw.randint(0, 50)), draw.choice(FACES)
    for line in made.lines:
        is_chinese = any(ord(character) > 0x2E80 for character in line.text)
        left, top = (SCALE * line.box[0]).tolist()
        paper.text(left, top, line.text, "chinese" if is_chinese else face, round(SCALE * HEIGHT * 0.9))
    barred = made.number if draw.random() < 0.45 else made.other
    if barred and draw.random() < 0.9:
        paper.bars(60, bottom, 780, 130, draw, barred)
        paper.print_numbers()
    return photo(seed, "page", paper, made.number, draw)


def collection_label(index: int) -> Waybill:
    """Return a label with a number of the collection, without bars: its carrier, addresses and a word."""
    (carrier, number), draw = COLLECTION[index], Random(f"label {index}")
    paper, face = Paper(1100, 640), draw.choice(FACES)
    paper.text(30, 24, carrier.upper(), "bold", 48)
    paper.rule(94, 4)
    y = 110.0
    sender, receiver = ((words.person(draw), *words.address(draw)) for _ in range(2))
    for line in ("FROM", *sender, "SHIP TO:", *receiver):
        y = paper.text(30, y, line, face, 28)
    paper.rule(y + 10)
    paper.text(30, y + 26, draw.choice(("TRACKING #", "TRACKING NUMBER", "TRK#")), "bold", 26)
    paper.text(30, y + 64, number, face, 34)
    value = "".join(filter(str.isalnum, number))
    return Waybill(index, carrier, save(paper.image, "JPEG", quality=90), value, tuple(paper.lines), ())
