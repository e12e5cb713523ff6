"""Edits of an ONNX graph that several tasks need: variable batches, colours, FP32 outputs, names."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any, Literal

import numpy as np

from nereid.base.contract import EMBEDDING
from nereid.repository import onnx_graph
from nereid.repository.onnx_file import supported_runtimes

Activation = Literal["none", "softmax", "sigmoid", "normalize"]
ActivationRule = Activation | Literal["auto"]
PROBABILITIES = "probabilities"
# A shorter vector is not scaled to unit length. Source: torch, nn.functional.normalize.
SHORTEST = 1e-12
# ITU-R BT.601, as Pillow converts RGB to grey.
LUMA = (0.299, 0.587, 0.114)
GREY, RGB = 1, 3
BATCH = "N"
# Channels of grey and colour images.
COLOURS = (GREY, RGB)
# The input with the shape of the result, by operator.
SHAPES = {"Reshape": 1, "Expand": 1, "Resize": 3, "ConstantOfShape": 0}
# After the nodes that compute the number of images and the latest shape.
AFTER_SHAPES = 3
# Older files also list every initializer as an input. Source: ONNX, IR.md.
FREE_INITIALIZERS = 4


def inputs(model: Any) -> list[Any]:
    """Return the inputs of a ModelProto without its weights."""
    weights = {weight.name for weight in model.graph.initializer}
    return [tensor for tensor in model.graph.input if tensor.name not in weights]


def dims(value: Any) -> list[int]:
    """Return the dims of an input or output; -1 for a variable one."""
    return [dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim]


def make_node(operator: str, sources: Sequence[str], targets: Sequence[str], **attributes: Any) -> Any:
    """Return a node of an operator."""
    from onnx import helper

    return helper.make_node(operator, sources, targets, **attributes)


def add_constant(model: Any, preferred: str, numbers: Any, dtype: type = np.int64) -> str:
    """Add an initializer with numbers in their shape; return its name, a free one.

    The model gets an IR version in which an initializer need not be an input.
    """
    from onnx import numpy_helper

    name = free_name(model, preferred)
    model.graph.initializer.append(numpy_helper.from_array(np.array(numbers, dtype), name))
    model.ir_version = max(model.ir_version, FREE_INITIALIZERS)
    return name


def fixed_batch(model: Any) -> int:
    """Return the fixed first dim of the only input besides the weights; 0 if there is none."""
    images = inputs(model)
    return max(0, next(iter(dims(images[0])), 0)) if len(images) == 1 else 0


def free_batch(model: Any) -> Iterator[str]:
    """Make a fixed first dim of images and outputs variable, also where operators hard-code it."""
    if not (size := fixed_batch(model)):
        return
    (image,) = inputs(model)
    for value in (image, *model.graph.output):
        if dims(value)[:1] == [size]:
            value.type.tensor_type.shape.dim[0].dim_param = BATCH
    _free_shapes(model, image.name, size)
    yield f"the batch of {size} is declared as variable"


def take_one_image(model: Any, inferred: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Make a network's fixed batch of 1 variable; the network then computes only the first row.

    An output may declare a variable first dim, although its inferred shape starts with 1.
    """
    (image,) = inputs(model)
    first = free_name(model, f"{image.name}_first")
    _redirect(model, image.name, first)
    rows = _rows(model, image.name)
    single = [
        output
        for output in model.graph.output
        if dims(output)[:1] == [1] or [*inferred.get(output.name, ())][:1] == [1]
    ]
    for output in single:
        # ONNX Runtime cannot see through the shape, and assumes a variable first dim.
        shape = _shape(model, rows, [1] * (len(dims(output)) - 1))
        before = take_name(model, output.name, "alone")
        model.graph.node.append(make_node("Expand", [before, shape], [output.name]))
    arguments: dict[str, Any] = {"starts": [0], "ends": [1], "axes": [0]}
    if onnx_graph.opsets(model).get("", 0) >= 10:  # they became inputs
        constants = [add_constant(model, f"{first}_{word}", numbers) for word, numbers in arguments.items()]
        node = make_node("Slice", [image.name, *constants], [first], name=onnx_graph.FIRST_IMAGE)
    else:
        node = make_node("Slice", [image.name], [first], name=onnx_graph.FIRST_IMAGE, **arguments)
    model.graph.node.insert(0, node)
    for value in (image, *single):
        value.type.tensor_type.shape.dim[0].dim_param = BATCH
    yield "it computes one image at a time: its operators have a fixed batch of 1"


