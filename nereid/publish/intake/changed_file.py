"""Changes of an ONNX file that only a run of the network confirms: its batch, and the dims of its outputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime

from nereid.errors import OperationFailed
from nereid.publish.intake.graph_edits import dims, fixed_batch, inputs, take_one_image
from nereid.repository import onnx_graph

# NumPy's types of images, by ONNX Runtime's words.
ELEMENTS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8}
# Largest difference of a row alone and in a batch, relative to its largest number: kernels may differ.
ROW_TOLERANCE = 0.02
# Operators whose results have as many rows as there are findings.
COUNTING = frozenset({"NonMaxSuppression", "NonZero", "Unique"})
Result = TypeVar("Result")


def change_file(path: Path, change: Callable[[Any], tuple[Result, list[str]]]) -> tuple[Result, list[str]]:
    """Change an ONNX file; without a sentence about a change, it stays as it is.

    If a fixed batch cannot be freed, the network computes one image at a time.

    Args:
        path: the file.
        change: changes a ModelProto in place; returns its result, and a sentence for each change.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    size, content = fixed_batch(model), path.read_bytes()
    result, changes = change(model)
    if changes:
        onnx.save(model, path)
    if size == 1 and not computes_rows(path):
        model = onnx.ModelProto.FromString(content)
        alone = [*take_one_image(model)]
        result, changes = change(model)
        changes = [*alone, *changes]
        onnx.save(model, path)
    return result, changes


def declare_outputs(path: Path) -> None:
    """Declare the dims of an ONNX file's outputs behind the batch, as a run on a black image returns them.

    A network with NMS inside returns as many rows as it finds objects, so its outputs stay as they are.

    Raises:
        OperationFailed: the network cannot be opened or run.
    """
    import onnx
    from onnx import helper

    model = onnx.load(path, load_external_data=False)
    if any(node.op_type in COUNTING for node in onnx_graph.nodes(model)):
        return
    (image,) = inputs(model)
    shape = [1, *dims(image)[1:]]
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        pixels = np.zeros(shape, helper.tensor_dtype_to_np_dtype(image.type.tensor_type.elem_type))
        names = [each.name for each in model.graph.output]
        found = dict(zip(names, session.run(names, {image.name: pixels}), strict=True))
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        raise OperationFailed(f"the network cannot be run on {shape}: {error}") from None
    for each in model.graph.output:
        del each.type.tensor_type.shape.dim[1:]
        for dim in found[each.name].shape[1:]:
            each.type.tensor_type.shape.dim.add().dim_value = dim
    onnx.save(model, path)


def computes_rows(path: Path) -> bool:
    """Return whether a network returns for two images together what it returns for each alone.

    A network that cannot be run on one is not judged: its fault is found, and said, later.
    """
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (image,) = session.get_inputs()
        levels = np.random.default_rng(0).integers(0, 256, (2, *image.shape[1:])).astype(ELEMENTS[image.type])
        pixels = levels if levels.dtype == np.uint8 else levels / levels.dtype.type(255)
        alone = [session.run(None, {image.name: pixels[place : place + 1]}) for place in (0, 1)]
    except Exception:  # ONNX Runtime's own exceptions share no base class
        return True
    if any(isinstance(each.shape[0], int) for each in session.get_outputs() if each.shape):
        return False
    try:
        together = session.run(None, {image.name: pixels})
    except Exception:
        return False
    return all(
        _is_row(found, place, row)
        for place in (0, 1)
        for found, row in zip(together, alone[place], strict=True)
    )


def _is_row(found: np.ndarray, place: int, row: np.ndarray) -> bool:
    if found.shape != (2, *row.shape[1:]):
        return False
    limit = ROW_TOLERANCE * (np.abs(row).max(initial=0) or 1)
    return bool(np.allclose(found[place], row[0], rtol=0, atol=limit, equal_nan=True))
