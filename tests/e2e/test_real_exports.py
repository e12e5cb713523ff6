"""Detectors as today's Ultralytics exports them, added without an option: its own boxes within a pixel."""

import json
import os
import subprocess
import sys

import pytest
from PIL import Image

from nereid.assets import COFFEE
from nereid.publish.add import AddRequest, Proposal, add

pytestmark = pytest.mark.nightly(minutes=2)
# Of Ultralytics' packages, only those that an export needs and this environment lacks.
PACKAGES = ("torchvision==0.28.0", "ultralytics==8.4.190", "ultralytics-thop==2.2.3", "onnxslim==0.1.98")
TORCH = "torch==2.13.0"
FAMILIES = ("yolov5n", "yolov8n", "yolov10n", "yolo11n", "yolo26n")
AXES = ("fixed", "dynamic")
OBJECTS = {"score_threshold": "0.25", "iou_threshold": "0.45"}
# Exports networks with random weights, and finds objects with the PyTorch network. Normalisations get the
# statistics of the photo, and scores a scale that puts a few dozen above the threshold.
EXPORT = """
import json, shutil, sys
import numpy as np
import torch
from PIL import Image
from ultralytics import YOLO

def scale(layer, given, scores):
    layer.weight.data /= scores.std()
    layer.bias.data[:] = -8

photo, folder, *families = sys.argv[1:]
seen = np.full((320, 320, 3), 114, np.uint8)
seen[40:280] = Image.open(photo)
pixels = torch.from_numpy(seen).permute(2, 0, 1)[None] / 255
found = {}
for family in families:
    torch.manual_seed(7)
    model = YOLO(f"{family}.yaml")
    for each in model.model.modules():
        if isinstance(each, torch.nn.BatchNorm2d):
            each.momentum = None
    head = model.model.model[-1]
    layers = [each[-1] for each in (*head.cv3, *getattr(head, "one2one_cv3", ()))]
    hooks = [each.register_forward_hook(scale) for each in layers]
    with torch.no_grad():
        model.model.train()(pixels)
    for each in hooks:
        each.remove()
    model.model.eval()
    for axes in ("fixed", "dynamic"):
        path = model.export(format="onnx", imgsz=320, dynamic=axes == "dynamic", simplify=axes == "fixed")
        shutil.move(path, f"{folder}/{family}-{axes}.onnx")
    # Its warm-up would import torchvision, whose compiled part needs CUDA.
    model.add_callback("on_predict_start", lambda each: setattr(each, "done_warmup", True))
    (result,) = model.predict(photo, imgsz=320, conf=0.25, iou=0.45, rect=False)
    boxes = result.boxes
    names = [result.names[int(each)] for each in boxes.cls]
    found[family] = list(zip(names, boxes.conf.tolist(), boxes.xyxy.tolist()))
print("RESULT", json.dumps(found))
"""


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """A photo that needs a border but no resize, which Ultralytics does in another way."""
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.open(COFFEE).convert("RGB").resize((320, 240)).save(path)
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory, photo):
    """The folder of the exports, and Ultralytics' objects: label, score and box, by family."""
    folder = tmp_path_factory.mktemp("ultralytics")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder / "packages"]
    for packages in ([TORCH], ["--no-deps", *PACKAGES]):
        subprocess.run([*install, *packages], check=True, timeout=1800)
    env = os.environ | {"PYTHONPATH": str(folder / "packages"), "YOLO_CONFIG_DIR": str(folder)}
    words = [sys.executable, "-c", EXPORT, photo, folder, *FAMILIES]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, json.loads(done.stdout.partition("RESULT ")[2])


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("family", FAMILIES)
def test_boxes_are_those_of_ultralytics(exported, photo, tmp_path, family, axes):
    folder, expected = exported
    seen: list[Proposal] = []
    request = AddRequest(folder / f"{family}-{axes}.onnx", "own", images=(photo,), last_step=OBJECTS)

    add(tmp_path / "models", request, None, confirm=lambda proposal: not seen.append(proposal))

    found = seen[0].objects["photo.png"]
    assert len(found) == 10  # the best ones
    for each in found:
        known = [(score, box) for label, score, box in expected[family] if label == each.label]
        close = [box for score, box in known if each.score == pytest.approx(score, abs=0.01)]
        assert any(each.box == pytest.approx(box, abs=1) for box in close), (each, known)
