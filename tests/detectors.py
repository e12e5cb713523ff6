"""Detectors for tests: networks that return the same boxes for every image, in each layout of heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper

from nereid.models.publish.add import AddRequest, add
from nereid.tasks.detect.layouts import STRIDES_PX, InputSize
from tests.networks import constant, network, value

SIDE = 64
CLASSES = ("cat", "dog", "bird")
FRAME = InputSize(SIDE, SIDE)
# Column, row and stride of every cell of the grids.
SIDES = {stride: range(SIDE // stride) for stride in (8, 16, 32)}
CELL_PLACES = [(column, row, stride) for stride, side in SIDES.items() for row in side for column in side]
CELLS = len(CELL_PLACES)
# Left, top, right, bottom in pixels of the network's input, score, class. All numbers are exact in every head
# (exponentials of 0, sigmoids of 0 and 1000), so that every path must return the same bits.
Objects: TypeAlias = tuple[tuple[tuple[float, ...], float, int], ...]
KNOWN: Objects = (((8.0, 16.0, 24.0, 32.0), 1.0, 1), ((24.0, 16.0, 56.0, 48.0), 0.5, 0))
HEADS = (
    *("yolov5", "yolov8", "yolox", "detr", "detr_sigmoid", "yolonas"),
    *("rtdetr", "rtdetr_best", "tensorflow", "torchvision", "nms"),
)


@dataclass(frozen=True)
class TestDetector:
    """A detector that ignores its image; `batch` is None for a variable one."""

    __test__ = False

    head: str
    objects: Objects = KNOWN
    batch: int | None = None

    def outputs(self) -> Mapping[str, np.ndarray]:
        rows: Mapping[str, np.ndarray] = getattr(self, f"_{self.head}")()
        return rows

    def build(self) -> onnx.ModelProto:
        first = self.batch if self.batch is not None else "N"
        nodes, weights, results = [], [], []
        nodes.append(helper.make_node("ReduceMean", ["image"], ["mean"], axes=[1, 2, 3], keepdims=0))
        nodes.append(helper.make_node("Mul", ["mean", "zero"], ["zeros"]))
        weights.append(constant("zero", np.zeros((), np.float32)))
        for name, rows in self.outputs().items():
            kind = "INT64" if rows.dtype == np.int64 else "FP32"
            element = TensorProto.INT64 if kind == "INT64" else TensorProto.FLOAT
            shape = constant(f"{name}_dims", np.array([-1] + [1] * rows.ndim))
            weights += [shape, constant(f"{name}_rows", rows[None])]
            nodes += [
                helper.make_node("Reshape", ["zeros", shape.name], [f"{name}_zeros"]),
                helper.make_node("Cast", [f"{name}_zeros"], [f"{name}_cast"], to=element),
                helper.make_node("Add", [f"{name}_cast", f"{name}_rows"], [name]),
            ]
            results.append(value(name, kind, [first, *rows.shape]))
        return network(nodes, [value("image", "FP32", [first, 3, SIDE, SIDE])], results, weights)

    def _sized(self) -> np.ndarray:
        boxes = np.array([detected[0] for detected in self.objects], np.float32).reshape(-1, 4)
        return np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1)

    def _rows(self, anchors: int) -> np.ndarray:
        rows = np.zeros((anchors, 5 + len(CLASSES)), np.float32)
        for row_index, (sized, (_, score, index)) in enumerate(zip(self._sized(), self.objects, strict=True)):
            rows[row_index, :4], rows[row_index, 4], rows[row_index, 5 + index] = sized, 1, score
        return rows

    def _yolov5(self) -> dict[str, np.ndarray]:
        return {"output0": self._rows(3 * CELLS)}

    def _yolov8(self) -> dict[str, np.ndarray]:
        return {"output0": np.delete(self._rows(CELLS), 4, axis=1).T.copy()}

    def _yolox(self) -> dict[str, np.ndarray]:
        rows, cells = np.zeros((CELLS, 5 + len(CLASSES)), np.float32), np.array(CELL_PLACES)
        for object_index, row in enumerate(self._rows(len(self.objects))):
            # An object is on the first free cell of the grid whose stride is its width.
            stride = row[2] if row[2] in STRIDES_PX else STRIDES_PX[0]
            at = np.flatnonzero(cells[:, 2] == stride)[object_index]
            rows[at] = row
            rows[at, :2] = row[:2] / stride - cells[at, :2]
            rows[at, 2:4] = np.log(row[2:4] / stride)
        return {"output": rows}

    def _detr_sigmoid(self, columns: int = len(CLASSES)) -> dict[str, np.ndarray]:
        logits = np.full((10, columns), -1000, np.float32)
        boxes = np.full((10, 4), 0.5, np.float32)
        boxes[: len(self.objects)] = self._sized() / SIDE
        for query_index, (_, score, index) in enumerate(self.objects):
            logits[query_index, index] = 1000 if score == 1 else np.log(score / (1 - score))
        return {"logits": logits, "pred_boxes": boxes}

    def _detr(self) -> dict[str, np.ndarray]:
        outputs = self._detr_sigmoid(len(CLASSES) + 1)
        outputs["logits"][:, -1] = 0
        return outputs

    def _rtdetr(self) -> dict[str, np.ndarray]:
        rows = np.delete(self._rows(10), 4, axis=1)
        rows[:, :4] /= SIDE
        return {"output0": rows}

    def _rtdetr_best(self) -> dict[str, np.ndarray]:
        pairs = [(score, index) for _, score, index in self.objects]
        rows = np.concatenate([self._sized() / SIDE, pairs], axis=1, dtype=np.float32)
        return {"output0": np.concatenate([rows, np.zeros((8, 6), np.float32)])}

    def _torchvision(self) -> dict[str, np.ndarray]:
        boxes, scores, classes = (np.array(values) for values in zip(*self.objects, strict=True))
        return {"boxes": boxes.astype(np.float32), "labels": classes, "scores": scores.astype(np.float32)}

    def _yolonas(self) -> dict[str, np.ndarray]:
        rows = self._rows(CELLS)
        for row_index, (box, _, _) in enumerate(self.objects):
            rows[row_index, :4] = box
        return {"904": rows[:, :4].copy(), "913": rows[:, 5:].copy()}

    def _tensorflow(self) -> dict[str, np.ndarray]:
        """Return the outputs of TensorFlow's exporter: top and left come first, and classes begin with 1."""
        number, boxes, scores, classes = self._nms().values()
        return {
            "detection_boxes": boxes[:, [1, 0, 3, 2]] / SIDE,
            "detection_classes": classes.astype(np.float32) + 1,
            "detection_scores": scores,
            "num_detections": number.astype(np.float32),
            "raw_detection_boxes": np.zeros((50, 4), np.float32),
        }

    def _nms(self) -> dict[str, np.ndarray]:
        count = len(self.objects)
        boxes, scores = np.full((20, 4), 7, np.float32), np.full(20, 0.9, np.float32)
        classes = np.arange(20) % 2
        for position, (box, score, index) in enumerate(self.objects):
            boxes[position], scores[position], classes[position] = box, score, index
        arrays = {"boxes": boxes, "scores": scores, "classes": classes}
        return {"num_dets": np.array([count], np.int64)} | {f"det_{name}": x for name, x in arrays.items()}


def moved(objects: Objects = KNOWN, right: float = 4.0) -> Objects:
    return tuple(
        ((box[0] + right, box[1], box[2] + right, box[3]), score, index) for box, score, index in objects
    )


def add_detector(
    folder: Path,
    name: str = "cars",
    network: TestDetector | None = None,
    head: str = "",
    instances: int | None = None,
) -> Path:
    (labels := folder / "labels.txt").write_text("\n".join(CLASSES) + "\n")
    onnx.save((network or TestDetector("yolov8")).build(), path := folder / f"{name}.onnx")
    how = {"preset": "yolo"}
    request = AddRequest(path, name, how, labels, task="detect", head=head, instances=instances)
    add(repository := folder / "models", request, None)
    return repository
