"""Changes to an ONNX file that make it a network for image batches: [N,3,H,W] in, FP32 [N,...] out.

Only a first run on two images can confirm some of them. It happens in a child process, so that a network
cannot harm the command. The description of a version records its choices; the next version uses the same.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import onnxruntime

from nereid.base.errors import OperationFailed, WrongUsage
from nereid.base.task_registry import TASKS
from nereid.models.publish import isolated_child
from nereid.models.publish.importing.graph_edits import (
    Activation,
    ActivationRule,
    accept_colours,
    activate,
    declare,
    dims,
    fit_runtimes,
    fix_size,
    fixed_batch,
    flatten,
    free_batch,
    rename,
    take_one_image,
    to_fp32,
)
from nereid.models.publish.importing.network_facts import ANY_SIZE, Size
from nereid.repository import onnx_file, onnx_graph
from nereid.repository.onnx_file import InvalidOnnx, check_with_onnx

# NumPy's image types, by ONNX Runtime's names.
ELEMENTS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8}
# Largest difference between a row alone and in a batch, relative to its largest number; kernels may differ.
ROW_TOLERANCE = 0.02
TIMEOUT_S = 60.0
# Operators whose results have one row per finding.
COUNTING = frozenset({"NonMaxSuppression", "NonZero", "Unique"})
Precision = Literal["fp16"]
CONVERTER = "onnxruntime.transformers.float16"
TO_FP16 = "weights and computation are converted to FP16, inputs and outputs stay FP32"
Result = TypeVar("Result")
# Names of input and outputs in the order of a config; None for those in the file.
Names: TypeAlias = Sequence[str] | None


@dataclass(frozen=True, slots=True)
class NetworkChoices:
    """The user's choices about a network that its file does not contain.

    Args:
        size: input height and width in pixels, for a network that accepts any size; zeros for the file's.
        output: the output with the scores; empty if it is the only one.
        activation: the rule for it: a function to append to the scores, or `auto`, which decides after a run.
        head: layout of a detector's outputs; empty to find it from names and shapes.
        post_processing: parameters of the model after the network, such as thresholds.
        labels: class names, or the characters of a recogniser; () for those in the file.
        labels_from: the origin of the labels, for messages.
    """

    size: Size = ANY_SIZE
    output: str = ""
    activation: ActivationRule = "auto"
    head: str = ""
    post_processing: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    labels_from: str = "--labels"


class Adapted(NamedTuple):
    """A changed file: the names of its outputs by role, and a sentence for each change and note."""

    outputs: tuple[str, ...]
    changes: list[str]
    notes: Sequence[str] = ()


def adapt_file(path: Path, output: str = "", activation: Activation = "none", names: Names = None) -> Adapted:
    """Change an ONNX file like `adapt`, so that this machine's and the container's runtimes open it."""

    def change(model: Any) -> tuple[str, list[str]]:
        changes = fit_runtimes(model)
        scores, more = adapt(model, output, activation, names)
        return scores, [*changes, *more]

    scores, changes = change_file(path, change)
    return Adapted((scores,), changes)


def adapt(
    model: Any, output: str = "", activation: Activation = "none", names: Names = None
) -> tuple[str, list[str]]:
    """Change a ModelProto in place; return the name of the scores, and a line for each change.

    A file that already fits is left unchanged.

    Args:
        model: the network.
        output: the output with the scores; empty if it is the only one.
        activation: function to append, which turns the scores into probabilities.
        names: of the input and of the scores; None for those in the file.

    Raises:
        WrongUsage: the network has several outputs, and no choice names one of them.
    """
    scores = _scores(model, output)
    changes = [*free_batch(model), *accept_colours(model)]
    changes += [*flatten(model, scores), *to_fp32(model, scores), *activate(model, scores, activation)]
    if names:
        changes += rename(model, scores, names)
    return scores.name, changes


def _scores(model: Any, output: str) -> Any:
    matches = [tensor for tensor in model.graph.output if output in ("", tensor.name)]
    if len(matches) != 1:
        names = ", ".join(output.name for output in model.graph.output) or "none"
        got = f"'{output}', the network has: {names}" if output else names
        raise WrongUsage(
            f"expected one output with scores, got: {got}; fix: name one with --output, or another --task "
            f"({', '.join(f'{task.name} for {task.network}' for task in TASKS if task.network)})"
        )
    return matches[0]


def adapt_outputs_of_file(path: Path, size: Size = ANY_SIZE) -> list[str]:
    """Make the batch of an ONNX file with any outputs variable, and its numbers FP32.

    `size` is height and width in pixels, for a network that accepts any size. Open dims of the outputs are
    declared as a run returns them.
    """

    def change(model: Any) -> tuple[bool, list[str]]:
        outputs, changes = list(model.graph.output), [*fit_runtimes(model), *free_batch(model)]
        sized = [*fix_size(model, size)]
        changes += [*accept_colours(model), *sized]
        for output in outputs:
            changes += to_fp32(model, output)
        return bool(sized) or any(-1 in dims(output)[1:] for output in outputs), changes

    is_open, changes = change_file(path, change)
    if is_open:
        _declare_outputs(path)
    return changes


def edit_file(path: Path, edit: Callable[[Any], Iterable[str]]) -> list[str]:
    """Edit the ModelProto of a file in place; if no change is reported, the file is left unchanged."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    if changes := [*edit(model)]:
        _save(model, path)
    return changes


