"""Export detectors of Ultralytics with random weights, and find objects with the PyTorch networks themselves.

`python tools/export/detectors.py PHOTO FOLDER FAMILY...` writes two exports per family, with fixed and with
variable shapes, and `boxes.json`: label, score and box of each object. It needs Ultralytics 8.4.190.

With `--tiny` the networks are narrow and have few different weights. `tests/exports` holds those, made with
the photos of `tests/real_exports.py` and packed with
`tar --sort=name --owner=0 --group=0 --numeric-owner --mode=644 --mtime=@0 -cf - *.onnx | xz -9e`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import torch
from PIL import Image
from ultralytics import RTDETR, YOLO
from ultralytics.nn.tasks import yaml_model_load
from ultralytics.utils import YAML

SIDE = 320
THRESHOLDS = {"conf": 0.25, "iou": 0.45}
NAMES = {0: "parcel", 1: "pallet", 2: "van"}


def narrow(family: str) -> None:
    """Write the family's file into this folder, where Ultralytics looks first: few channels, 3 classes."""
    layers = yaml_model_load(f"{family}.yaml")
    layers["nc"] = len(NAMES)
    if family.startswith("rtdetr"):
        for layer in layers["backbone"] + layers["head"]:
            layer[3] = [max(8, size // 8) if str(size).isdigit() and size > 8 else size for size in layer[3]]
        # Width, queries, points, heads, layers, inner width.
        layers["head"][-1][3] = ["nc", 32, 60, 4, 4, 2, 64]
    else:
        layers["scales"] = {"n": [0.33, 0.0625, 1024]}
        layers["reg_max"] = min(4, layers.get("reg_max", 4))
    YAML.save(f"{family}.yaml", layers)


def coarse(network: torch.nn.Module) -> None:
    """Round weights to a few numbers, which compress well."""
    for layer in network.modules():
        # A convolution with one channel holds the numbers of distances.
        if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear)) and len(layer.weight) > 1:
            step = 2.0 ** layer.weight.std().clamp(0.001).log2().round()
            layer.weight.data = (layer.weight / step).round() * step


def scale_scores(layer: torch.nn.Module, inputs: object, scores: torch.Tensor) -> None:
    """Give scores a range that puts 20 above the threshold."""
    factor = 2 / scores.std()
    layer.weight.data *= factor
    layer.bias.data[:] = -1.1 - ((scores - scores.mean()) * factor).flatten().topk(20).values[-1]


def scale_sides(layer: torch.nn.Module, inputs: object, sides: torch.Tensor) -> None:
    """Give distances a range with few below 0."""
    layer.weight.data /= sides.std()


def build(family: str, pixels: torch.Tensor, is_tiny: bool) -> YOLO | RTDETR:
    """Return a network whose normalisations have the statistics of the photo."""
    torch.manual_seed(7)
    model = RTDETR(f"{family}.yaml") if family.startswith("rtdetr") else YOLO(f"{family}.yaml")
    network = model.model.eval()
    for layer in network.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = None
            layer.train()
    with torch.no_grad():
        network(pixels)
        network.eval().fuse(verbose=False)
        head = network.model[-1]
        if is_tiny:
            coarse(network)
            network.names = NAMES
        if family.startswith("rtdetr"):
            for block in (head.enc_bbox_head, *head.dec_bbox_head):  # zeros would leave all boxes square
                torch.nn.init.normal_(block.layers[-1].weight, std=0.1)
            hooks = [head.dec_score_head[-1].register_forward_hook(scale_scores)]
        else:
            hooks = [
                layer[-1].register_forward_hook(hook)
                for layers, hook in (
                    (head.cv2 or head.one2one_cv2, scale_sides),
                    (head.cv3 or head.one2one_cv3, scale_scores),
                )
                for layer in layers
            ]
        network(pixels)
    for hook in hooks:
        hook.remove()
    return model


def main(photo: str, folder: str, *families: str, is_tiny: bool = False) -> None:
    """Write the exports of the families and their objects into the folder, beside those of an earlier run."""
    picture = Image.open(photo)
    seen = np.full((SIDE, SIDE, 3), 114, np.uint8)
    top = (SIDE - picture.height) // 2
    seen[top : SIDE - top] = picture
    pixels = torch.from_numpy(seen).permute(2, 0, 1)[None] / 255
    boxes = Path(folder, "boxes.json")
    objects = json.loads(boxes.read_text()) if boxes.exists() else {}
    for family in families:
        if is_tiny:
            narrow(family)
        model = build(family, pixels, is_tiny)
        for axes in ("fixed", "dynamic"):
            path = model.export(
                format="onnx", imgsz=SIDE, dynamic=axes == "dynamic", simplify=axes == "fixed"
            )
            exported = onnx.load(path)
            notes = [
                note for note in exported.metadata_props if note.key != "date"
            ]  # so that two runs write the same
            del exported.metadata_props[:]
            exported.metadata_props.extend(notes)
            onnx.save(exported, f"{folder}/{family}-{axes}.onnx")
        # Its warm-up would import torchvision, whose compiled part needs CUDA.
        model.add_callback("on_predict_start", lambda predictor: setattr(predictor, "done_warmup", True))
        (result,) = model.predict(photo, imgsz=SIDE, rect=False, **THRESHOLDS)
        names = [result.names[int(index)] for index in result.boxes.cls]
        # RT-DETR's are not limited to the photo.
        sides = result.boxes.xyxy.clamp(torch.zeros(4), torch.tensor([*picture.size] * 2))
        numbers = [tensor.numpy().astype(float).round(4).tolist() for tensor in (result.boxes.conf, sides)]
        objects[family] = list(zip(names, *numbers, strict=True))
        boxes.write_text(json.dumps(objects))


if __name__ == "__main__":
    main(*(word for word in sys.argv[1:] if word != "--tiny"), is_tiny="--tiny" in sys.argv)