def add_batch(model: Any) -> Iterator[str]:
    """Add a batch of 1 to the results of one image, and to the image if it has none."""
    (image,) = inputs(model)
    if len(dims(image)) == 3:
        alone, first = free_name(model, f"{image.name}_alone"), add_constant(model, "first_image", 0)
        _redirect(model, image.name, alone)
        model.graph.node.insert(0, make_node("Gather", [image.name, first], [alone]))
        declare(image, [1, *dims(image)])
    declare(image, [1, *dims(image)[1:]])
    for output in model.graph.output:
        before = take_name(model, output.name, "unbatched")
        model.graph.node.append(with_axes(model, "Unsqueeze", before, output.name, [0]))
        declare(output, [1, *dims(output)])
    yield "its image and results get a batch of 1"


def with_axes(
    model: Any, operator: str, source: str, target: str, axes: Sequence[int], since: int = 13, **more: Any
) -> Any:
    """Return a node of an operator whose axes became an input at an opset.

    Source of the opsets: ONNX, Operators.md.
    """
    if onnx_graph.opsets(model).get("", 0) < since:
        return make_node(operator, [source], [target], axes=axes, **more)
    axes_input = add_constant(model, f"{target}_axes", axes)
    return make_node(operator, [source, axes_input], [target], **more)


def top_k(model: Any, source: str, targets: Sequence[str], count: int) -> Any:
    """Return a node for the largest values of the last dim and their indices, largest first."""
    if onnx_graph.opsets(model).get("", 0) < 10:
        return make_node("TopK", [source], targets, k=count)
    return make_node("TopK", [source, add_constant(model, f"{targets[0]}_k", [count])], targets)


def declare(value: Any, shape: Sequence[int]) -> None:
    """Set the dims of an input or output; -1 for a variable one."""
    declared = value.type.tensor_type.shape.dim
    batch = declared[0].dim_param if declared else ""
    del declared[:]
    for axis, side in enumerate(shape):
        if side >= 0:
            declared.add().dim_value = side
        else:
            declared.add().dim_param = (batch if not axis else "") or f"{value.name}_{axis}"


def _free_shapes(model: Any, image: str, size: int) -> None:
    """Make shapes that start with a fixed batch start with the number of images instead."""
    constants, rows = _small_constants(model), ""
    from_image = {image}
    for node in [*model.graph.node]:
        is_of_image = not from_image.isdisjoint(node.input)
        from_image.update(node.output if is_of_image else ())
        index = SHAPES.get(node.op_type, len(node.input))
        has_batch = index < len(node.input) and [*constants.get(node.input[index], ())][:1] == [size]
        if has_batch and (is_of_image or node.op_type != "Reshape"):
            rows = rows or _rows(model, image)
            node.input[index] = _shape(model, rows, constants[node.input[index]][1:])
        elif (
            node.op_type == "Concat"
            and is_of_image
            and not any(attribute.name == "axis" and attribute.i == 0 for attribute in node.attribute)
        ):
            for position, name in enumerate(node.input):
                weight = next((tensor for tensor in model.graph.initializer if tensor.name == name), None)
                # For example, the class token of a transformer.
                if weight is not None and [*weight.dims][:1] == [size]:
                    rows = rows or _rows(model, image)
                    shape, wide = _shape(model, rows, weight.dims[1:]), free_name(model, f"{name}_rows")
                    model.graph.node.insert(AFTER_SHAPES, make_node("Expand", [name, shape], [wide]))
                    node.input[position] = wide
    used = {name for node in operators(model) for name in node.input}
    used |= {output.name for graph in onnx_graph.graphs(model.graph) for output in graph.output}
    unused = {weight.name for weight in model.graph.initializer} - used
    for values in (model.graph.initializer, model.graph.input):  # older files also list weights as inputs
        left = [value for value in values if value.name not in unused]
        del values[:]
        values.extend(left)


