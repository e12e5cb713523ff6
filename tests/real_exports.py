"""Detectors as their frameworks export them: what `add` finds in a photo, and what the framework found."""

import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from nereid.base.assets import COFFEE
from nereid.models.publish.add import AddRequest
from tests.publishing import propose

EXPORTS = Path(__file__).parent / "exports"
ULTRALYTICS = ("yolov5n", "yolov8n", "yolov10n", "yolo11n", "yolo26n", "rtdetr-l")
OTHERS = ("detr", "rt_detr", "ssdlite", "tensorflow")
AXES = ("fixed", "dynamic")
OBJECTS = {"score_threshold": "0.25", "iou_threshold": "0.45"}
SHOWN = 10
# Width and height of photos that need no resize, which frameworks do in many ways; one needs a border.
WITH_BORDER = (320, 240)
SIZES = {"rtdetr-l": (320, 320), "detr": (800, 800)} | dict.fromkeys(OTHERS[1:], (640, 640))


def write_photo(folder: Path, family: str) -> Path:
    path = folder / f"{family}.png"
    Image.open(COFFEE).convert("RGB").resize(SIZES.get(family, WITH_BORDER)).save(path)
    return path


def unpack(folder: Path) -> Path:
    """Write the exports of tiny networks that are in this checkout, and their objects."""
    with tarfile.open(EXPORTS / "networks.tar.xz") as archive:
        for member in archive:
            if file := archive.extractfile(member):
                (folder / member.name).write_bytes(file.read())
    (folder / "boxes.json").write_bytes((EXPORTS / "boxes.json").read_bytes())
    return folder


def assert_same_objects(folder: Path, family: str, axes: str, repository: Path) -> None:
    """Add an export without an option that its file answers; its best objects must be the framework's."""
    photo = write_photo(folder, family)
    request = AddRequest(folder / f"{family}-{axes}.onnx", "own", images=(photo,), post_processing=OBJECTS)

    objects = propose(repository, request).results[photo.name]
    known = json.loads((folder / "boxes.json").read_text())[family]
    assert len(objects) == SHOWN
    for found in objects:
        same = [row for row in known if row[0] == found["label"]]
        rows = [row for row in same if found["score"] == pytest.approx(row[1], abs=0.01)]
        assert any(found["box"] == pytest.approx(box, abs=1) for *_, box in rows), (found, rows or known)
