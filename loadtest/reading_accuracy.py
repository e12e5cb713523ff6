"""How exactly rendered waybills are read, by RapidOCR and by Nereid, on two disjoint sets of images.

python -m loadtest.reading_accuracy [--count 500] [--sets development,proof]
    [--record reading_accuracy]

The character error rate is the number of inserted, deleted and replaced characters, divided by the number of
printed ones. Lines are matched by their boxes (`loadtest/reading_score.py`). Texts are compared in NFKC,
without spaces, with regard to case.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from loadtest import record
from loadtest.reading_score import errors, has_number, passages
from nereid.base.assets import TEXT_REPOSITORY
from nereid.base.errors import ServingError
from nereid.tasks.read.characters import RecognisedLine
from nereid.tasks.read.fields.field_search import FoundField, find_fields
from nereid.tasks.read.fields.specification import read_specification
from tests.waybills.generator import SETS, Waybill, waybill

Read = Callable[[bytes], list[RecognisedLine]]
FIELDS = TEXT_REPOSITORY / "read_waybill_v1" / "waybill.json"
# Of the numbers that are answered as valid.
TARGET_RIGHT = 0.99
COLUMNS: record.Columns = {
    "images": "{images}, {set}",
    "reader": "{reader}",
    "number is in its line": "{number_in_line:.1%}",
    "number is the field": "{number_exact:.1%}",
    "character errors": "{character_error_rate:.2%}",
    "answered as valid": "{answered_as_valid:.1%}",
    "of them right": "{valid_right:.1%}",
}


SUMMED = ("in_line", "exact", "valid", "errors", "characters")


def compared(image: Waybill, lines: Sequence[RecognisedLine], number: FoundField) -> record.Row:
    """Return the counts of one image; `wrong` has a wrong number that was answered as valid."""
    found = passages(image.lines, lines, image.ignored)
    is_right = number.value == image.tracking_number
    wrong = {"seed": image.seed, "printed": image.tracking_number, "answered": number.value}
    return {
        "in_line": has_number(image.tracking_number, found),
        "exact": is_right,
        "valid": number.valid,
        "errors": sum(map(errors, found)),
        "characters": sum(len(each.printed) for each in found),
        "wrong": [wrong] if number.valid and not is_right else [],
    }


def summed(images: Sequence[record.Row]) -> record.Row:
    """Return the sums over the images of a set, and their shares."""
    sums = {name: sum(each[name] for each in images) for name in SUMMED}
    wrong = [each for image in images for each in image["wrong"]]
    return {
        "images": len(images),
        "number_in_line": _share(sums["in_line"], len(images)),
        "number_exact": _share(sums["exact"], len(images)),
        "answered_as_valid": _share(sums["valid"], len(images)),
        "valid_right": _share(sums["valid"] - len(wrong), sums["valid"]),
        "valid": sums["valid"],
        "wrong_valid": wrong,
        "character_error_rate": round(sums["errors"] / max(sums["characters"], 1), 5),
        "characters": sums["characters"],
    }


def rapidocr_reader() -> Read:
    """Return RapidOCR with its defaults, in this process."""
    from rapidocr import RapidOCR

    engine: Any = RapidOCR(params={"Global.log_level": "error"})

    def read(encoded: bytes) -> list[RecognisedLine]:
        found = engine(encoded)
        if found.boxes is None:
            return []
        parts = zip(found.txts, found.scores, found.boxes, strict=True)
        return [RecognisedLine(text, float(score), np.asarray(box, np.float32)) for text, score, box in parts]

    return read


def nereid_reader() -> Read:
    """Return Nereid's reader with its default networks, in this process."""
    from tests.readers import reader

    reads = reader()

    def read(encoded: bytes) -> list[RecognisedLine]:
        (lines,) = reads.read([encoded])
        if isinstance(lines, ServingError):
            raise lines
        return lines

    return read


def measure(seeds: Iterable[int], readers: Mapping[str, Read]) -> tuple[dict[str, list[record.Row]], str]:
    """Read the waybills of some seeds with each reader; also returns the SHA-256 of all images."""
    specification = read_specification(FIELDS)
    found, digest = {name: list[record.Row]() for name in readers}, hashlib.sha256()
    for count, seed in enumerate(seeds, 1):
        image = waybill(seed)
        digest.update(image.encoded)
        for name, read in readers.items():
            lines = read(image.encoded)
            (number,) = [each for each in find_fields(lines, specification) if each.name == "tracking_number"]
            found[name].append(compared(image, lines, number))
        if count % 50 == 0:
            print(f"{count} images", file=sys.stderr)
    return found, digest.hexdigest()


def missed(rows: Sequence[record.Row]) -> list[str]:
    """Return the targets that Nereid misses."""
    found = []
    for row in rows:
        if row["reader"] == "RapidOCR":
            base = row
            continue
        where = f"{row['reader']}, {row['set']}"
        if row["valid_right"] < TARGET_RIGHT:
            found.append(f"{where}: {row['valid_right']:.3f} of valid numbers right, target {TARGET_RIGHT}")
        for key in ("number_in_line", "number_exact"):
            if row[key] < base[key]:
                found.append(f"{where}: {key} {row[key]:.3f}, target {base[key]:.3f}")
        if row["character_error_rate"] > base["character_error_rate"]:
            rate, limit = row["character_error_rate"], base["character_error_rate"]
            found.append(f"{where}: character error rate {rate:.4f}, target {limit:.4f}")
    return found


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def main() -> int:
    """Measure, print and record; exit status 1 if Nereid reads less exactly than RapidOCR."""
    made = record.parser(__doc__, count=500)
    made.add_argument("--sets", default="development,proof", help="default: development,proof")
    args = record.parsed(made)
    readers = {"RapidOCR": rapidocr_reader(), "Nereid": nereid_reader()}
    rows, digests = [], {}
    for name in args.sets.split(","):
        found, digests[name] = measure(SETS[name][: args.count], readers)
        rows += [{"set": name, "reader": reader, **summed(images)} for reader, images in found.items()]
    print(record.table(COLUMNS, rows))
    return record.finish(args.record, {"images_sha256": digests, "rows": rows}, missed(rows))


if __name__ == "__main__":
    record.end(main)
