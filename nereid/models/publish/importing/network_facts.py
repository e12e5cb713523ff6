"""Facts about a user's network, read once: from its ONNX file, and from the files of exporters next to it.

Ultralytics, timm and transformers note the preprocessing; these and others note class names.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nereid.base.errors import WrongUsage
from nereid.base.task_registry import TASKS
from nereid.base.units import split_lines
from nereid.repository import onnx_graph
from nereid.repository.onnx_file import OnnxFile
from nereid.vision.inference.signature import Signature

LABEL_FILES = ("labels.txt", "classes.txt")
# Keys of ONNX metadata with class names; `names` is Ultralytics'.
LABEL_KEYS = ("names", "classes", "labels", "class_names", "id2label")
# Key of ONNX metadata with a word per line. Source: PaddleOCR, whose layout detectors list their classes
# there, and whose text recognisers list their characters.
WORDS = "character"
# Preprocessing files of timm and of Hugging Face, next to the ONNX file.
CONFIG_FILES = ("config.json", "preprocessor_config.json")
TASK = re.compile(r"[\w-]{,40}")
MAX_CHARACTERS = 2**20
MAX_NEIGHBOUR_BYTES = 16 * 2**20
ULTRALYTICS = "the file's metadata of Ultralytics"
Size = tuple[int, int]
ANY_SIZE: Size = (0, 0)
# Filters of Pillow by number. Source: Pillow, Image.Resampling.
FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box"}
# Below this side, a processor with `crop_pct` crops. Source: transformers, image_processing_convnext.py.
CONVNEXT_CROPS_PX = 384
# Image processors that crop, and whose integer `size` is the shorter side; for others it is both sides.
# Source: transformers 4.49, `default_to_square=False` in models/*/image_processing_*.py.
SHORTER_SIDE = re.compile(
    "(Bit|CLIP|ChineseCLIP|Levit|MobileNetV1|MobileNetV2|MobileViT|PoolFormer|ViTHybrid)(Image|Feature)"
)
# Settings of image processors that no parameter reproduces: a second normalisation, and other ways to resize.
UNSUPPORTED = ("rescale_offset", "include_top", "do_thumbnail", "do_align_long_axis", "keep_aspect_ratio")


@dataclass(frozen=True, slots=True)
class ExporterSettings:
    """The notes of an exporter about the preprocessing.

    Args:
        parameters: parameters of a preprocess model; empty if there are none.
        origin: where the notes come from, for messages.
        size: height and width of the input in pixels; zeros if unknown.
        head: layout of a detector's outputs; empty if unknown.
        problem: why the noted preprocessing cannot be reproduced; empty if it can.
    """

    parameters: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    size: Size = ANY_SIZE
    head: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """What a user's file says about its network.

    Args:
        sha256: digest of the file.
        signature: inputs and outputs, before any change.
        labels: class names by index; empty if there are none.
        labels_from: their origin, for messages.
        exporter_settings: what the exporter noted about the preprocessing.
        task: the kind of network by Ultralytics' names; empty if unknown.
        characters: a text recogniser's characters; () if there are none.
    """

    sha256: str
    signature: Signature
    labels: tuple[str, ...]
    labels_from: str
    exporter_settings: ExporterSettings
    task: str
    characters: tuple[str, ...]


def read(folder: Path, file: OnnxFile) -> NetworkFacts:
    """Read the facts of a file, and those that exporters wrote to `folder`; unknown metadata is skipped."""
    metadata = onnx_graph.metadata(file.model)
    documents = {name: _document(folder / name) for name in CONFIG_FILES}
    labels, labels_from = _labels(folder, metadata, documents)
    task = metadata.get("task", "")
    characters = tuple(split_lines(metadata.get(WORDS, "")))
    if 2 * sum(len(word) > 1 for word in characters) > len(characters):
        if not labels:
            labels, labels_from = characters, f"the file's metadata '{WORDS}'"
        characters = ()
    return NetworkFacts(
        file.sha256,
        file.signature,
        labels,
        labels_from,
        _noted(metadata, documents),
        task if TASK.fullmatch(task) else "",
        characters,
    )


def _document(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(_text(path, errors="strict"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _text(path: Path, errors: str) -> str:
    """Return the text of a file next to the network; WrongUsage if it is larger than such files ever are."""
    with path.open("rb") as file:
        content = file.read(MAX_NEIGHBOUR_BYTES + 1)
    if len(content) > MAX_NEIGHBOUR_BYTES:
        raise WrongUsage(
            f"'{path.name}' next to the file: expected at most {MAX_NEIGHBOUR_BYTES // 2**20} MiB, got "
            f"{path.stat().st_size:,} bytes; fix: move it to another folder"
        )
    return content.decode("utf-8-sig", errors)


def _labels(
    folder: Path, properties: Mapping[str, str], documents: Mapping[str, Mapping[str, Any]]
) -> tuple[tuple[str, ...], str]:
    for name in LABEL_FILES:
        if (folder / name).is_file():
            return tuple(split_lines(_text(folder / name, "replace"))), f"'{name}' next to the file"
    for key in LABEL_KEYS:
        if names := _names(literal(properties.get(key, ""))):
            return names, f"the file's metadata '{key}'"
    config = documents["config.json"]
    for key in ("label_names", "id2label"):
        if names := _names(config.get(key)):
            return names, f"'{key}' of 'config.json' next to the file"
    return (), ""


def _names(listed: Any) -> tuple[str, ...]:
    """Return class names by index from a list, or from a dict with the keys 0, 1, 2, …."""
    if isinstance(listed, dict):
        by_index = {str(key): value for key, value in listed.items()}
        listed = [by_index.get(str(index)) for index in range(len(by_index))]
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return ()
    is_named = bool(listed) and all(isinstance(name, str) for name in listed)
    names = (" ".join(name.encode(errors="replace").decode().split()) for name in listed if is_named)
    return tuple(names)


def _noted(properties: Mapping[str, str], documents: Mapping[str, Mapping[str, Any]]) -> ExporterSettings:
    """Return the notes of the first exporter that left some; what cannot be understood is skipped.

    Args:
        properties: the metadata in the ONNX file.
        documents: JSON files next to it, by name.
    """
    importers = [importer for task in TASKS if (importer := task.entry_point("importer"))]
    ways: tuple[Callable[[], ExporterSettings | None], ...] = (
        *(partial(importer.exporter_settings, properties) for importer in importers),
        lambda: _timm(documents["config.json"]),
        lambda: _transformers(documents["preprocessor_config.json"]),
    )
    for way in ways:
        try:
            if exporter_settings := way():
                return exporter_settings
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, OverflowError):
            continue
    return ExporterSettings()


def literal(text: str) -> Any:
    """Parse a value written as JSON or as a Python literal; None for anything else."""
    if len(text) > MAX_CHARACTERS:  # parsing needs a hundred times the memory
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def ultralytics_size(metadata: Mapping[str, str]) -> Size:
    """Return height and width in pixels that Ultralytics noted; zeros if it did not."""
    sizes = literal(metadata.get("imgsz", ""))
    is_list = isinstance(sizes, list | tuple) and bool(sizes)
    is_valid = is_list and all(isinstance(side, int) and side > 0 for side in sizes)
    return (sizes[0], sizes[-1]) if is_valid else ANY_SIZE


def _timm(config: Mapping[str, Any]) -> ExporterSettings | None:
    """Return the preprocessing of `pretrained_cfg`. Source: timm, data/transforms_factory.py."""
    settings = config.get("pretrained_cfg")
    if not isinstance(settings, dict):
        return None
    origin = "timm's 'config.json' next to the file"
    height, width = (int(side) for side in settings["input_size"][-2:])
    share, mode = float(settings.get("crop_pct") or 0.875), settings.get("crop_mode") or "center"
    numbers = _numbers(settings["mean"], settings["std"])
    numbers["interpolation"] = str(settings.get("interpolation") or "bilinear")
    scaled = math.floor(height / share)
    if mode == "center" and height == width:
        return ExporterSettings({"resize_shorter_px": str(scaled), **numbers}, origin, (height, width))
    if mode == "squash" and share == 1:
        return ExporterSettings({"resize": "exact", **numbers}, origin, (height, width))
    if mode == "border" and share == 1:
        fill = ", ".join(str(round(255 * float(level))) for level in settings["mean"])
        return ExporterSettings(
            {"resize": "letterbox", "pad_color": fill, **numbers}, origin, (height, width)
        )
    problem = f"{origin} has crop_mode '{mode}' with crop_pct {share:g} for {height} x {width} pixels"
    return ExporterSettings(origin=origin, size=(height, width), problem=problem)


def _transformers(config: Mapping[str, Any]) -> ExporterSettings | None:
    """Return the preprocessing of an image processor. Source: transformers, image_processing_utils.py."""
    if not any(key in config for key in ("do_resize", "do_normalize", "do_rescale", "image_mean")):
        return None
    origin = "'preprocessor_config.json' next to the file"
    resample = config.get("resample", 2)
    resize, size, problem = _resize_and_crop(config)
    if resample not in FILTERS:
        problem = f"has resample {resample!r:.32}"
    problem = next((f"has {key}" for key in UNSUPPORTED if config.get(key)), problem)
    if problem:
        return ExporterSettings(origin=origin, size=size, problem=f"{origin} {problem}")
    scale = float(config.get("rescale_factor") or 1 / 255) if config.get("do_rescale", True) else 1.0
    if config.get("do_normalize", "image_mean" in config):
        parameters = _numbers(config["image_mean"], config["image_std"], 1 / scale)
    else:
        parameters = {"scale": f"{scale:.15g}"}
    parameters["interpolation"] = FILTERS[resample]
    if config.get("do_flip_channel_order"):
        parameters["color_order"] = "BGR"
    return ExporterSettings({**resize, **parameters}, origin, size)


def _resize_and_crop(config: Mapping[str, Any]) -> tuple[dict[str, str], Size, str]:
    """Return the parameters of an image processor's geometry, its size, and why it cannot be reproduced."""
    named = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    resizes, crops, share = (config.get(key) for key in ("do_resize", "do_center_crop", "crop_pct"))
    size, crop = config.get("size") or {}, config.get("crop_size")
    if not isinstance(size, dict):
        is_shorter = SHORTER_SIDE.match(named) or share
        size = {"shortest_edge": int(size)} if is_shorter else {"height": int(size), "width": int(size)}
    if "do_center_crop" not in config and crop and not share:
        return {}, _sides(crop), "has crop_size without do_center_crop"
    if resizes is not False and size.keys() == {"longest_edge"}:
        return {}, ANY_SIZE, "has a size with longest_edge only"
    shorter = int(size.get("shortest_edge") or 0)
    whole = _sides(size) if resizes is not False else ANY_SIZE
    if shorter and (share or named.startswith("Levit")):
        crop = (crop or shorter) if crops else shorter
        crops = crops or (share and shorter < CONVNEXT_CROPS_PX)
        # Source of 256 / 224: transformers, image_processing_levit.py.
        shorter = int(shorter / float(share)) if share else int(256 / 224 * shorter)
    if not crops:
        # Detectors keep the aspect ratio within two edges; here, each photo is resized to one size.
        return {"resize": "exact"}, whole, ""
    if not crop or resizes is False:
        return {}, ANY_SIZE, "has do_center_crop without " + ("do_resize" if crop else "crop_size")
    height, width = cropped = _sides(crop)
    if config.get("size_divisor"):
        return {}, cropped, "has size_divisor and do_center_crop"
    if shorter < max(cropped):
        resized = f"a shorter side of {shorter}" if shorter else "{} x {}".format(*whole)
        return {}, cropped, f"resizes to {resized} and then crops to {height} x {width}"
    return {"resize_shorter_px": str(shorter)}, cropped, ""


def _sides(size: Any) -> Size:
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge", 0)
        return int(size.get("height", edge)), int(size.get("width", edge))
    return int(size), int(size)


def _numbers(mean: Sequence[float], std: Sequence[float], unit: float = 255) -> dict[str, str]:
    """Return mean and std in pixel levels; `unit` levels are 1 for the exporter."""
    named = {"mean": mean, "std": std}
    return {key: ", ".join(f"{unit * float(value):g}" for value in values) for key, values in named.items()}
