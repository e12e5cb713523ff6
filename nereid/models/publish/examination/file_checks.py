"""Checks of a network's file, signature and config that need no run."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from nereid.base.config.model_config import ModelConfig
from nereid.models.publish.examination.examine import ExaminationRequest, Rejected
from nereid.repository import onnx_file, onnx_graph, onnx_runtimes
from nereid.repository.labels import check_count
from nereid.repository.onnx_file import OnnxFile, describe
from nereid.vision.inference.signature import NetworkTensor, Signature

Progress = Callable[[str], None]

NAN_CHUNK = 2**22


def check_file(request: ExaminationRequest, progress: Progress) -> tuple[OnnxFile, int]:
    """Read and check the file without running it; return it, and the bytes of its external data.

    Raises:
        InvalidOnnx, Rejected: it cannot be served.
    """
    progress("reading the file")
    file = onnx_file.read(onnx_file.network_path(request.candidate, request.document))
    external_bytes = onnx_file.check_external_data(file)
    onnx_runtimes.check_runtimes(file, onnx_runtimes.supported_runtimes())
    progress("running the ONNX checker")
    onnx_file.check_with_onnx(file.path)
    progress("searching its weights for NaN")
    _check_weights(file)
    return file, external_bytes


def _check_weights(file: OnnxFile) -> None:
    """Reject weights that are NaN; infinities are allowed, as in a mask."""
    for tensor in onnx_graph.tensors(file.model):
        values = _floats(file, tensor)
        parts = (values[start : start + NAN_CHUNK] for start in range(0, len(values), NAN_CHUNK))
        if count := sum(int(np.isnan(part).sum()) for part in parts):
            name = tensor.name or "(a constant)"
            raise Rejected(
                f"weight '{name}': expected numbers, got NaN in {count:,} of {len(values):,} values"
            )


def _floats(file: OnnxFile, tensor: Any) -> np.ndarray:
    """Return a tensor's values as one row, memory-mapped if they are external; empty for integers."""
    import onnx
    from onnx import helper, numpy_helper

    if "FLOAT" not in onnx.TensorProto.DataType.Name(tensor.data_type).replace("DOUBLE", "FLOAT"):
        return np.empty(0)
    count = prod(tensor.dims)
    if not count or not onnx_graph.is_external(tensor):
        return np.asarray(numpy_helper.to_array(tensor)).ravel()
    entry = onnx_file.external_data(file.path, tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    path = file.path.parent / entry.location
    if entry.offset + count * dtype.itemsize > path.stat().st_size:
        raise Rejected(
            f"'{entry.location}' is too short for tensor '{tensor.name}' of shape {list(tensor.dims)}"
        )
    return np.memmap(path, dtype, "r", entry.offset, (count,))


def check_signature(expected: Signature, got: Signature) -> None:
    """Reject inputs and outputs that differ from those of the current version.

    Raises:
        Rejected: with every difference.
    """
    problems = list(_differences("input", expected.inputs, got.inputs))
    problems += _differences("output", expected.outputs, got.outputs)
    if problems:
        raise Rejected("; ".join(problems))


def _differences(
    what: str, expected: Mapping[str, NetworkTensor], got: Mapping[str, NetworkTensor]
) -> Iterator[str]:
    for name, tensor in expected.items():
        if got.get(name) != tensor:
            found = describe(got[name]) if name in got else "none"
            yield f"{what} '{name}': expected {describe(tensor)}, got {found}"
    for name in got.keys() - expected.keys():
        yield f"unexpected {what} '{name}' {describe(got[name])}"


def served_config(request: ExaminationRequest, signature: Signature) -> ModelConfig:
    """Return the config that the server would use, changed to one thread.

    Raises:
        InvalidConfig: it has batches, which the network does not support.
    """
    document = dict(deepcopy(request.document)) | {"backend": "onnxruntime", "name": request.model}
    onnx_file.complete_document(document, lambda: signature)
    config = ModelConfig.from_document(document, request.candidate.parent, 1)
    ours = {"intra_op_thread_count": "1", "inter_op_thread_count": "1"}
    # One instance shares its weights with nobody.
    parameters = {key: text for key, text in config.parameters.items() if key != "nereid.shared_weights"}
    return replace(config, parameters=parameters | ours)


def notes_of_config(request: ExaminationRequest, file: OnnxFile) -> Iterator[str]:
    """Yield notes about differences between the examination and the server."""
    groups = request.document.get("instance_group", ())
    if any(group.get("kind") == "KIND_GPU" for group in groups):
        yield "its instances run on a GPU, but it was examined on the CPU"
    if file.custom_domains:
        yield f"it has custom operators of {', '.join(file.custom_domains)}; every server needs their library"


def check_labels(labels: Path | None, config: ModelConfig) -> None:
    """Check that a label file has one line per class of its output.

    Raises:
        InvalidLabels: the numbers differ, or the file cannot be read.
    """
    outputs = [tensor for tensor in config.outputs if -1 not in tensor.dims]
    if labels is None or not outputs:
        return
    labelled = {entry["name"] for entry in config.document.get("output", ()) if entry.get("label_filename")}
    output = next((tensor for tensor in outputs if tensor.name in labelled), outputs[0])
    check_count(labels, output)