def rename_file(path: Path, old_names: Sequence[str], new_names: Sequence[str]) -> list[str]:
    """Rename the input and outputs of an ONNX file, listed in this order."""

    def edit(model: Any) -> Iterator[str]:
        outputs = {output.name: output for output in model.graph.output}
        for name, new in zip(old_names[1:], new_names[1:], strict=True):
            yield from rename(model, outputs[name], (new_names[0], new))

    return edit_file(path, edit)


def change_file(path: Path, change: Callable[[Any], tuple[Result, list[str]]]) -> tuple[Result, list[str]]:
    """Change an ONNX file; if no change is reported, it is left unchanged.

    `change` edits a ModelProto in place, and returns its result and a sentence for each change. If a fixed
    batch cannot be freed, the network computes one image at a time.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    size, content = fixed_batch(model), path.read_bytes()
    try:
        result, changes = change(model)
    except OperationFailed:
        raise
    except Exception as error:  # a malformed graph can fail at any step
        check_with_onnx(path)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidOnnx(f"expected a well-formed network, got {reason}; fix: export it again") from error
    if changes:
        _save(model, path)
    trial = try_network(path) if size == 1 else None
    if trial and not trial.computes_rows:
        path.write_bytes(content)
        original_trial, model = try_network(path), onnx.ModelProto.FromString(content)
        alone = [*take_one_image(model, original_trial.inferred if original_trial else {})]
        result, changes = change(model)
        changes = [*alone, *changes]
        _save(model, path)
    return result, changes


def _save(model: Any, path: Path) -> None:
    import onnx

    del model.graph.value_info[:]  # shapes of the network's inner tensors may have changed
    onnx.save(model, path)


def _declare_outputs(path: Path) -> None:
    """Declare the dims of an ONNX file's outputs after the batch, as a run returns them.

    A network with NMS inside returns as many rows as it finds, so it gets the dims that ONNX Runtime infers.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    is_counting = any(node.op_type in COUNTING for node in onnx_graph.nodes(model))
    if not (trial := try_network(path)):
        return
    for output in model.graph.output:
        shape = (trial.inferred if is_counting else trial.shapes)[output.name]
        declare(output, [dims(output)[0], *shape[1:]] if shape else [])
    onnx.save(model, path)


@dataclass(frozen=True, slots=True)
class NetworkTrial:
    """Shapes of the outputs by name, and whether the rows of a batch are independent.

    Args:
        shapes: for one image.
        inferred: shapes that ONNX Runtime knows before a run of one image; -1 for variable dims.
        computes_rows: whether each row of a batch has the same outputs as alone.
    """

    shapes: dict[str, list[int]]
    inferred: dict[str, list[int]]
    computes_rows: bool


def try_network(path: Path) -> NetworkTrial | None:
    """Run a network of images; None if it fails, crashes or takes too long, which an examination explains."""
    try:
        _, content = isolated_child.run(__name__, str(path), TIMEOUT_S)
        return msgspec.convert(content, NetworkTrial)
    except (isolated_child.NoResult, msgspec.ValidationError):
        return None


