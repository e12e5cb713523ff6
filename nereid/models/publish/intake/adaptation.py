"""Changes of an ONNX file that make it a network for image batches: [N,3,H,W] in, FP32 [N,...] out.

`description` records the choices of a version. The next version gets the same, and so the same changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nereid.base.errors import WrongUsage
from nereid.models.publish.intake.changed_file import change_file, declare_outputs, edited
from nereid.models.publish.intake.graph_edits import (
    add_batch,
    add_constant,
    dims,
    fix_size,
    free_batch,
    free_name,
    inputs,
    operators,
    take_name,
    to_fp32,
    with_axes,
)
from nereid.models.publish.intake.network_facts import ANY_SIZE, Size
from nereid.repository import onnx_graph
from nereid.repository.onnx_runtimes import Runtime, supported_runtimes
from nereid.tasks.read.dictionary import LABELS

Activation = Literal["none", "softmax", "sigmoid"]
ActivationRule = Activation | Literal["auto"]
PROBABILITIES = "probabilities"
# ITU-R BT.601, as Pillow converts RGB to grey.
LUMA = (0.299, 0.587, 0.114)
GREY, RGB = 1, 3


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of the user about a network, which its file does not contain.

    Args:
        size: height and width of the input in pixels, for a network that accepts any size; zeros for that of
            the file.
        output: the output with the scores; empty for the only one.
        activation: the rule for it: a function to append to the scores, or `auto`, which decides after a run.
        head: layout of a detector's outputs; empty to find it from names and shapes.
        last_step: parameters of the model after the network, such as thresholds.
        labels: class names, or the characters of a recogniser; () for those in the file.
        labels_from: the origin of the labels, for messages.
    """

    size: Size = ANY_SIZE
    output: str = ""
    activation: ActivationRule = "auto"
    head: str = ""
    last_step: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    labels_from: str = LABELS


class Adapted(NamedTuple):
    """A changed file: the names of its outputs by role, and a sentence for each change and note."""

    outputs: tuple[str, ...]
    changes: list[str]
    notes: Sequence[str] = ()


def adapt_file(
    path: Path, output: str = "", activation: Activation = "none", names: Sequence[str] | None = None
) -> Adapted:
    """Change an ONNX file so that this machine's and the container's runtimes open it as a classifier.

    Arguments and errors as `adapt`.
    """

    def change(model: Any) -> tuple[str, list[str]]:
        changes = fit_runtimes(model, supported_runtimes())
        scores, more = adapt(model, output, activation, names)
        return scores, [*changes, *more]

    scores, changes = change_file(path, change)
    return Adapted((scores,), changes)


def adapt(
    model: Any, output: str = "", activation: Activation = "none", names: Sequence[str] | None = None
) -> tuple[str, list[str]]:
    """Change a ModelProto in place; return the name of the scores, and a line for each change.

    A file that already fits stays as it is.

    Args:
        model: the network.
        output: the output with the scores; empty for the only one.
        activation: function to append, which turns the scores into probabilities.
        names: of the input and of the scores; None for those in the file.

    Raises:
        WrongUsage: the network has several outputs, and no choice names one of them.
    """
    scores = _scores(model, output)
    changes = [*free_batch(model), *_accept_colours(model)]
    changes += [*_flatten(model, scores), *to_fp32(model, scores), *_activate(model, scores, activation)]
    if names:
        changes += _rename(model, scores, names)
    if changes:  # shapes of the network's inner tensors may have changed
        del model.graph.value_info[:]
    return scores.name, changes


def fit_runtimes(model: Any, runtimes: Sequence[Runtime]) -> list[str]:
    """Lower the opset and IR version of a ModelProto if no operator changes by that; return the changes.

    A network that needs the newer operators stays as it is, and the check of runtimes reports it.
    """
    from onnx import defs

    changes = []
    opset = min(each.opset for each in runtimes)
    given = onnx_graph.opsets(model).get("", 0)
    if given > opset:
        try:
            newest = max(
                defs.get_schema(node.op_type, given, "").since_version
                for node in onnx_graph.nodes(model)
                if node.domain in ("", "ai.onnx")
            )
        except (defs.SchemaError, ValueError, TypeError):  # a version of more than 32 bits is a TypeError
            return []
        if newest > opset:
            return []
        changes.append(f"opset {given} is written as {opset}, in which its operators are the same")
        for each in model.opset_import:
            if each.domain in ("", "ai.onnx"):
                each.version = opset
    ir_version = min(each.ir_version for each in runtimes)
    if model.ir_version > ir_version:
        changes.append(f"IR version {model.ir_version} is written as {ir_version}")
        model.ir_version = ir_version
    return changes


def adapt_outputs_of_file(path: Path, size: Size = ANY_SIZE) -> list[str]:
    """Change an ONNX file with any outputs: its batch is variable, and its numbers are FP32.

    Args:
        path: the file.
        size: height and width in pixels, for a network that accepts any size.

    Open dims of the outputs are declared as a run returns them.
    """

    def change(model: Any) -> tuple[bool, list[str]]:
        changes, outputs = fit_runtimes(model, supported_runtimes()), list(model.graph.output)
        changes += free_batch(model)
        sized = [*fix_size(model, size)]
        changes += [*_accept_colours(model), *sized]
        for each in outputs:
            changes += to_fp32(model, each)
        if changes:
            del model.graph.value_info[:]
        return bool(sized) or any(-1 in dims(each)[1:] for each in outputs), changes

    is_open, changes = change_file(path, change)
    if is_open:
        declare_outputs(path)
    return changes


