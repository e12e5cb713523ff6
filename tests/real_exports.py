"""Detectors as their frameworks export them: what `add` finds in a photo, and what the framework found."""

import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from nereid.assets import COFFEE
from nereid.publish.add import AddRequest, Proposal, add

EXPORTS = Path(__file__).parent / "exports"
FAMILIES = ("yolov5n", "yolov8n", "yolov10n", "yolo11n", "yolo26n", "rtdetr-l")
AXES = ("fixed", "dynamic")
OBJECTS = {"score_threshold": "0.25", "iou_threshold": "0.45"}
SHOWN = 10


def write_photos(folder: Path) -> Path:
    """Write a photo that needs a border and a square one, without a resize: frameworks do it in many ways."""
    for name, height in (("border.png", 240), ("square.png", 320)):
        Image.open(COFFEE).convert("RGB").resize((320, height)).save(folder / name)
    return folder


def photo_for(family: str) -> str:
    """Return the name of the photo in which the framework's own network found objects."""
    return "square.png" if family.startswith("rtdetr") else "border.png"


def unpack(folder: Path) -> Path:
    """Write the exports of tiny networks that are in this checkout, and their objects."""
    with tarfile.open(EXPORTS / "networks.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (folder / "boxes.json").write_bytes((EXPORTS / "boxes.json").read_bytes())
    return folder


def assert_same_objects(folder: Path, family: str, axes: str, repository: Path) -> None:
    """Add an export without an option that its file answers; its best objects must be the framework's."""
    photo, proposals = write_photos(folder) / photo_for(family), list[Proposal]()
    request = AddRequest(folder / f"{family}-{axes}.onnx", "own", images=(photo,), last_step=OBJECTS)

    def confirm(proposal: Proposal) -> bool:
        proposals.append(proposal)
        return True

    add(repository, request, None, confirm=confirm)

    found = proposals[0].objects[photo.name]
    assert len(found) == SHOWN
    for each in found:
        known = [
            row for row in json.loads((folder / "boxes.json").read_text())[family] if row[0] == each.label
        ]
        close = [box for _, score, box in known if each.score == pytest.approx(score, abs=0.01)]
        assert any(each.box == pytest.approx(box, abs=1) for box in close), (each, known)
