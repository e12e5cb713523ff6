"""Export detectors of Transformers, torchvision and TensorFlow with random weights, and find objects.

`python tools/export/other_detectors.py PHOTO FOLDER FAMILY` writes an export with fixed and one with variable
shapes, and `boxes.json`: label, score and box of each object. Families: detr, rt_detr, ssdlite, tensorflow.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

LABELS = dict(enumerate(("parcel", "pallet", "van", "truck", "forklift", "person", "door")))


def calibrate(torch, network, layers, image) -> None:
    """Give normalisations the statistics of the photo, and results a range with some above thresholds."""

    def scale(layer, inputs, scores) -> None:
        places = [0, 1] if scores.ndim == 3 else [0, 2, 3]
        factor = 2 / scores.std(places).mean()
        layer.bias.data = -1 - (scores.mean(places) - layer.bias) * factor
        layer.weight.data *= factor

    for module in network.eval().modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
            module.train()
    network(image)
    hooks = [layer.register_forward_hook(scale) for layer in layers]
    network.eval()(image)
    for hook in hooks:
        hook.remove()


def of_transformers(picture: Image.Image, folder: Path, family: str) -> list:
    """Export DETR or RT-DETR as Optimum does, with its configuration beside it."""
    import torch

    load_torchvision()
    import transformers as hf

    torch.manual_seed(1)
    blocks = {
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 48, 64],
        "depths": [1] * 4,
        "layer_type": "basic",
    }
    sizes = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_layers": 2}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 60}
    sizes |= {
        "id2label": LABELS,
        "label2id": {name: index for index, name in LABELS.items()},
        "backbone": None,
    }
    if family == "detr":
        backbone = hf.ResNetConfig(**blocks, out_features=["stage4"])
        config = hf.DetrConfig(backbone_config=backbone, use_timm_backbone=False, encoder_layers=2, **sizes)
        network, processor = hf.DetrForObjectDetection(config), hf.DetrImageProcessor()
        for module in network.model.modules():  # its own small weights would give all queries the same result
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                torch.nn.init.normal_(module.weight, std=0.3)
        layers = [network.class_labels_classifier, network.bbox_predictor.layers[-1]]
    else:
        backbone = hf.RTDetrResNetConfig(**blocks, out_features=["stage2", "stage3", "stage4"])
        sizes |= {
            "encoder_in_channels": [32, 48, 64],
            "decoder_in_channels": [64] * 3,
            "anchor_image_size": None,
        }
        config = hf.RTDetrConfig(backbone_config=backbone, encoder_hidden_dim=64, **sizes)
        network, processor = hf.RTDetrForObjectDetection(config), hf.RTDetrImageProcessor()
        decoder = network.model.decoder
        for block in (network.model.enc_bbox_head, *decoder.bbox_embed):  # zeros would leave all boxes square
            torch.nn.init.normal_(block.layers[-1].weight, std=0.1)
        layers = [*decoder.class_embed, network.model.enc_score_head]
    pixels = processor(picture, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        calibrate(torch, network, layers, pixels)
        results = network(pixels)
    (objects,) = processor.post_process_object_detection(results, 0.25, target_sizes=[picture.size[::-1]])
    config.save_pretrained(folder)
    processor.save_pretrained(folder)

    class Outputs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, pixel_values):
            results = self.network(pixel_values)
            return results.logits, results.pred_boxes

    names = {"input_names": ["pixel_values"], "output_names": ["logits", "pred_boxes"]}
    axes = {name: {0: "batch_size", 1: "num_queries"} for name in names["output_names"]}
    axes["pixel_values"] = {0: "batch_size", 1: "num_channels", 2: "height", 3: "width"}
    for name, free in (("fixed", None), ("dynamic", axes)):
        path = folder / f"{family}-{name}.onnx"
        torch.onnx.export(
            Outputs(), (pixels,), path, dynamo=False, opset_version=17, dynamic_axes=free, **names
        )
    names = [LABELS.get(int(index), str(int(index))) for index in objects["labels"]]
    return list(zip(names, objects["scores"].tolist(), objects["boxes"].tolist(), strict=True))


def load_torchvision():
    """Import torchvision; without CUDA, which its compiled part needs, with an NMS in Python."""
    import torch

    folder = Path(importlib.util.find_spec("torchvision").origin).parent
    try:
        torch.ops.load_library(folder / "_C.so")
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor boxes, Tensor scores, float limit) -> Tensor")
        library.impl("nms", suppress, "CPU")
        load_torchvision.library = library  # it lasts as long as this object
    import torchvision
    from torchvision.ops import boxes
    from torchvision.ops._register_onnx_ops import _register_custom_op

    boxes._assert_has_ops = accept_operators
    _register_custom_op()
    return torchvision


def accept_operators() -> None:
    """Say that the operators are there."""


def suppress(boxes, scores, limit):
    """Non-maximum suppression. Source: torchvision, csrc/ops/cpu/nms_kernel.cpp."""
    import torch

    left, kept = scores.argsort(descending=True, stable=True), []
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    while len(left):
        best, rest = left[0], left[1:]
        sides = torch.minimum(boxes[best, 2:], boxes[rest, 2:]) - torch.maximum(
            boxes[best, :2], boxes[rest, :2]
        )
        common = sides.clamp(0).prod(1)
        kept.append(int(best))
        left = rest[common / (areas[best] + areas[rest] - common) <= limit]
    return torch.tensor(kept, dtype=torch.int64)


def of_torchvision(picture: Image.Image, folder: Path, family: str) -> list:
    """Export SSDlite as torchvision's documentation does."""
    import torch

    torch.manual_seed(3)
    network = load_torchvision().models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None
    )
    network.score_thresh = 0.05
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
    layers = [block[-1] for block in network.head.classification_head.module_list]
    with torch.no_grad():
        calibrate(torch, network, layers, [pixels, pixels.flip(2), pixels.flip(1)])
        (objects,) = network([pixels])
    names = {"input_names": ["images"], "output_names": ["boxes", "scores", "labels"]}
    axes = {"images": {0: "batch", 2: "height", 3: "width"}} | {
        name: {0: "n"} for name in names["output_names"]
    }
    for name, free in (("fixed", None), ("dynamic", axes)):
        path = folder / f"{family}-{name}.onnx"
        torch.onnx.export(
            network, (pixels[None],), path, dynamo=False, opset_version=17, dynamic_axes=free, **names
        )
    labels = [str(int(index)) for index in objects["labels"]]
    return list(zip(labels, objects["scores"].tolist(), objects["boxes"].tolist(), strict=True))