def _small_constants(model: Any) -> dict[str, list[int]]:
    """Return the vectors of whole numbers in a graph, by name."""
    from onnx import TensorProto, numpy_helper

    tensors = {weight.name: weight for weight in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    return {
        name: numpy_helper.to_array(value).tolist()
        for name, value in tensors.items()
        if value.data_type == TensorProto.INT64 and len(value.dims) == 1 and not onnx_graph.is_external(value)
    }


def _rows(model: Any, image: str) -> str:
    """Add a tensor with the number of images; return its name."""
    shape, rows = free_name(model, "image_shape"), free_name(model, "image_rows")
    first = add_constant(model, "first_dim", [0])
    model.graph.node.insert(0, make_node("Shape", [image], [shape]))
    model.graph.node.insert(1, make_node("Gather", [shape, first], [rows]))
    return rows


def _shape(model: Any, rows: str, rest: Sequence[int]) -> str:
    """Add the shape [rows, *rest] as a tensor; return its name."""
    if not rest:
        return rows
    others, target = add_constant(model, "other_dims", rest), free_name(model, "batch_shape")
    model.graph.node.insert(2, make_node("Concat", [rows, others], [target], axis=0))
    return target


def fix_size(model: Any, size: tuple[int, int]) -> Iterator[str]:
    """Declare variable height and width of the image as `size`; zeros leave them variable."""
    images = inputs(model)
    if not any(size) or len(images) != 1 or len(dims(images[0])) != 4 or -1 not in dims(images[0])[1:]:
        return
    declared = images[0].type.tensor_type.shape.dim
    *axes, channels = (1, 2, 3) if dims(images[0])[3] in COLOURS else (2, 3, 1)
    for axis, side in zip(axes, size, strict=True):
        declared[axis].dim_value = side
    if dims(images[0])[channels] < 0:
        declared[channels].dim_value = COLOURS[-1]
    yield f"input '{images[0].name}' takes {size[0]} x {size[1]} pixels"


def to_fp32(model: Any, scores: Any) -> Iterator[str]:
    """Convert an output of another float datatype to FP32."""
    from onnx import TensorProto

    element = scores.type.tensor_type.elem_type
    if element not in (TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16):
        return
    before = take_name(model, scores.name, "uncast")
    model.graph.node.append(make_node("Cast", [before], [scores.name], to=TensorProto.FLOAT))
    scores.type.tensor_type.elem_type = TensorProto.FLOAT
    yield f"output '{scores.name}' is converted from {TensorProto.DataType.Name(element)} to FP32"


def take_name(model: Any, name: str, suffix: str) -> str:
    """Rename the inner tensor that has an output's name, so that another node can return the output."""
    inner = free_name(model, f"{name}_{suffix}")
    _redirect(model, name, inner)
    if name not in {image.name for image in inputs(model)}:  # it may be a weight
        for value in (*model.graph.initializer, *model.graph.input):
            value.name = inner if value.name == name else value.name
    for node in operators(model):
        node.output[:] = [inner if present == name else present for present in node.output]
    return inner


def _redirect(model: Any, old: str, new: str) -> None:
    for node in operators(model):
        node.input[:] = [new if name == old else name for name in node.input]


def operators(model: Any) -> Iterator[Any]:
    """Yield the operators of the graph and of its subgraphs; functions have names of their own."""
    for graph in onnx_graph.graphs(model.graph):
        yield from graph.node


def free_name(model: Any, preferred: str) -> str:
    """Return a name that no tensor has: the preferred one, or one with a number."""
    used = {name for node in operators(model) for name in (*node.input, *node.output)}
    used |= {value.name for value in (*model.graph.initializer, *model.graph.input)}
    numbered = (f"{preferred}_{number}" for number in count(2))
    return next(name for name in chain([preferred], numbered) if name not in used)


def fit_runtimes(model: Any) -> list[str]:
    """Sort a ModelProto, and lower its opset and IR version if that changes no operator; return the changes.

    A network that needs the newer operators is left unchanged, and the runtime check reports it.
    """
    from onnx import defs

    changes = ["its operators are sorted by dependency"] if onnx_graph.sort(model) else []
    runtimes = supported_runtimes()
    opset = min(runtime.opset for runtime in runtimes)
    current_opset = onnx_graph.opsets(model).get("", 0)
    if current_opset > opset:
        try:
            newest = max(
                defs.get_schema(node.op_type, current_opset, "").since_version
                for node in onnx_graph.nodes(model)
                if node.domain in ("", "ai.onnx")
            )
        except (defs.SchemaError, ValueError, TypeError):  # a version of more than 32 bits is a TypeError
            return changes
        if newest > opset:
            return changes
        changes.append(f"opset {current_opset} is written as {opset}, in which its operators are the same")
        for domain in model.opset_import:
            if domain.domain in ("", "ai.onnx"):
                domain.version = opset
    ir_version = min(runtime.ir_version for runtime in runtimes)
    if model.ir_version > ir_version:
        changes.append(f"IR version {model.ir_version} is written as {ir_version}")
        model.ir_version = ir_version
    return changes


def accept_colours(model: Any) -> Iterator[str]:
    """Convert colours to grey in front of a network with one channel."""
    from onnx import TensorProto

    images = inputs(model)
    if len(images) != 1 or len(shape := dims(images[0])) != 4 or GREY not in (shape[1], shape[3]):
        return
    image, is_channels_last = images[0], shape[1] != GREY
    channel = 3 if is_channels_last else 1
    input_name, element = image.name, image.type.tensor_type.elem_type
    grey, colours = free_name(model, f"{input_name}_grey"), free_name(model, f"{input_name}_colours")
    shape_of_luma = [1, 1, 1, RGB] if is_channels_last else [1, RGB, 1, 1]
    luma = add_constant(model, "luma", np.reshape(LUMA, shape_of_luma), np.float32)
    weighted, total = free_name(model, "luma_weighted"), free_name(model, "luma_sum")
    nodes = [
        make_node("Cast", [input_name], [colours], to=TensorProto.FLOAT),
        make_node("Mul", [colours, luma], [weighted]),
        with_axes(model, "ReduceSum", weighted, total, [channel], keepdims=1),
    ]
    if element == TensorProto.UINT8:
        rounded = free_name(model, "luma_rounded")
        nodes.append(make_node("Round", [total], [rounded]))
        total = rounded
    nodes.append(make_node("Cast", [total], [grey], to=element))
    _redirect(model, input_name, grey)
    for number, node in enumerate(nodes):
        model.graph.node.insert(number, node)
    image.type.tensor_type.shape.dim[channel].dim_value = RGB
    yield f"colours are converted to grey for input '{input_name}'"


def flatten(model: Any, scores: Any) -> Iterator[str]:
    """Remove dims of 1 beside the classes, as in [N,C,1,1] or [N,1,C]; rows such as boxes are not scores."""
    shape, declared = dims(scores), scores.type.tensor_type.shape.dim
    classes = [dim for dim in declared[1:] if dim.dim_value != 1]
    if len(shape) < 3 or len(classes) > 1:
        return
    before = take_name(model, scores.name, "unflattened")
    model.graph.node.append(make_node("Flatten", [before], [scores.name], axis=1))
    if classes:
        declared[1].CopyFrom(classes[0])
    del declared[2:]
    yield f"output '{scores.name}' is flattened from {shape} to {dims(scores)}"


def activate(model: Any, scores: Any, activation: Activation) -> Iterator[str]:
    """Append a function that turns scores into probabilities."""
    if activation == "none":
        return
    if activation == "normalize":
        yield from _normalize(model, scores)
        return
    before, name = scores.name, free_name(model, PROBABILITIES)
    axis: dict[str, Any] = {"axis": 1} if activation == "softmax" else {}
    model.graph.node.append(make_node(activation.capitalize(), [before], [name], **axis))
    scores.name = name
    yield f"a {activation} is appended to output '{before}', as '{name}'"


def _normalize(model: Any, vectors: Any) -> Iterator[str]:
    """Divide vectors by their lengths; CUDA has these operators, but not LpNormalization."""
    before, name = vectors.name, free_name(model, EMBEDDING)
    min_length = add_constant(model, f"{name}_least", SHORTEST, np.float32)
    length, divisor = (free_name(model, f"{name}_{word}") for word in ("length", "divisor"))
    model.graph.node.extend(
        (
            with_axes(model, "ReduceL2", before, length, [1], since=18, keepdims=1),
            make_node("Max", [length, min_length], [divisor]),
            make_node("Div", [before, divisor], [name]),
        )
    )
    vectors.name = name
    yield f"output '{before}' is scaled to the length 1, as '{name}'"


def rename(model: Any, scores: Any, names: Sequence[str]) -> Iterator[str]:
    """Rename the input and the scores, copying the tensor; a weight keeps its name."""
    nodes, (new_input, new_output) = model.graph.node, names
    image = inputs(model)[:1]
    if image and image[0].name != new_input and free_name(model, new_input) == new_input:
        yield f"input '{image[0].name}' is named '{new_input}'"
        nodes.insert(0, make_node("Identity", [new_input], [image[0].name]))
        image[0].name = new_input
    computed = {name for node in nodes for name in node.output}
    if scores.name != new_output and new_output in computed - {output.name for output in model.graph.output}:
        take_name(model, new_output, "inner")  # for example, logits before an appended softmax
    if scores.name != new_output and free_name(model, new_output) == new_output:
        yield f"output '{scores.name}' is named '{new_output}'"
        nodes.append(make_node("Identity", [scores.name], [new_output]))
        scores.name = new_output
