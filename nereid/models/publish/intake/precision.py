"""Conversion of a staged network to FP16, for GPUs with tensor cores; inputs and outputs stay FP32."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from nereid.base.errors import OperationFailed
from nereid.models.publish.intake import description
from nereid.repository import onnx_file, onnx_graph

Precision = Literal["fp16"]
CONVERTER = "onnxruntime.transformers.float16"
CHANGE = "weights and computation are converted to FP16, inputs and outputs stay FP32"
# A larger ModelProto cannot be written as one file.
MAX_BYTES = 2**31 - 1


def convert(path: Path) -> str:
    """Convert the network of a staged version in place, external data included; returns the change.

    Raises:
        OperationFailed: it is not an FP32 network, or ONNX Runtime cannot convert it.
    """
    file = onnx_file.read(path)
    _check_is_fp32(path, file.model)
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    with _quiet_converter():
        try:
            converted = convert_float_to_float16(onnx.load(path), keep_io_types=True)
            OnnxModel(converted).topological_sort()  # the casts of the inputs are last
            content = converted.SerializeToString()
        except Exception as error:  # it raises anything for operators that it does not know
            raise _refusal(path, f"{type(error).__name__}: {error}") from None
    if len(content) > MAX_BYTES:
        raise _refusal(path, f"it has {len(content):,} bytes in FP16, and a file at most {MAX_BYTES:,}")
    for each in {path.parent / each.location for each in file.external}:
        each.unlink()
    path.write_bytes(content)
    return CHANGE


def note_change(version_folder: Path) -> None:
    """Add the conversion to the description of a version, if it has one."""
    if found := description.read(version_folder):
        description.write(version_folder, replace(found, changes=(*found.changes, CHANGE)))


def _check_is_fp32(path: Path, model: Any) -> None:
    operators = {node.op_type for graph in onnx_graph.graphs(model.graph) for node in graph.node}
    if found := sorted(each for each in operators if "Quantize" in each or each.endswith("Integer")):
        raise _refusal(path, f"expected an FP32 network, got the operators of INT8 {', '.join(found)}")
    tensors = list(onnx_graph.tensors(model))
    if not any(tensor.data_type == tensor.FLOAT for tensor in tensors):
        kinds = sorted({tensor.DataType.Name(tensor.data_type) for tensor in tensors})
        raise _refusal(path, f"expected FP32 weights, got {', '.join(kinds) or 'none'}")


def _refusal(path: Path, reason: str) -> OperationFailed:
    return OperationFailed(
        f"'{path.name}' cannot be converted to FP16: {' '.join(reason.split())}",
        "publish it without --precision",
    )


@contextlib.contextmanager
def _quiet_converter() -> Iterator[None]:
    """Suppress a warning for each weight that FP16 rounds: the examination compares the results."""
    logger = logging.getLogger(CONVERTER)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
