"""Numbers beyond the range of FP16 inside a network.

On a CPU, ONNX Runtime computes an FP16 network in FP32 and removes the conversions between its operators, so
its outputs do not show that a number in between exceeds FP16. A tensor that is an output is really converted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from nereid.publish.examination.examine import Rejected
from nereid.publish.examination.samples import Sample

# A larger ModelProto can neither be inferred nor opened from memory.
MAX_BYTES = 2**31 - 1
LARGEST = float(np.finfo(np.float16).max)


def check_half_range(path: Path, samples: Sequence[Sample]) -> None:
    """Reject a network with an FP16 tensor that overflows on a sample; minus infinity may be a mask.

    Raises:
        Rejected: with the tensor and the sample.
    """
    import onnx

    model = onnx.load(path)
    if model.ByteSize() > MAX_BYTES:
        return
    for each in (*model.graph.value_info, *model.graph.output):
        if each.type.HasField("tensor_type"):  # a wrong shape ends the inference, and only types are needed
            each.type.tensor_type.ClearField("shape")
    try:
        names = _halves(onnx.shape_inference.infer_shapes(model))
    except Exception as error:  # its own class
        raise Rejected(f"ONNX cannot infer its datatypes: {' '.join(str(error).split())}") from None
    if not names:
        return
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        _showing(model, names).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for sample in samples:
        for name, array in zip(names, session.run(names, dict(sample.inputs)), strict=True):
            if np.isnan(array).any() or np.isposinf(array).any():
                raise Rejected(
                    f"tensor '{name}' exceeds FP16 on {sample.name}: expected numbers up to {LARGEST:,.0f}; "
                    "fix: publish the network in FP32, or allow it with --accept-change"
                )


def _halves(inferred: Any) -> list[str]:
    """Return the names of the FP16 tensors that operators of the main graph return."""
    returned = {name for node in inferred.graph.node for name in node.output}
    outputs = {each.name for each in inferred.graph.output}
    halves = {
        each.name for each in inferred.graph.value_info if each.type.tensor_type.elem_type == _float16()
    }
    return sorted((halves & returned) - outputs)


def _float16() -> int:
    import onnx

    return int(onnx.TensorProto.FLOAT16)


def _showing(model: Any, names: Sequence[str]) -> Any:
    from onnx import helper

    for name in names:
        model.graph.output.append(helper.make_tensor_value_info(name, _float16(), None))
    return model