def of_tensorflow(picture: Image.Image, folder: Path, family: str) -> list:
    """Export a network with the inputs and outputs of TensorFlow's Object Detection API."""
    import tensorflow as tf
    import tf2onnx

    tf.random.set_seed(5)
    layers = tf.keras.layers
    convolutions = [
        layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu", kernel_initializer=start)
        for filters, start in ((size, tf.keras.initializers.HeNormal(size)) for size in (8, 16, 24, 32))
    ]
    start = tf.keras.initializers.RandomNormal(0, 0.8, seed=3)
    sides, scores = layers.Conv2D(4, 1), layers.Conv2D(4, 1, kernel_initializer=start)
    places = np.stack(np.meshgrid(*[(np.arange(20, dtype="f4") + 0.5) / 20] * 2, indexing="ij"), -1).reshape(
        -1, 2
    )

    def detect(input_tensor):
        pixels = tf.image.resize(tf.cast(input_tensor, tf.float32), (320, 320)) * (2 / 255) - 1
        for layer in convolutions:
            pixels = layer(pixels)
        distances = tf.reshape(sides(pixels), (-1, 400, 4))
        centres = places[None] + distances[..., :2] * 0.02
        halves = 0.12 * tf.exp(tf.clip_by_value(distances[..., 2:], -1, 1)) / 2
        raw = tf.concat([centres - halves, centres + halves], -1)
        kept = tf.image.combined_non_max_suppression(
            raw[:, :, None], tf.sigmoid(tf.reshape(scores(pixels), (-1, 400, 4)) - 1), 20, 100, 0.5, 0.3
        )
        return {
            "detection_boxes": kept.nmsed_boxes,
            "detection_scores": kept.nmsed_scores,
            "detection_classes": kept.nmsed_classes + 1,
            "num_detections": tf.cast(kept.valid_detections, tf.float32),
        }

    image = np.array(picture)[None]
    outputs = {name: tensor.numpy()[0] for name, tensor in detect(image).items()}
    for name, shape in (("fixed", image.shape), ("dynamic", (1, None, None, 3))):
        signature = [tf.TensorSpec(shape, tf.uint8, name="input_tensor")]
        path = folder / f"{family}-{name}.onnx"
        tf2onnx.convert.from_function(tf.function(detect), signature, opset=13, output_path=str(path))
    boxes = outputs["detection_boxes"][:, [1, 0, 3, 2]] * np.array([*picture.size] * 2)
    count, labels = int(outputs["num_detections"]), outputs["detection_classes"].astype(int).astype(str)
    return list(zip(labels, outputs["detection_scores"].tolist(), boxes.tolist(), strict=True))[:count]


def main(photo: str, target: str, family: str) -> None:
    """Write the exports and the objects of a family."""
    exports = {"ssdlite": of_torchvision, "tensorflow": of_tensorflow}
    folder, picture = Path(target), Image.open(photo)
    objects = exports.get(family, of_transformers)(picture, folder, family)
    # Some are not limited to the photo.
    limited = [(name, score, np.clip(box, 0, [*picture.size] * 2).tolist()) for name, score, box in objects]
    (folder / "boxes.json").write_text(json.dumps({family: limited}))


if __name__ == "__main__":
    main(*sys.argv[1:])
