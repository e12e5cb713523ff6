"""Class names and preprocessing from the metadata of exporters: in the ONNX file, and in files next to it."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereid.imaging.preprocess_settings import PRESETS
from nereid.publish.intake.recogniser import characters_of

LABEL_FILES = ("labels.txt", "classes.txt")
# Keys of ONNX metadata with class names; `names` is Ultralytics'.
LABEL_KEYS = ("names", "classes", "labels", "class_names", "id2label")
MAX_CHARACTERS = 2**20
# Preprocessing files of timm and of Hugging Face, next to the ONNX file.
CONFIG_FILES = ("config.json", "preprocessor_config.json")


@dataclass(frozen=True, slots=True)
class Metadata:
    """Notes of exporters about a network.

    Args:
        labels: class names by index; empty if there are none.
        labels_from: their origin, for messages.
        parameters: parameters of the preprocessing.
        parameters_from: their origin.
        task: the kind of network by Ultralytics' names; empty if unknown.
        characters: those of a recogniser of text; () if there are none.
    """

    labels: tuple[str, ...] = ()
    labels_from: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    parameters_from: str = ""
    task: str = ""
    characters: tuple[str, ...] = ()


def read(network: Path, model: Any) -> Metadata:
    """Read the metadata of a ModelProto and of the files next to it; unknown metadata is skipped."""
    properties = {each.key: each.value for each in model.metadata_props}
    documents = {name: _document(network.parent / name) for name in CONFIG_FILES}
    labels, labels_from = _labels(network.parent, properties, documents)
    parameters, parameters_from = _ultralytics(properties) or _timm(documents["config.json"]) or ({}, "")
    task, characters = properties.get("task", ""), characters_of(model)
    return Metadata(labels, labels_from, parameters, parameters_from, task, characters)


def _document(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _labels(
    folder: Path, properties: Mapping[str, str], documents: Mapping[str, Mapping[str, Any]]
) -> tuple[tuple[str, ...], str]:
    for name in LABEL_FILES:
        if (folder / name).is_file():
            return tuple(
                (folder / name).read_text(encoding="utf-8-sig", errors="replace").splitlines()
            ), f"'{name}' next to the file"
    for key in LABEL_KEYS:
        if found := _names(_literal(properties.get(key, ""))):
            return found, f"the file's metadata '{key}'"
    config = documents["config.json"]
    for key in ("label_names", "id2label"):
        if found := _names(config.get(key)):
            return found, f"'{key}' of 'config.json' next to the file"
    return (), ""


def _literal(text: str) -> Any:
    """Return a list or dict that is written as JSON or as a Python literal; None for anything else."""
    if len(text) > MAX_CHARACTERS:  # parsing takes a hundred times the memory
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _names(found: Any) -> tuple[str, ...]:
    """Return class names by index from a list, or from a dict with the keys 0, 1, 2, …."""
    if isinstance(found, dict):
        by_index = {str(key): value for key, value in found.items()}
        found = [by_index.get(str(index)) for index in range(len(by_index))]
    if not isinstance(found, Sequence) or isinstance(found, str):
        return ()
    is_named = bool(found) and all(isinstance(each, str) for each in found)
    return tuple(" ".join(each.split()) for each in found) if is_named else ()


def _ultralytics(properties: Mapping[str, str]) -> tuple[dict[str, str], str] | None:
    """Return Ultralytics' preprocessing: a letterbox, or for classifiers shorter side and centre crop."""
    if properties.get("task") == "detect":
        return dict(PRESETS["yolo"]), "the file's metadata of Ultralytics"
    if properties.get("task") != "classify":
        return None
    sizes = _literal(properties.get("imgsz", ""))
    if not (isinstance(sizes, list) and sizes and all(isinstance(each, int) for each in sizes)):
        return None
    # Source: ultralytics, data/augment.py, classify_transforms; mean 0 and std 1 of pixels / 255.
    return {"resize_shorter_px": str(max(sizes)), "scale": str(1 / 255)}, "the file's metadata of Ultralytics"


def _timm(config: Mapping[str, Any]) -> tuple[dict[str, str], str] | None:
    """Return timm's preprocessing from the `pretrained_cfg` in its `config.json`."""
    found = config.get("pretrained_cfg")
    if not isinstance(found, dict):
        return None
    try:
        side = int(found["input_size"][-1])
        # Source: timm, data/transforms_factory.py, transforms_imagenet_eval.
        scaled = int(side / float(found.get("crop_pct") or 0.875))
        mean, std = ([255 * float(each) for each in found[key]] for key in ("mean", "std"))
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return None
    numbers = {"mean": mean, "std": std}
    return {
        "resize_shorter_px": str(scaled),
        "interpolation": str(found.get("interpolation") or "bilinear"),
        **{key: ", ".join(f"{each:g}" for each in values) for key, values in numbers.items()},
    }, "timm's 'config.json' next to the file"
