"""Facts about a user's network, read once: from its ONNX file, and from the files of exporters next to it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid.inference.signature import Signature
from nereid.publish.intake import exporters
from nereid.publish.intake.dictionary import characters_of
from nereid.repository import onnx_graph
from nereid.repository.onnx_file import OnnxFile

LABEL_FILES = ("labels.txt", "classes.txt")
# Keys of ONNX metadata with class names; `names` is Ultralytics'.
LABEL_KEYS = ("names", "classes", "labels", "class_names", "id2label")
# Preprocessing files of timm and of Hugging Face, next to the ONNX file.
CONFIG_FILES = ("config.json", "preprocessor_config.json")
TASK = re.compile(r"[\w-]{,40}")


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """What a user's file says about its network.

    Args:
        sha256: digest of the file.
        signature: inputs and outputs, before any change.
        labels: class names by index; empty if there are none.
        labels_from: their origin, for messages.
        noted: what the exporter noted about the preprocessing.
        task: the kind of network by Ultralytics' names; empty if unknown.
        characters: those of a recogniser of text; () if there are none.
    """

    sha256: str
    signature: Signature
    labels: tuple[str, ...]
    labels_from: str
    noted: exporters.Noted
    task: str
    characters: tuple[str, ...]


def read(folder: Path, file: OnnxFile) -> NetworkFacts:
    """Read the facts of a file, which exporters wrote to `folder`; unknown metadata is skipped."""
    properties = onnx_graph.metadata(file.model)
    documents = {name: _document(folder / name) for name in CONFIG_FILES}
    labels, labels_from = _labels(folder, properties, documents)
    noted, task = exporters.noted(properties, documents), properties.get("task", "")
    task, characters = task if TASK.fullmatch(task) else "", characters_of(file.model)
    return NetworkFacts(file.sha256, file.signature, labels, labels_from, noted, task, characters)


def _document(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
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
        if found := _names(exporters.literal(properties.get(key, ""))):
            return found, f"the file's metadata '{key}'"
    config = documents["config.json"]
    for key in ("label_names", "id2label"):
        if found := _names(config.get(key)):
            return found, f"'{key}' of 'config.json' next to the file"
    return (), ""


def _names(found: Any) -> tuple[str, ...]:
    """Return class names by index from a list, or from a dict with the keys 0, 1, 2, …."""
    if isinstance(found, dict):
        by_index = {str(key): value for key, value in found.items()}
        found = [by_index.get(str(index)) for index in range(len(by_index))]
    if not isinstance(found, Sequence) or isinstance(found, str):
        return ()
    is_named = bool(found) and all(isinstance(each, str) for each in found)
    names = (" ".join(each.encode(errors="replace").decode().split()) for each in found if is_named)
    return tuple(names)
