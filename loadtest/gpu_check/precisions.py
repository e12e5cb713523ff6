"""The network in FP32, FP16 and INT8, with TensorRT, and as a CUDA graph."""

import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from loadtest.gpu_check import chain, network_runs
from loadtest.gpu_check.sections import ONNX, TENSORRT, Context, Findings
from nereid.assets import CHELSEA, COFFEE, REPOSITORY
from nereid.inference.session_options import CPU, CUDA
from nereid.inference.tensorrt import TENSORRT as TENSORRT_PROVIDER
from nereid.publish.intake.precision import convert

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
    "TensorRT FP32": Form(FP32, TENSORRT_PROVIDER, {}, TENSORRT_BATCH_SIZES),
    "TensorRT FP16": Form(FP32, TENSORRT_PROVIDER, {"trt_fp16_enable": "1"}, TENSORRT_BATCH_SIZES),
}


def measure(context: Context) -> Iterator[Findings]:
    """Yield times and differences of each form; a form that fails has its reason."""
    found: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        files, notes = networks(Path(folder))
        yield {"notes": notes}
        config, rows = chain.gpu_config(chain.NETWORK), network_runs.many(inputs())
        expected = network_runs.on_host(rows)
        yield network_runs.recorded(config, rows, expected)
        yield network_runs.changing(config, rows)
        # FP16 is compared with FP32; INT8 differs from FP32 by itself.
        exact = {name: scores(session(files[name], CPU, {}), inputs()) for name in (FP32, INT8)}
        for name, form in FORMS.items():
            wanted = exact.get(form.precision, exact[FP32])
            found[name] = reason(form, files, context.left_s()) or timed(form, files[form.precision], wanted)
            yield {"forms": found}
    if (left_s := context.left_s()) < ENGINE_S:
        yield {"engines": {"missing": f"time: {left_s:.0f} s are left"}}
    else:
        yield network_runs.engines(config, rows, expected)


def rehearse(context: Context) -> Iterator[Findings]:
    """Yield the differences of FP16 and INT8 from FP32 on the CPU."""
    with TemporaryDirectory() as folder:
        files, notes = networks(Path(folder))
        yield {"notes": notes}
        expected = scores(session(files[FP32], CPU, {}), inputs())
        for precision, file in files.items():
            opened = session(file, CPU, {})
            yield {precision: compare(scores(opened, inputs()), expected)}
            yield {f"{precision}, bound": on_device(opened, 2, expected, "cpu")}
    rows = network_runs.many(inputs())
    session_of_backend = network_runs.opened(network_runs.cpu_config())
    yield {"alternating": network_runs.alternating(session_of_backend, rows, network_runs.on_host(rows))}
    yield {"changing_ms": network_runs.changing_ms(session_of_backend, rows)}


def networks(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the network's file in each precision, and notes about those that are missing."""
    versions = REPOSITORY / chain.NETWORK
    files = {FP32: versions / "1" / "model.onnx", INT8: versions / "2" / "model.onnx"}
    if not ONNX.is_installed:
        return files, [f"no FP16: {ONNX}"]
    files[FP16] = folder / "fp16.onnx"
    shutil.copyfile(files[FP32], files[FP16])
    convert(files[FP16])
    return files, []


def inputs() -> np.ndarray:
    """Return rows of the sample photos from the CPU path: float32[2, 3, 224, 224]."""
    wanted = chain.transform()
    return np.stack([chain.on_host(wanted, photo.read_bytes()) for photo in (COFFEE, CHELSEA)])


def reason(form: Form, files: dict[str, Path], left_s: float) -> dict[str, Any]:
    """Return why a form cannot be timed; empty if it can."""
    import onnxruntime

    if form.precision not in files:
        return {"missing": f"the network in {form.precision}"}
    if form.provider not in onnxruntime.get_available_providers():
        return {"missing": f"{form.provider} in this onnxruntime"}
    if form.provider == TENSORRT_PROVIDER and not TENSORRT.is_installed:
        return {"missing": str(TENSORRT)}
    if form.provider == TENSORRT_PROVIDER and left_s < ENGINE_S:
        return {"missing": f"time: {left_s:.0f} s are left"}
    return {}


def timed(form: Form, file: Path, expected: np.ndarray) -> dict[str, Any]:
    """Time a form at its batch sizes, and compare its scores; a failure is returned as a text."""
    try:
        opened = session(file, form.provider, form.options)
        found = compare(scores(opened, inputs()), expected) if "graph" not in str(form.options) else {}
        for batch_size in form.batch_sizes:
            # A CUDA graph belongs to one shape, and so does its session.
            again = session(file, form.provider, form.options)
            found |= on_device(again, batch_size, expected)
        return found
    except Exception as error:  # ONNX Runtime's own exceptions share no base class
        return {"error": f"{type(error).__name__}: {error}"[:600]}


def session(file: Path, provider: str, options: dict[str, str]) -> Any:
    """Open a network with exactly one provider and the CPU as the second.

    Raises:
        RuntimeError: ONNX Runtime left the provider out; its log has the reason.
    """
    import onnxruntime

    chosen = [(provider, options), *([(CPU, {})] if provider != CPU else [])]
    opened = onnxruntime.InferenceSession(file, providers=chosen, enable_fallback=0)
    if opened.get_providers()[0] != provider:
        raise RuntimeError(f"expected {provider}, got {opened.get_providers()}")
    return opened


def scores(opened: Any, rows: np.ndarray) -> np.ndarray:
    """Return the scores of rows, which ONNX Runtime copies."""
    found: np.ndarray = opened.run([chain.SCORES], {chain.INPUT: rows})[0]
    return found


def on_device(opened: Any, batch_size: int, expected: np.ndarray, device: str = "cuda") -> dict[str, Any]:
    """Time runs whose input and output stay at one place of `device`, as a CUDA graph requires."""
    import onnxruntime

    rows = np.resize(inputs(), (batch_size, *chain.transform().shape))
    placed = onnxruntime.OrtValue.ortvalue_from_numpy(rows, device, 0)
    out = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
        (batch_size, expected.shape[1]), np.float32, device, 0
    )
    binding = opened.io_binding()
    binding.bind_ortvalue_input(chain.INPUT, placed)
    binding.bind_ortvalue_output(chain.SCORES, out)

    def run() -> None:
        opened.run_with_iobinding(binding)
        binding.synchronize_outputs()

    spent = statistics.median(chain.timed_ms(run, TIMED_S))
    found = compare(out.numpy(), np.resize(expected, (batch_size, expected.shape[1])))
    return {f"batch_{batch_size}": {"ms": round(spent, 4), "per_s": round(batch_size / spent * 1e3), **found}}


def compare(found: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """Return the largest difference of scores, and whether all rows have the same first class."""
    return {
        "max_difference": round(float(np.abs(found - expected).max()), 6),
        "same_class": bool((found.argmax(1) == expected.argmax(1)).all()),
    }
