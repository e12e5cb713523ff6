"""The head of a detector: its output layout, given by name or inferred from output names and shapes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nereid.base.config.model_config import ServedTensor
from nereid.base.errors import InferenceFailed
from nereid.tasks.detect.layouts import (
    ANCHORS_PER_CELL,
    LAYOUTS,
    STRIDES_PX,
    Candidates,
    InputSize,
    Layout,
    Rows,
    grid_cells,
    used_rows,
)

# Networks for large images have a fourth grid, those for small objects another one, and tiny networks two.
# Source: ultralytics, cfg/models: v8/yolov8-p6.yaml, v8/yolov8-p2.yaml and v3/yolov3-tiny.yaml.
GRIDS_PX = (STRIDES_PX, (*STRIDES_PX, 64), (4, *STRIDES_PX), (16, 32))
# Exports with built-in NMS return fewer rows; a network without NMS has more anchors.
MAX_NMS_ROWS = 1000
# Dims of one object in a list of those in all images.
NMS_ROWS = ((5,), (6,), (7,))
# Pixels per cell of mask prototypes. Source: ultralytics, nn/modules/head.py, `Segment`.
PROTOTYPE_STRIDE = 4


class UnknownHead(ValueError):
    """The outputs do not match the layout, or their layout cannot be determined."""


@dataclass(frozen=True, slots=True)
class Head:
    """A detector's outputs by their role in a layout.

    Attributes:
        name: layout name, a key of LAYOUTS.
        outputs: the network outputs in use, by role.
        input_size: size of the network's input.
    """

    name: str
    outputs: tuple[ServedTensor, ...]
    input_size: InputSize

    @property
    def layout(self) -> Layout:
        """The layout of the outputs."""
        return LAYOUTS[self.name]

    @property
    def classes(self) -> int:
        """The number of classes; 0 if the shapes do not tell."""
        if not (classes := self.layout.classes):
            return 0
        axis, others = classes
        return max(0, self.outputs[0].dims[axis] - others)

    def mask_prototypes(self, outputs: Sequence[ServedTensor]) -> ServedTensor | None:
        """Return the output with prototypes of masks, whose coefficients are then read as classes."""
        quarter = tuple(side // PROTOTYPE_STRIDE for side in self.input_size)
        prototypes = (
            output for output in outputs if output.dims[1:] == quarter and 0 < output.dims[0] < self.classes
        )
        return next(prototypes, None)

    def probabilities(self, rows: Rows) -> np.ndarray:
        """Return the probabilities of all classes in the outputs by role; none from logits."""
        if not self.layout.classes or self.layout.has_logits:
            return np.empty(0, np.float32)
        axis, others = self.layout.classes
        return np.take(rows[0], range(others, rows[0].shape[axis]), axis)

    def candidates(self, rows: Rows, threshold: float) -> Candidates:
        """Return one image's candidates with a score of at least `threshold`.

        Args:
            rows: the outputs by role, without the batch dimension.
            threshold: minimum score.

        Raises:
            InferenceFailed: an output does not have the layout's shape, or has numbers that are not finite.
        """
        self._check(rows)
        found = self.layout.decode(rows, self.input_size, threshold)
        is_likely = (found.scores >= threshold) & (found.classes >= 0)
        return Candidates(*(part[is_likely] for part in found))

    def _check(self, rows: Rows) -> None:
        for output, array in zip(self.outputs, rows, strict=True):
            if len(array.shape) != len(output.dims) or any(
                want not in (-1, got) for want, got in zip(output.dims, array.shape, strict=True)
            ):
                raise InferenceFailed(
                    f"output '{output.name}': expected shape {list(output.dims)} per image, "
                    f"got {list(array.shape)}"
                )
        if self.name == "yolox" and len(rows[0]) != (cells := grid_cells(self.input_size)):
            problem = _cells(cells, self.input_size, len(rows[0]))
            raise InferenceFailed(f"output '{self.outputs[0].name}': {problem}")
        for output, array in zip(self.outputs, used_rows(rows), strict=True):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                bad = int((~np.isfinite(array)).sum())
                raise InferenceFailed(
                    f"output '{output.name}': expected finite numbers, got NaN or infinity in {bad:,} of "
                    f"{array.size:,} values"
                )


def find_head(
    outputs: Sequence[ServedTensor], input_size: InputSize, name: str = "", labels: int = 0
) -> Head:
    """Return a network's head.

    Args:
        outputs: all outputs of the network.
        input_size: size of the network's input.
        name: layout name; empty to infer it from names and shapes.
        labels: number of class names; 0 if there are none.

    Raises:
        UnknownHead: the outputs do not match the layout, or several layouts are possible.
    """
    lists = [output for output in outputs if output.dims in NMS_ROWS]
    if lists and all(len(output.dims) < 2 for output in outputs):
        raise UnknownHead(
            f"expected rows of each image, got one list for all images, {_described(lists)}; fix: export the "
            "network without NMS, or with NMS for each image"
        )
    if name:
        return _named(outputs, input_size, name)
    possible = {
        layout_name: Head(layout_name, roles, input_size)
        for layout_name, layout in LAYOUTS.items()
        if (roles := layout.find(outputs))
    }
    certain = [head for head in possible.values() if _is_certain(head, labels)]
    if len(certain) == 1:
        return certain[0]
    layouts = "; ".join(f"{layout_name}: {LAYOUTS[layout_name].form}" for layout_name in possible or LAYOUTS)
    if possible:
        raise UnknownHead(f"uncertain layout of {_described(outputs)}; fix: --head with one of {layouts}")
    raise UnknownHead(f"expected the outputs of a detector, got {_described(outputs)}; known: {layouts}")


def _named(outputs: Sequence[ServedTensor], input_size: InputSize, name: str) -> Head:
    if name not in LAYOUTS:
        raise UnknownHead(f"invalid head: expected one of {', '.join(LAYOUTS)}, got '{name}'")
    roles = LAYOUTS[name].find(outputs)
    if not roles:
        raise UnknownHead(f"head {name}: expected {LAYOUTS[name].form}, got {_described(outputs)}")
    cells, anchors = grid_cells(input_size), roles[0].dims[:1]
    if name == "yolox" and anchors not in ((-1,), (cells,)):
        raise UnknownHead(f"head yolox, output '{roles[0].name}': {_cells(cells, input_size, anchors[0])}")
    return Head(name, roles, input_size)


def _is_certain(head: Head, labels: int) -> bool:
    """Return whether this is the only possible layout for outputs of this form."""
    name, roles = head.name, head.outputs
    cells = {grid_cells(head.input_size, strides) for strides in GRIDS_PX}
    anchored = {ANCHORS_PER_CELL * count for count in cells}
    first = roles[0].dims
    if name == "yolov5":
        return first[0] in anchored
    if name == "yolov8":
        return first[1] in cells and first[0] not in cells | anchored
    if name in ("detr", "detr_sigmoid"):
        # RF-DETR has such names, and one column more than classes without a softmax.
        if name == "detr" and {role.name for role in roles} == {"dets", "labels"}:
            return False
        is_short = first[0] <= MAX_NMS_ROWS and first[0] not in cells
        return bool(labels) and first[1] == labels + (name == "detr") and is_short
    if name == "yolonas":
        return first[0] in cells
    if name == "rtdetr":
        # Rows of 6 or 7 numbers may also come from NMS.
        return bool(labels) and first[1] == labels + 4 > 7 and 0 < first[0] <= MAX_NMS_ROWS
    if name in ("tensorflow", "torchvision"):
        return True
    if name == "rtdetr_best":  # its rows look like NMS output
        return False
    if len(roles) == 1 and labels and first[1] == labels + 4:  # or a row of `rtdetr`
        return False
    # Decoded and undecoded YOLOX exports have the same shape.
    is_short = 0 < first[0] <= MAX_NMS_ROWS and first[0] not in cells | anchored if first else True
    return name == "nms" and (len(roles) > 1 or is_short)


def _cells(cells: int, input_size: InputSize, got: int) -> str:
    size = f"{input_size.height_px} x {input_size.width_px}"
    return f"expected {cells:,} anchors, one per cell of {size} pixels with strides 8, 16, 32, got {got:,}"


def _described(outputs: Sequence[ServedTensor]) -> str:
    shapes = (f"'{name}' {datatype.removeprefix('TYPE_')} {['N', *dims]}" for name, datatype, dims in outputs)
    return ", ".join(shapes).replace("'N'", "N") or "none"