def add_batch_to_file(path: Path) -> list[str]:
    """Give the results of one image a batch of 1 in an ONNX file."""
    with edited(path) as (model, changes):
        changes += add_batch(model)
    return changes


def rename_file(path: Path, present: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Give the input and outputs of an ONNX file other names: first the input, then the outputs."""
    with edited(path) as (model, changes):
        outputs = {each.name: each for each in model.graph.output}
        for name, new in zip(present[1:], wanted[1:], strict=True):
            changes += _rename(model, outputs[name], (wanted[0], new))
    return changes


def fit_file(path: Path) -> list[str]:
    """Change an ONNX file as `fit_runtimes`."""
    with edited(path) as (model, changes):
        changes += fit_runtimes(model, supported_runtimes())
    return changes


def _accept_colours(model: Any) -> Iterator[str]:
    """Convert colours to grey in front of a network with one channel."""
    from onnx import TensorProto, helper

    (image, *others) = inputs(model) or [None]
    shape = dims(image) if image is not None else []
    if others or len(shape) != 4:
        return
    is_last = shape[3] == GREY and shape[1] != GREY
    if not is_last and shape[1] != GREY:
        return
    channel = 3 if is_last else 1
    given, element = image.name, image.type.tensor_type.elem_type
    grey, colours = free_name(model, f"{given}_grey"), free_name(model, f"{given}_colours")
    luma = free_name(model, "luma")
    shape_of_luma = [1, 1, 1, RGB] if is_last else [1, RGB, 1, 1]
    add_constant(model, helper.make_tensor(luma, TensorProto.FLOAT, shape_of_luma, LUMA))
    weighted, total = free_name(model, "luma_weighted"), free_name(model, "luma_sum")
    nodes = [
        helper.make_node("Cast", [given], [colours], to=TensorProto.FLOAT),
        helper.make_node("Mul", [colours, luma], [weighted]),
        with_axes(model, "ReduceSum", weighted, total, [channel], keepdims=1),
    ]
    if element == TensorProto.UINT8:
        rounded = free_name(model, "luma_rounded")
        nodes.append(helper.make_node("Round", [total], [rounded]))
        total = rounded
    nodes.append(helper.make_node("Cast", [total], [grey], to=element))
    for node in operators(model):
        for position, name in enumerate(node.input):
            if name == given:
                node.input[position] = grey
    for number, node in enumerate(nodes):
        model.graph.node.insert(number, node)
    image.type.tensor_type.shape.dim[channel].dim_value = RGB
    yield f"colours are converted to grey for input '{given}'"


def _scores(model: Any, output: str) -> Any:
    found = [each for each in model.graph.output if output in ("", each.name)]
    if len(found) != 1:
        names = ", ".join(each.name for each in model.graph.output) or "none"
        got = f"'{output}', the network has: {names}" if output else names
        raise WrongUsage(
            f"expected one output with scores, got: {got}; fix: name one with --output, or --task detect for "
            "a network that returns boxes"
        )
    return found[0]


def _flatten(model: Any, scores: Any) -> Iterator[str]:
    """Remove dims of 1 beside the classes, as in [N,C,1,1] or [N,1,C]; rows, such as boxes, are no scores."""
    from onnx import helper

    shape, declared = dims(scores), scores.type.tensor_type.shape.dim
    classes = [dim for dim in declared[1:] if dim.dim_value != 1]
    if len(shape) < 3 or len(classes) > 1:
        return
    before = take_name(model, scores, "unflattened")
    model.graph.node.append(helper.make_node("Flatten", [before], [scores.name], axis=1))
    if classes:
        declared[1].CopyFrom(classes[0])
    del declared[2:]
    yield f"output '{scores.name}' is flattened from {shape} to {dims(scores)}"


def _activate(model: Any, scores: Any, activation: Activation) -> Iterator[str]:
    from onnx import helper

    if activation == "none":
        return
    before, name = scores.name, free_name(model, PROBABILITIES)
    axis: dict[str, Any] = {"axis": 1} if activation == "softmax" else {}
    model.graph.node.append(helper.make_node(activation.capitalize(), [before], [name], **axis))
    scores.name = name
    yield f"a {activation} is appended to output '{before}', as '{name}'"


def _rename(model: Any, scores: Any, names: Sequence[str]) -> Iterator[str]:
    """Give the input and the scores other names, with a copy of the tensor; used names stay as they are."""
    from onnx import helper

    nodes, (given, wanted) = model.graph.node, names
    image = inputs(model)[:1]
    if image and image[0].name != given and free_name(model, given) == given:
        yield f"input '{image[0].name}' is named '{given}'"
        nodes.insert(0, helper.make_node("Identity", [given], [image[0].name]))
        image[0].name = given
    if scores.name != wanted and free_name(model, wanted) == wanted:
        yield f"output '{scores.name}' is named '{wanted}'"
        nodes.append(helper.make_node("Identity", [scores.name], [wanted]))
        scores.name = wanted
