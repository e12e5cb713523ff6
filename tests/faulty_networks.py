"""Networks whose runs really fail: for lack of memory, or with the text of a broken device."""

import numpy as np
import onnx

from tests.networks import tensor, written

# ONNX Runtime puts the name of a node into its errors, so this text is that of a broken device.
ILLEGAL_ACCESS = "CUDA failure 700: an illegal memory access was encountered"
MEBIBYTE = 2**20
WIDE_IO = tensor("input", "x", "FP32", [1]) + tensor("output", "y", "FP32", [1])
FRAGILE_IO = tensor("input", "shape", "INT64", [2]) + tensor("output", "y", "FP32", [-1, -1])


class CUDARuntimeError(RuntimeError):
    """An error as CuPy raises it, which has the code of CUDA in `status`."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class CUDADriverError(CUDARuntimeError):
    """An error of a kernel that CuPy could not start; in CuPy, the two classes are not related."""


def wide(row_mebibytes: int) -> onnx.ModelProto:
    ones = np.ones((1, row_mebibytes * MEBIBYTE // 4), np.float32)
    nodes = "wide = MatMul(x, ones) most = ReduceMax<axes = [1], keepdims = 1>(wide) y = Relu(most)"
    return written(f"(float[N,1] x) => (float[N,1] y) {{ {nodes} }}", ones=ones)


def fragile() -> onnx.ModelProto:
    """Build y = ones reshaped to `shape`; another number of elements than four is a broken device."""
    text = "(int64[2] shape) => (float[?,?] y) { y = Reshape(ones, shape) }"
    model = written(text, ones=np.ones(4, np.float32))
    model.graph.node[0].name = ILLEGAL_ACCESS
    return model
