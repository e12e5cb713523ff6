"""The tasks for tests: a repository that has all, and for each its clients, an image and the answer."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nereid
from nereid.base.assets import COFFEE, REPOSITORY, TEXT_REPOSITORY
from tests.detectors import CLASSES, KNOWN, SIDE, TestDetector, add_detector
from tests.embedders import add_embedder, convolutional, embeddings, small
from tests.labels import LABEL, WORDS
from tests.pictures import encode, noise

# Twice the side of the network's input, so every box has twice the size.
PHOTO = encode(noise(2 * SIDE, 2 * SIDE))
SMALL = small(COFFEE)


@dataclass(frozen=True, slots=True)
class Task:
    """A task, and a request with a known answer; `check` fails unless a result, or its JSON, is right."""

    name: str
    model: str
    kinds: tuple[Any, Any]
    image: bytes
    check: Callable[[Any], None]

    def __str__(self) -> str:
        return self.name


def field(result: Any, name: str) -> Any:
    return result[name] if isinstance(result, dict) else getattr(result, name)


def check_classes(result: Any) -> None:
    best = field(result, "labels")[0]
    assert (field(best, "name"), field(best, "score") >= 0.9) == ("espresso", True)


def check_objects(result: Any) -> None:
    objects = field(result, "objects")
    assert [field(detected, "label") for detected in objects] == [CLASSES[index] for _, _, index in KNOWN]
    numbers = [[field(detected, "score"), *field(detected, "box")] for detected in objects]
    expected = [[score, *(2 * side for side in box)] for box, score, _ in KNOWN]
    assert numbers == [pytest.approx(row, abs=1e-4) for row in expected]


def check_lines(result: Any) -> None:
    lines = field(result, "lines")
    assert [field(line, "text") for line in lines] == WORDS
    for index, line in enumerate(lines):
        assert 0.8 < field(line, "confidence") <= 1
        (left, top), _, (right, bottom), _ = field(line, "box")
        assert 40 < left < 70
        assert 30 + 140 * index < top < bottom < 130 + 140 * index
        assert 300 < right < 600


def check_vector(result: Any) -> None:
    """Compare with the network before its changes, normalised in FP64."""
    is_answer = isinstance(result, dict) and "embedding" in result  # of the gateway
    vector = np.array(field(result, "embedding" if is_answer else "vector"))
    np.testing.assert_allclose(vector, embeddings(convolutional(), SMALL)[0], atol=1e-5)  # FP32


CLASSIFIERS = nereid.Classifier, nereid.AsyncClassifier
CLASSIFY = Task("classify", "classify", CLASSIFIERS, COFFEE.read_bytes(), check_classes)
DETECT = Task("detect", "yolov8", (nereid.Detector, nereid.AsyncDetector), PHOTO, check_objects)
READ = Task("read", "read_text", (nereid.Reader, nereid.AsyncReader), LABEL, check_lines)
EMBED = Task("embed", "faces", (nereid.Embedder, nereid.AsyncEmbedder), SMALL, check_vector)
TASKS = (CLASSIFY, DETECT, EMBED, READ)


def add_reader(folder: Path) -> Path:
    pytest.importorskip("cv2", reason="opencv is not installed: extra text")
    waybills = shutil.ignore_patterns("read_waybill*")
    return Path(shutil.copytree(TEXT_REPOSITORY, folder / "texts", ignore=waybills))


def store_tasks(folder: Path, *heads: str, sources: Sequence[Path] = (REPOSITORY, TEXT_REPOSITORY)) -> Path:
    histories = shutil.ignore_patterns("*.history.jsonl")
    for source in sources:
        shutil.copytree(source, folder / "models", ignore=histories, dirs_exist_ok=True)
    for head in heads:
        network = TestDetector(head, batch=1 if head == "detr" else None)
        # The others are found by their names and shapes.
        is_named = head in ("yolox", "detr", "detr_sigmoid", "rtdetr", "rtdetr_best")
        add_detector(folder, head, network, head if is_named else "", instances=1)
    add_embedder(folder)
    return folder / "models"
