"""How exactly rendered labels are read: waybills by RapidOCR and by Nereid, and labels and pages by Nereid.

python -m loadtest.reading_accuracy [--count 5000] [--sets proof] [--minutes 600] [--record reading_accuracy]

The character error rate is the number of inserted, deleted and replaced characters, divided by the number of
printed ones. Lines are matched by their boxes (`loadtest/reading_score.py`). Texts are compared in NFKC,
without spaces, with regard to case. Readings are kept in a file: a run that was interrupted goes on, and new
rules for fields are measured on the same readings. A change of the reader begins anew.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from rapidocr import RapidOCR

from loadtest import record
from loadtest.reading_score import KINDS, errors, has_number, kind, passages
from nereid.base.errors import ServingError
from nereid.tasks import read as reading
from nereid.tasks.read.characters import RecognisedLine
from nereid.tasks.read.fields.field_search import Barcode, FoundField, find_fields
from nereid.tasks.read.fields.specification import read_specification
from tests.readers import reader
from tests.waybills.generator import DEVELOPMENT, PROOF, Waybill, waybill
from tests.waybills.labels import COLLECTION, FIELDS, collection_label, page_photo

# Lines, and barcodes with their corners.
Reading = tuple[list[RecognisedLine], list[Barcode]]
OURS, THEIRS = "Nereid", "RapidOCR"
# By the name of a set: its seeds, the image of a seed, and who reads it. No code may be tuned on a proof set.
SETS: Mapping[str, tuple[range, Callable[[int], Waybill], tuple[str, ...]]] = {
    "development": (DEVELOPMENT, waybill, (THEIRS, OURS)),
    "proof": (PROOF, waybill, (THEIRS, OURS)),
    "proof with bars": (PROOF, partial(waybill, has_barcodes=True), (OURS,)),
    "collection": (range(len(COLLECTION)), collection_label, (OURS,)),
    "pages": (range(300_000, 305_000), page_photo, (OURS,)),
}
READINGS = Path("reading_accuracy.history.jsonl")
# Minimum fraction of correct fields, by set; and of correct numbers among those returned as valid.
TARGETS, TARGET_RIGHT = {"proof": 0.85, "proof with bars": 0.97, "collection": 115 / 120}, 0.99
_WHO: record.Columns = {"images": "{images:,}, {set}", "reader": "{reader}"}
COLUMNS: record.Columns = {
    **_WHO,
    "number is in its line": "{number_in_line:.1%}",
    "number is the field": "{number_exact:.1%}",
    "character errors": "{character_error_rate:.2%}",
    "returned as valid": "{answered_as_valid:.1%}",
    "of these, right": "{valid_right:.1%}",
    "certain": "{certain:.1%}",
    "certain but wrong": lambda row: len(row["wrong_certain"]),
}
KIND_COLUMNS: record.Columns = {**_WHO, **{name: f"{{kinds[{name}]}}" for name in KINDS}}
SUMMED = ("in_line", "valid", "certain", "errors", "characters")


def compared(image: Waybill, lines: Sequence[RecognisedLine], number: FoundField) -> record.Row:
    """Return the counts of one image."""
    pairs = passages(image.lines, lines, image.ignored)
    return {
        "seed": image.seed,
        "printed": image.tracking_number,
        "answered": number.value,
        "kind": kind(image.tracking_number, number.value, pairs),
        "in_line": image.tracking_number is None or has_number(image.tracking_number, pairs),
        "valid": number.valid is True,
        "certain": number.certain,
        "errors": sum(map(errors, pairs)),
        "characters": sum(len(pair.printed) for pair in pairs),
    }


def summed(images: Sequence[record.Row]) -> record.Row:
    """Return the sums over the images of a set, and their shares."""
    total, wrong = len(images), [image for image in images if image["kind"]]
    sums = {name: sum(image[name] for image in images) for name in SUMMED}
    listed = {
        name: [{key: image[key] for key in ("seed", "printed", "answered")} for image in wrong if image[name]]
        for name in ("valid", "certain")
    }
    return {
        "images": total,
        "number_in_line": _share(sums["in_line"], total),
        "number_exact": _share(total - len(wrong), total),
        "answered_as_valid": _share(sums["valid"], total),
        "valid_right": _share(sums["valid"] - len(listed["valid"]), sums["valid"]),
        "certain": _share(sums["certain"], total),
        "kinds": {name: sum(image["kind"] == name for image in wrong) for name in KINDS},
        "character_error_rate": round(sums["errors"] / max(sums["characters"], 1), 5),
        **{name: sums[name] for name in ("valid", "characters")},
        **{f"wrong_{name}": rows for name, rows in listed.items()},
    }


class Readings:
    """What readers read on images, in a file."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._end_s = path, time.monotonic() + seconds
        sources = sorted(Path(reading.__path__[0]).glob("*.py"))
        self._code = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
        self._reader = reader(reads_barcodes=True, max_read_s=math.inf)
        self._engine = cache(partial(RapidOCR, params={"Global.log_level": "error"}))
        rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
        self._known = {tuple(key): (lines, barcodes) for key, lines, barcodes in rows}

    def of(self, name: str, encoded: bytes) -> Reading | None:
        """Return the reading of an image by a reader; None if there is none and the time is over."""
        key = (name, hashlib.sha256(encoded).hexdigest(), self._code)
        if key not in self._known:
            if time.monotonic() > self._end_s:
                return None
            self._known[key] = answer = self._ours(encoded) if name == OURS else self._theirs(encoded)
            with self._path.open("a") as file:
                file.write(f"{json.dumps((key, *answer))}\n")
        lines, barcodes = self._known[key]
        return (
            [
                RecognisedLine(text, score, np.array(box, np.float32), others="".join(others))
                for text, score, box, *others in lines
            ],
            [(text, np.array(box, np.float32)) for text, box in barcodes],
        )

    def _ours(self, encoded: bytes) -> tuple[list[Any], list[Any]]:
        (lines,) = self._reader.read([encoded])
        if isinstance(lines, ServingError):
            raise lines
        texts = [(line.text, line.confidence, line.box.tolist(), line.others) for line in lines]
        return texts, [(barcode.text, barcode.box.tolist()) for barcode in self._reader.files[0].barcodes]

    def _theirs(self, encoded: bytes) -> tuple[list[Any], list[Any]]:
        lines: Any = self._engine()(encoded)
        if lines.boxes is None:
            return [], []
        return list(zip(lines.txts, map(float, lines.scores), lines.boxes.tolist(), strict=True)), []


