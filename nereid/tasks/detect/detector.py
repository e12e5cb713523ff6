"""Last step of a detector: converts network outputs to labelled boxes in the upright image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nereid.base.config.model_config import ModelConfig, ServedTensor
from nereid.base.contract import BOX, IMAGE, LABEL, MAX_OBJECTS, SCORE
from nereid.base.errors import InvalidConfig
from nereid.base.units import split_lines
from nereid.tasks.detect.head import Head, UnknownHead, find_head
from nereid.tasks.detect.layouts import InputSize
from nereid.tasks.detect.outputs import iou, match
from nereid.vision.imaging.decode import ImageLimits, read_upright_size
from nereid.vision.imaging.preprocess_settings import PreprocessSettings
from nereid.vision.imaging.transform import Placement, Transform


def suppress(boxes: np.ndarray, classes: np.ndarray, iou_threshold: float, limit: int) -> np.ndarray:
    """Return the indices of the boxes to keep, int64[at most `limit`], in input order.

    Each kept box costs one pass over the remaining ones, so time grows with `limit`, not with K squared.

    Args:
        boxes: float64[K, 4], sorted by score, best first.
        classes: int64[K]; boxes of different classes do not suppress each other.
        iou_threshold: a box is dropped if it overlaps a kept one by more than this.
        limit: maximum number of boxes to keep.
    """
    left, kept = np.arange(len(boxes)), list[int]()
    while len(left) and len(kept) < limit:
        best, left = left[0], left[1:]
        kept.append(int(best))
        overlaps = iou(boxes[best][None], boxes[left])[0]
        is_same = (overlaps > iou_threshold) & (classes[left] == classes[best])
        left = left[~is_same]
    return np.array(kept, np.int64)


# NMS keeps this many candidates per image, by score, which bounds the time for an image full of objects.
MAX_CANDIDATES = 3000
# Datatypes and dims of the outputs.
OUTPUTS = {BOX: ("TYPE_FP32", (-1, 4)), SCORE: ("TYPE_FP32", (-1,)), LABEL: ("TYPE_STRING", (-1,))}


@dataclass(frozen=True, slots=True)
class BoxesSettings:
    """Parameters of a `boxes` model.

    `head` is the layout of the network's outputs, a key of LAYOUTS. `preprocess` and its version name the
    sibling that prepared the image; boxes are mapped back through its resize. `labels` is a file in the
    model's folder with one class name per line. An object needs a score of at least `score_threshold`. If
    two boxes of one class overlap by more than `iou_threshold`, only the better one is kept.
    """

    head: str
    preprocess: str
    preprocess_version: int
    labels: str = ""
    score_threshold: float = 0.25
    iou_threshold: float = 0.45

    def __post_init__(self) -> None:
        for name in ("score_threshold", "iou_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects in one image, best score first.

    Attributes:
        boxes: float32[n, 4]: left, top, right, bottom in pixels of the upright image.
        scores: float32[n].
        classes: int64[n], class indices.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


@dataclass(frozen=True, slots=True)
class ObjectFinder:
    """Finds the objects in a network's outputs for one image.

    Attributes:
        labels: class names by index; () if there are none.
    """

    head: Head
    transform: Transform
    limits: ImageLimits
    labels: Sequence[str] = ()
    score_threshold: float = 0.25
    iou_threshold: float = 0.45

    @classmethod
    def from_config(cls, config: ModelConfig) -> "ObjectFinder":
        """Build the detector of a `boxes` model.

        Raises:
            InvalidConfig: a parameter is invalid, or the model's tensors do not match the parameters.
        """
        settings = config.settings(BoxesSettings)
        preprocess = config.sibling(settings.preprocess, settings.preprocess_version)
        prepared = PreprocessSettings.from_config(preprocess)
        transform = prepared.transform
        outputs = [
            ServedTensor(tensor.name, tensor.datatype, tensor.network_dims) for tensor in config.inputs
        ]
        tensors = {tensor.name: tensor for tensor in config.inputs}
        try:
            if IMAGE not in tensors or tensors[IMAGE].type_and_dims != "TYPE_STRING [1]":
                raise UnknownHead(f"expected an input '{IMAGE}' TYPE_STRING [1]")
            _check_outputs(config)
            input_size = InputSize(transform.height_px, transform.width_px)
            outputs = [output for output in outputs if output.name != IMAGE]
            head = find_head(outputs, input_size, settings.head)
            if unused := sorted(tensors.keys() - {IMAGE, *(output.name for output in head.outputs)}):
                raise UnknownHead(f"input '{unused[0]}' is not an output that head {settings.head} uses")
            labels = _read_labels(config, settings.labels, head.classes)
        except UnknownHead as error:
            raise InvalidConfig(f"model '{config.name}': {error}") from None
        thresholds = settings.score_threshold, settings.iou_threshold
        return cls(head, transform, prepared.limits, labels, *thresholds)

    def upright_size(self, encoded: bytes) -> tuple[int, int]:
        """Return the width and height of an upright image from its header.

        Raises:
            InvalidImage: the header cannot be read.
        """
        return read_upright_size(encoded, self.limits, self.transform.exif_orientation)

    def find(self, size_wh: tuple[int, int], outputs: Sequence[np.ndarray]) -> Objects:
        """Return the objects in one image, at most MAX_OBJECTS.

        Args:
            size_wh: width and height of the upright image in pixels.
            outputs: the network's outputs by role, without the batch dimension.

        Raises:
            InferenceFailed: the outputs do not match the head, or are not finite.
        """
        candidates = self.head.candidates(outputs, self.score_threshold)
        best = np.argsort(-candidates.scores, kind="stable")[:MAX_CANDIDATES]
        boxes = self._in_image(candidates.boxes[best], size_wh)
        # A box that lies entirely in the padding has no area in the image.
        is_inside = (boxes[:, 2:] > boxes[:, :2]).all(1)
        best, boxes = best[is_inside], boxes[is_inside]
        if self.head.layout.has_nms:
            kept = np.arange(len(best))[:MAX_OBJECTS]
        else:
            kept = suppress(candidates.boxes[best], candidates.classes[best], self.iou_threshold, MAX_OBJECTS)
        best, boxes = best[kept], boxes[kept].astype(np.float32)
        return Objects(boxes, candidates.scores[best].astype(np.float32), candidates.classes[best])

    def label(self, index: int) -> str:
        """Return a class name, or its index if it has no name."""
        return self.labels[index] if index < len(self.labels) else str(index + self.head.layout.first_class)

    @property
    def needed_outputs(self) -> tuple[str, ...]:
        """Names of the network outputs it needs."""
        return tuple(output.name for output in self.head.outputs)

    def by_role(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return a network's outputs for one image by role, from a batch of one row."""
        return [arrays[name][0] for name in self.needed_outputs]

    def tensors(self, encoded: bytes, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs for one encoded image, a batch of one row, from the network's outputs by name.

        Raises:
            InvalidImage: the image header cannot be read.
            InferenceFailed: the outputs do not match the head, or are not finite.
        """
        objects = self.find(self.upright_size(encoded), self.by_role(arrays))
        labels = np.empty((1, len(objects.classes)), object)
        labels[0] = [self.label(int(index)).encode() for index in objects.classes]
        return {BOX: objects.boxes[None], SCORE: objects.scores[None], LABEL: labels}

    def _in_image(self, boxes: np.ndarray, size_wh: tuple[int, int]) -> np.ndarray:
        """Map boxes from pixels of the network's input to pixels of the upright image, clipped to it."""
        rows, columns = self.transform.place(size_wh)
        mapped = np.empty_like(boxes)
        for axis, placed in enumerate((columns, rows)):
            mapped[:, axis::2] = np.clip(_undo(boxes[:, axis::2], placed), 0, placed.span.source)
        return mapped


def _undo(positions: np.ndarray, placed: Placement) -> np.ndarray:
    """Map positions along one axis of the network's input back to the image: undo margin, crop and scale."""
    span = placed.span
    result: np.ndarray = (positions - placed.at + span.offset) * span.source / span.resized
    return result


def _check_outputs(config: ModelConfig) -> None:
    got = {output.name: (output.datatype, output.dims) for output in config.outputs}
    if got != OUTPUTS:
        listed = ", ".join(f"'{output.name}' {output.type_and_dims}" for output in config.outputs) or "none"
        expected = ", ".join(f"'{name}' {datatype} {[*dims]}" for name, (datatype, dims) in OUTPUTS.items())
        raise UnknownHead(f"expected outputs {expected}, got {listed}")


def _read_labels(config: ModelConfig, name: str, classes: int) -> Sequence[str]:
    if not name:
        return ()
    try:
        labels = split_lines((config.folder / name).read_text(errors="replace"))
    except OSError as error:
        raise UnknownHead(f"cannot read labels '{name}': {error.strerror}") from None
    if classes and len(labels) != classes:
        raise UnknownHead(f"{name}: expected {classes} labels for the classes of the head, got {len(labels)}")
    return labels


class ObjectPair(NamedTuple):
    """An object's index in both results; None where it is missing.

    `difference` is the score difference or, if larger, 1 - IoU of the boxes; if the object is missing in
    one result, it is the object's score in the other.
    """

    indices: tuple[int | None, int | None]
    difference: float


def match_objects(one: Objects, other: Objects) -> list[ObjectPair]:
    """Match objects of the same class whose boxes overlap, largest overlap first."""
    boxes, others = (objects.boxes.astype(np.float64) for objects in (one, other))
    by_index = {pair.first: pair for pair in match(boxes, one.classes, others, other.classes)}
    pairs = list[ObjectPair]()
    for index, score in enumerate(map(float, one.scores)):
        if partners := by_index.get(index):
            change = max(1 - partners.iou, abs(score - float(other.scores[partners.second])))
            pairs.append(ObjectPair((index, partners.second), change))
        else:
            pairs.append(ObjectPair((index, None), score))
    lone = sorted({*range(len(other.scores))} - {pair.second for pair in by_index.values()})
    return pairs + [ObjectPair((None, other_index), float(other.scores[other_index])) for other_index in lone]
