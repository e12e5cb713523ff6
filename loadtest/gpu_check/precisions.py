"""The network in FP32, FP16 and INT8, with TensorRT, and as a CUDA graph: times and differences."""

import shutil
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from loadtest.gpu_check import chain
from loadtest.gpu_check.machine import PARTS, has
from loadtest.gpu_check.processes import Context
from nereid.base.assets import CHELSEA, COFFEE, REPOSITORY
from nereid.models.publish.importing.adaptation import convert_to_fp16
from nereid.vision.inference.session_options import CPU, CUDA
from nereid.vision.inference.tensorrt import TENSORRT

Findings = dict[str, Any]

BATCH_SIZES = (1, 8, 32)
TIMED_S = 0.7
FP32, FP16, INT8 = "FP32", "FP16", "INT8"
CUDA_OPTIONS = {"cudnn_conv_algo_search": "HEURISTIC"}
GRAPH_OPTIONS = {**CUDA_OPTIONS, "enable_cuda_graph": "1"}
# TensorRT builds an engine for each batch size, which takes long: only this one is timed.
TENSORRT_BATCH_SIZES = (8,)
# Time that a build of an engine may take.
ENGINE_S = 30.0


class Form(NamedTuple):
    """A form of the network: its file, its provider with options, and the batch sizes that are timed."""

    precision: str
    provider: str
    options: dict[str, str]
    batch_sizes: tuple[int, ...] = BATCH_SIZES


FORMS = {
    "FP32": Form(FP32, CUDA, CUDA_OPTIONS),
    "FP32, CUDA graph": Form(FP32, CUDA, GRAPH_OPTIONS),
    "FP16": Form(FP16, CUDA, CUDA_OPTIONS),
    "FP16, CUDA graph": Form(FP16, CUDA, GRAPH_OPTIONS),
    "INT8": Form(INT8, CUDA, CUDA_OPTIONS),
    "TensorRT FP32": Form(FP32, TENSORRT, {}, TENSORRT_BATCH_SIZES),
    "TensorRT FP16": Form(FP32, TENSORRT, {"trt_fp16_enable": "1"}, TENSORRT_BATCH_SIZES),
}


def measure(context: Context) -> Iterator[Findings]:
    """Yield times and differences of each form; a form that fails has its reason."""
    forms: Findings = {}
    with TemporaryDirectory() as folder:
        files = networks(Path(folder))
        # FP16 is compared with FP32; INT8 differs from FP32 by itself.
        feed = {chain.INPUT: inputs()}
        exact = {name: session_of(files[name], CPU, {}).run([chain.SCORES], feed)[0] for name in (FP32, INT8)}
        for name, form in FORMS.items():
            expected_scores = exact.get(form.precision, exact[FP32])
            forms[name] = reason(form, files, context.remaining_s()) or timed(
                form, files[form.precision], expected_scores
            )
            yield {"forms": forms, "max_difference": {key: worst(finding) for key, finding in forms.items()}}


def worst(form: Mapping[str, Any]) -> Any:
    """Return the largest difference of a form's batches, or why there is none."""
    return form.get("missing") or form.get("error") or max(form[key]["max_difference"] for key in form)


def networks(folder: Path) -> dict[str, Path]:
    """Return the network's file in each precision."""
    versions = REPOSITORY / chain.NETWORK
    files = {FP32: versions / "1" / "model.onnx", INT8: versions / "2" / "model.onnx"}
    if has("onnx"):
        files[FP16] = folder / "fp16.onnx"
        shutil.copyfile(files[FP32], files[FP16])
        convert_to_fp16(files[FP16])
    return files


def inputs() -> np.ndarray:
    """Return rows of the sample photos from the CPU path: float32[2, 3, 224, 224]."""
    transform = chain.transform()
    return np.stack([chain.on_host(transform, photo.read_bytes()) for photo in (COFFEE, CHELSEA)])


def reason(form: Form, files: Mapping[str, Path], remaining_s: float) -> dict[str, str]:
    """Return why a form cannot be timed; empty if it can."""
    import onnxruntime

    is_tensorrt = form.provider == TENSORRT
    reasons = {
        f"onnx; fix: {PARTS['onnx']}": form.precision not in files,
        f"{form.provider} in this onnxruntime": form.provider not in onnxruntime.get_available_providers(),
        f"tensorrt; fix: {PARTS['tensorrt']}": is_tensorrt and not has("tensorrt"),
        f"{remaining_s:.0f} s are left": is_tensorrt and remaining_s < ENGINE_S,
    }
    return next(({"missing": f"not run: {text}"} for text, is_so in reasons.items() if is_so), {})


def timed(form: Form, file: Path, expected: np.ndarray) -> dict[str, Any]:
    """Time a form at its batch sizes, and compare its scores; a failure is returned as a text."""
    try:
        # A CUDA graph belongs to one shape, and so does its session.
        return {
            f"batch_{rows}": on_device(session_of(file, form.provider, form.options), rows, expected)
            for rows in form.batch_sizes
        }
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        return {"error": f"{type(error).__name__}: {error}"[:600]}


def session_of(file: Path, provider: str, options: dict[str, str]) -> Any:
    """Open a network with exactly one provider and the CPU as the second.

    Raises:
        RuntimeError: ONNX Runtime left the provider out; its log has the reason.
    """
    import onnxruntime

    chosen = [(provider, options), *([(CPU, {})] if provider != CPU else [])]
    session = onnxruntime.InferenceSession(file, providers=chosen, enable_fallback=0)
    if session.get_providers()[0] != provider:
        raise RuntimeError(f"expected {provider}, got {session.get_providers()}")
    return session


def on_device(session: Any, batch_size: int, expected: np.ndarray) -> Findings:
    """Time runs whose input and output stay at one place of `device`, as a CUDA graph requires."""
    import onnxruntime

    rows = np.resize(inputs(), (batch_size, *chain.transform().shape))
    placed = onnxruntime.OrtValue.ortvalue_from_numpy(rows, "cuda", 0)
    out = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
        (batch_size, expected.shape[1]), np.float32, "cuda", 0
    )
    binding = session.io_binding()
    binding.bind_ortvalue_input(chain.INPUT, placed)
    binding.bind_ortvalue_output(chain.SCORES, out)

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    spent = statistics.median(chain.timed_ms(run, TIMED_S))
    scores, expected_scores = out.numpy(), np.resize(expected, (batch_size, expected.shape[1]))
    return {
        "ms": round(spent, 4),
        "per_s": round(batch_size / spent * 1e3),
        "max_difference": round(float(np.abs(scores - expected_scores).max()), 6),
        "same_class": bool((scores.argmax(1) == expected_scores.argmax(1)).all()),
    }
