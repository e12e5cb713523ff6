"""Edits of an ONNX graph that several tasks need: variable batches, FP32 outputs, free names."""

from collections.abc import Iterator, Sequence
from typing import Any

from nereid.repository import onnx_graph

BATCH = "N"
# Older files list every initializer as an input, too. Source: ONNX, IR.md.
FREE_INITIALIZERS = 4


def inputs(model: Any) -> list[Any]:
    """Return the inputs of a ModelProto without its weights."""
    weights = {each.name for each in model.graph.initializer}
    return [each for each in model.graph.input if each.name not in weights]


def dims(value: Any) -> list[int]:
    """Return the dims of an input or output; -1 for a variable one."""
    return [each.dim_value if each.HasField("dim_value") else -1 for each in value.type.tensor_type.shape.dim]


def add_constant(model: Any, tensor: Any) -> None:
    """Add an initializer; the IR version becomes one in which that is not an input."""
    model.graph.initializer.append(tensor)
    model.ir_version = max(model.ir_version, FREE_INITIALIZERS)


def free_batch(model: Any, outputs: Sequence[Any], keeps_rank: bool = False) -> Iterator[str]:
    """Make a fixed first dim of images and outputs variable; outputs keep all dims, or become [N, rest]."""
    images = inputs(model)
    sizes = {dims(each)[0] for each in images if dims(each)}
    if len(images) != 1 or sizes == {-1} or not sizes:
        return
    (size,) = sizes
    fixed = [each for each in outputs if dims(each)[:1] == [size]]
    for value in (images[0], *model.graph.output):
        if dims(value)[:1] == [size]:
            value.type.tensor_type.shape.dim[0].dim_param = BATCH
    for output in fixed:
        rest = dims(output)[1:] if keeps_rank else [-1]
        if rest.count(-1) < 2:
            _hide_batch(model, images[0].name, output, rest)
        if not keeps_rank:
            del output.type.tensor_type.shape.dim[2:]
    yield f"the batch of {size} is declared as variable"


def _hide_batch(model: Any, image: str, output: Any, rest: Sequence[int]) -> None:
    """Reshape an output to the rows of the input: an operator inside may still have the fixed batch."""
    from onnx import TensorProto, helper

    shape, rows, target = (free_name(model, name) for name in ("image_shape", "image_rows", "scores_shape"))
    index, others = free_name(model, "first_dim"), free_name(model, "other_dims")
    for name, numbers in ((index, [0]), (others, rest)):
        add_constant(model, helper.make_tensor(name, TensorProto.INT64, [len(numbers)], numbers))
    before = take_name(model, output, "fixed")
    model.graph.node.extend(
        [
            helper.make_node("Shape", [image], [shape]),
            helper.make_node("Gather", [shape, index], [rows]),
            helper.make_node("Concat", [rows, others], [target], axis=0),
            helper.make_node("Reshape", [before, target], [output.name]),
        ]
    )


def to_fp32(model: Any, scores: Any) -> Iterator[str]:
    """Convert an output of another float datatype to FP32."""
    from onnx import TensorProto, helper

    element = scores.type.tensor_type.elem_type
    if element not in (TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16):
        return
    before = take_name(model, scores, "uncast")
    model.graph.node.append(helper.make_node("Cast", [before], [scores.name], to=TensorProto.FLOAT))
    scores.type.tensor_type.elem_type = TensorProto.FLOAT
    yield f"output '{scores.name}' is converted from {TensorProto.DataType.Name(element)} to FP32"


def take_name(model: Any, output: Any, suffix: str) -> str:
    """Rename the inner tensor of an output, so that another node can return the output."""
    inner = free_name(model, f"{output.name}_{suffix}")
    for node in operators(model):
        for names in (node.input, node.output):
            for position, name in enumerate(names):
                if name == output.name:
                    names[position] = inner
    return inner


def operators(model: Any) -> Iterator[Any]:
    """Yield the operators of the graph and of its subgraphs; functions have names of their own."""
    for graph in onnx_graph.graphs(model.graph):
        yield from graph.node


def free_name(model: Any, wanted: str) -> str:
    """Return a name that no tensor has: the wanted one, or one with a number."""
    used = {each for node in operators(model) for each in (*node.input, *node.output)}
    used |= {each.name for each in (*model.graph.initializer, *model.graph.input)}
    number, name = 1, wanted
    while name in used:
        number += 1
        name = f"{wanted}_{number}"
    return name