def measure(name: str, count: int, readings: Readings) -> tuple[dict[str, list[record.Row]], str]:
    """Compare the readings of a set, until the time is over; also returns the SHA-256 of its images."""
    seeds, make, readers = SETS[name]
    specification = read_specification(FIELDS)
    rows, digest = {who: list[record.Row]() for who in readers}, hashlib.sha256()
    for image in map(make, seeds[:count]):
        done = [answer for who in readers if (answer := readings.of(who, image.encoded))]
        if len(done) < len(readers):
            break
        digest.update(image.encoded)
        for who, (lines, barcodes) in zip(readers, done, strict=True):
            fields = {field.name: field for field in find_fields(lines, specification, barcodes)}
            rows[who].append(compared(image, lines, fields["tracking_number"]))
        if len(rows[OURS]) % 50 == 0:
            print(f"{name}: {len(rows[OURS])} images", file=sys.stderr)
    return rows, digest.hexdigest()


def missed(rows: Sequence[record.Row]) -> list[str]:
    """Return the targets that Nereid misses."""
    base = {row["set"]: row for row in rows if row["reader"] == THEIRS}
    lines = []
    for row in (row for row in rows if row["reader"] == OURS):
        least = {"valid_right": TARGET_RIGHT, "number_exact": TARGETS.get(row["set"], 0.0)}
        if other := base.get(row["set"]):
            least |= {key: max(least.get(key, 0.0), other[key]) for key in ("number_in_line", "number_exact")}
            if row["character_error_rate"] > other["character_error_rate"]:
                lines.append(f"{row['set']}: more character errors than {THEIRS}")
        lines += [
            f"{row['set']}: {key} {row[key]}, target {of}" for key, of in least.items() if row[key] < of
        ]
        if row["wrong_certain"]:
            lines.append(f"{row['set']}: {len(row['wrong_certain'])} wrong numbers are certain, target 0")
    return lines


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def main() -> int:
    """Measure, print and record; exit status 1 if a target is missed."""
    made = record.parser(__doc__, count=5000, minutes=math.inf)
    made.add_argument("--sets", default=",".join(SETS), help="default: %(default)s")
    args = record.parsed(made)
    cv2.setNumThreads(1)
    readings, rows, digests = Readings(READINGS, args.minutes * 60), [], {}
    for name in args.sets.split(","):
        counts, digests[name] = measure(name, args.count, readings)
        rows += [{"set": name, "reader": who, **summed(images)} for who, images in counts.items()]
    print(record.table(COLUMNS, rows), record.table(KIND_COLUMNS, rows), sep="\n")
    return record.finish(args.record, {"images_sha256": digests, "rows": rows}, missed(rows))


if __name__ == "__main__":
    record.end(main)