def handle_request(path: str, write: isolated_child.Write) -> None:
    """Run the network, and write the results."""
    write("trial", asdict(run(Path(path))))


def run(path: Path) -> NetworkTrial:
    """Run the network in this process."""
    session = _open(path)
    (image,) = session.get_inputs()
    levels = np.random.default_rng(0).integers(0, 256, (2, *image.shape[1:])).astype(ELEMENTS[image.type])
    pixels = levels if levels.dtype == np.uint8 else levels / levels.dtype.type(255)
    alone = [session.run(None, {image.name: pixels[index : index + 1]}) for index in (0, 1)]
    shapes = {name: list(row.shape) for name, row in zip(_inferred(session), alone[0], strict=True)}
    return NetworkTrial(shapes, _inferred_alone(path, session), _computes_rows(session, pixels, alone))


def _open(path: Path, options: onnxruntime.SessionOptions | None = None) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], enable_fallback=0)


def _inferred(session: onnxruntime.InferenceSession) -> dict[str, list[int]]:
    return {
        output.name: [dim if isinstance(dim, int) else -1 for dim in output.shape]
        for output in session.get_outputs()
    }


def _inferred_alone(path: Path, session: onnxruntime.InferenceSession) -> dict[str, list[int]]:
    """Return the shapes that ONNX Runtime infers; dims that it cannot infer for any batch, for one image."""
    inferred, batch = _inferred(session), session.get_inputs()[0].shape[0]
    if not isinstance(batch, str) or all(-1 not in shape[1:] for shape in inferred.values()):
        return inferred
    options = onnxruntime.SessionOptions()
    options.add_free_dimension_override_by_name(batch, 1)
    try:
        alone = _inferred(_open(path, options))
    except Exception:  # ONNX Runtime's own exceptions share no base class
        return inferred
    return {name: [*shape[:1], *alone[name][1:]] for name, shape in inferred.items()}


def _computes_rows(
    session: onnxruntime.InferenceSession, pixels: np.ndarray, alone: list[list[np.ndarray]]
) -> bool:
    if any(isinstance(output.shape[0], int) for output in session.get_outputs() if output.shape):
        return False
    try:
        together = session.run(None, {session.get_inputs()[0].name: pixels})
    except Exception:  # ONNX Runtime's own exceptions share no base class
        return False
    pairs = [(index, *pair) for index in (0, 1) for pair in zip(together, alone[index], strict=True)]
    return all(_is_row(output, index, row) for index, output, row in pairs)


def _is_row(batch: np.ndarray, index: int, row: np.ndarray) -> bool:
    if batch.shape != (2, *row.shape[1:]):
        return False
    limit = ROW_TOLERANCE * (np.abs(row).max(initial=0) or 1)
    return bool(np.allclose(batch[index], row[0], rtol=0, atol=limit, equal_nan=True))


def convert_to_fp16(path: Path) -> None:
    """Convert a staged FP32 network in place, external data included; OperationFailed if impossible."""
    file = onnx_file.read(path)
    _check_is_fp32(path, file.model)
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with _quiet_converter():
        try:
            converted = convert_float_to_float16(onnx.load(path), keep_io_types=True)
            onnx_graph.sort(converted)  # the casts of the inputs are last
            content = converted.SerializeToString()
        except Exception as error:  # it may raise any error for unknown operators
            raise _refusal(path, f"{type(error).__name__}: {error}") from None
    if len(content) > onnx_file.MAX_BYTES:
        limit = f"{onnx_file.MAX_BYTES:,}"
        raise _refusal(path, f"it has {len(content):,} bytes in FP16, and a file at most {limit}")
    for data_file in {path.parent / data.location for data in file.external}:
        data_file.unlink()
    path.write_bytes(content)


def _check_is_fp32(path: Path, model: Any) -> None:
    operators = {node.op_type for graph in onnx_graph.graphs(model.graph) for node in graph.node}
    if integer := sorted(
        operator for operator in operators if "Quantize" in operator or operator.endswith("Integer")
    ):
        raise _refusal(path, f"expected an FP32 network, got the operators of INT8 {', '.join(integer)}")
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
    """Suppress a warning for each weight that FP16 rounds, because the examination compares the results."""
    logger = logging.getLogger(CONVERTER)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
