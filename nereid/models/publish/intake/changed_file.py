"""Changes of an ONNX file, and those that only a run confirms: its batch, and the dims of its outputs."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from nereid.base.errors import OperationFailed
from nereid.models.publish.intake.graph_edits import declare, dims, fixed_batch, take_one_image
from nereid.models.publish.intake.network_trial import try_network
from nereid.repository import onnx_graph
from nereid.repository.onnx_file import InvalidOnnx, check_with_onnx

# Operators whose results have as many rows as there are findings.
COUNTING = frozenset({"NonMaxSuppression", "NonZero", "Unique"})
Result = TypeVar("Result")


@contextlib.contextmanager
def edited(path: Path) -> Iterator[tuple[Any, list[str]]]:
    """Yield the ModelProto of a file, and a list for a sentence per change; with one, it is written."""
    import onnx

    model, changes = onnx.load(path, load_external_data=False), list[str]()
    yield model, changes
    if changes:
        del model.graph.value_info[:]  # shapes of the network's inner tensors may have changed
        onnx.save(model, path)


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
    try:
        result, changes = change(model)
    except OperationFailed:
        raise
    except Exception as error:  # a malformed graph can fail at any step
        check_with_onnx(path)
        found = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidOnnx(f"expected a well-formed network, got {found}; fix: export it again") from error
    if changes:
        onnx.save(model, path)
    trial = try_network(path) if size == 1 else None
    if trial and not trial.computes_rows:
        path.write_bytes(content)
        given, model = try_network(path), onnx.ModelProto.FromString(content)
        alone = [*take_one_image(model, given.inferred if given else {})]
        result, changes = change(model)
        changes = [*alone, *changes]
        onnx.save(model, path)
    return result, changes


def declare_outputs(path: Path) -> None:
    """Declare the dims of an ONNX file's outputs behind the batch, as a run returns them.

    A network with NMS inside returns as many rows as it finds, so it gets the dims that ONNX Runtime infers.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    is_counting = any(node.op_type in COUNTING for node in onnx_graph.nodes(model))
    if not (trial := try_network(path)):
        return
    for each in model.graph.output:
        shape = (trial.inferred if is_counting else trial.shapes)[each.name]
        declare(each, [dims(each)[0], *shape[1:]] if shape else [])
    onnx.save(model, path)
