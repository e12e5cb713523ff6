"""Changes of an ONNX file that make it a classifier of image batches: [N,3,H,W] in, FP32 [N,C] out.

`description` records the choices of a version. The next version gets the same, and so the same changes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nereid.errors import WrongUsage
from nereid.repository import onnx_graph
from nereid.repository.onnx_runtimes import Runtime, supported_runtimes

Activation = Literal["none", "softmax", "sigmoid"]
ActivationRule = Activation | Literal["auto"]
BATCH, PROBABILITIES = "N", "probabilities"
# ITU-R BT.601, as Pillow converts RGB to grey.
LUMA = (0.299, 0.587, 0.114)
GREY, RGB = 1, 3


class Choices(NamedTuple):
    """Choices about a network that its file does not contain.

    Args:
        output: the output with the scores; empty for the only one.
        activation: function to append, which turns the scores into probabilities.
        names: of the input and of the scores; None for those in the file.
    """

    output: str = ""
    activation: Activation = "none"
    names: tuple[str, str] | None = None


def adapt_file(path: Path, choices: Choices, like: tuple[str, str] | None = None) -> tuple[str, list[str]]:
    """Change an ONNX file so that this machine's and the container's runtimes open it as a classifier.

    Arguments, results and errors as `adapt`.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    changes = fit_runtimes(model, supported_runtimes())
    scores, more = adapt(model, choices)
    if changes or more:
        onnx.save(model, path)
    return scores, [*changes, *more]


def adapt(model: Any, choices: Choices) -> tuple[str, list[str]]:
    """Change a ModelProto in place; return the name of the scores, and a line for each change.

    A file that already fits stays as it is.

    Raises:
        WrongUsage: the network has several outputs, and no choice names one of them.
    """
    scores = _scores(model, choices.output)
    changes = [*_free_batch(model, scores), *_accept_colours(model)]
    changes += [*_flatten(model, scores), *_to_fp32(model, scores), *_activate(model, scores, choices)]
    if choices.names:
        changes += _rename(model, scores, choices.names)
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
    (standard,) = [each for each in model.opset_import if each.domain in ("", "ai.onnx")] or [None]
    if standard is not None and standard.version > opset:
        try:
            newest = max(
                defs.get_schema(node.op_type, standard.version, "").since_version
                for node in onnx_graph.nodes(model)
                if node.domain in ("", "ai.onnx")
            )
        except (defs.SchemaError, ValueError):
            return []
        if newest > opset:
            return []
        changes.append(f"opset {standard.version} is written as {opset}, in which its operators are the same")
        standard.version = opset
    ir_version = min(each.ir_version for each in runtimes)
    if model.ir_version > ir_version:
        changes.append(f"IR version {model.ir_version} is written as {ir_version}")
        model.ir_version = ir_version
    return changes


def fit_file(path: Path) -> list[str]:
    """Change an ONNX file as `fit_runtimes`."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    if changes := fit_runtimes(model, supported_runtimes()):
        onnx.save(model, path)
    return changes


def _inputs(model: Any) -> list[Any]:
    weights = {each.name for each in model.graph.initializer}
    return [each for each in model.graph.input if each.name not in weights]


def _dims(value: Any) -> list[int]:
    return [each.dim_value if each.HasField("dim_value") else -1 for each in value.type.tensor_type.shape.dim]


def _free_batch(model: Any, scores: Any) -> Iterator[str]:
    """Declare a fixed first dim of images and scores as variable."""
    from onnx import TensorProto, helper

    images = _inputs(model)
    sizes = {_dims(each)[0] for each in images if _dims(each)}
    if len(images) != 1 or sizes == {-1} or not sizes:
        return
    (size,) = sizes
    for value in (images[0], *model.graph.output):
        if _dims(value)[:1] == [size]:
            value.type.tensor_type.shape.dim[0].dim_param = BATCH
    # An operator inside may still have the fixed batch: the reshape hides it from the check of shapes.
    shape, rows, target = (_free_name(model, name) for name in ("image_shape", "image_rows", "scores_shape"))
    index, rest = _free_name(model, "first_dim"), _free_name(model, "other_dims")
    for name, number in ((index, 0), (rest, -1)):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [number]))
    before = _take_name(model, scores, "fixed")
    model.graph.node.extend(
        [
            helper.make_node("Shape", [images[0].name], [shape]),
            helper.make_node("Gather", [shape, index], [rows]),
            helper.make_node("Concat", [rows, rest], [target], axis=0),
            helper.make_node("Reshape", [before, target], [scores.name]),
        ]
    )
    del scores.type.tensor_type.shape.dim[2:]
    yield f"the batch of {size} is declared as variable"


def _accept_colours(model: Any) -> Iterator[str]:
    """Convert colours to grey in front of a network with one channel."""
    from onnx import TensorProto, helper

    (image, *others) = _inputs(model) or [None]
    shape = _dims(image) if image is not None else []
    if others or len(shape) != 4:
        return
    is_last = shape[3] == GREY and shape[1] != GREY
    if not is_last and shape[1] != GREY:
        return
    channel = 3 if is_last else 1
    given, element = image.name, image.type.tensor_type.elem_type
    grey, colours = _free_name(model, f"{given}_grey"), _free_name(model, f"{given}_colours")
    luma = _free_name(model, "luma")
    dims = [1, 1, 1, RGB] if is_last else [1, RGB, 1, 1]
    model.graph.initializer.append(helper.make_tensor(luma, TensorProto.FLOAT, dims, LUMA))
    axes = _free_name(model, "luma_axes")
    model.graph.initializer.append(helper.make_tensor(axes, TensorProto.INT64, [1], [channel]))
    weighted, total = _free_name(model, "luma_weighted"), _free_name(model, "luma_sum")
    nodes = [
        helper.make_node("Cast", [given], [colours], to=TensorProto.FLOAT),
        helper.make_node("Mul", [colours, luma], [weighted]),
        _reduce_sum(model, weighted, axes, channel, total),
    ]
    if element == TensorProto.UINT8:
        rounded = _free_name(model, "luma_rounded")
        nodes.append(helper.make_node("Round", [total], [rounded]))
        total = rounded
    nodes.append(helper.make_node("Cast", [total], [grey], to=element))
    for node in _graph_nodes(model):
        for position, name in enumerate(node.input):
            if name == given:
                node.input[position] = grey
    for number, node in enumerate(nodes):
        model.graph.node.insert(number, node)
    image.type.tensor_type.shape.dim[channel].dim_value = RGB
    yield f"colours are converted to grey for input '{given}'"


def _reduce_sum(model: Any, source: str, axes: str, channel: int, target: str) -> Any:
    from onnx import helper

    opset = max(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
    if opset >= 13:  # axes became an input
        return helper.make_node("ReduceSum", [source, axes], [target], keepdims=1)
    return helper.make_node("ReduceSum", [source], [target], axes=[channel], keepdims=1)


def _scores(model: Any, output: str) -> Any:
    found = [each for each in model.graph.output if output in ("", each.name)]
    if len(found) != 1:
        names = ", ".join(each.name for each in model.graph.output)
        got = f"'{output}', the network has: {names}" if output else names
        raise WrongUsage(f"expected one output with scores, got: {got}; fix: name one with --output")
    return found[0]


def _flatten(model: Any, scores: Any) -> Iterator[str]:
    """Remove dims of 1 behind the classes, such as [N,C,1,1]."""
    from onnx import helper

    shape = _dims(scores)
    if len(shape) < 3 or set(shape[2:]) != {1}:
        return
    before = _take_name(model, scores, "unflattened")
    model.graph.node.append(helper.make_node("Flatten", [before], [scores.name], axis=1))
    del scores.type.tensor_type.shape.dim[2:]
    yield f"output '{scores.name}' is flattened from {shape} to {shape[:2]}"


def _to_fp32(model: Any, scores: Any) -> Iterator[str]:
    from onnx import TensorProto, helper

    element = scores.type.tensor_type.elem_type
    if element not in (TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16):
        return
    before = _take_name(model, scores, "uncast")
    model.graph.node.append(helper.make_node("Cast", [before], [scores.name], to=TensorProto.FLOAT))
    scores.type.tensor_type.elem_type = TensorProto.FLOAT
    yield f"output '{scores.name}' is converted from {TensorProto.DataType.Name(element)} to FP32"


def _activate(model: Any, scores: Any, choices: Choices) -> Iterator[str]:
    from onnx import helper

    if choices.activation == "none":
        return
    before, name = scores.name, _free_name(model, PROBABILITIES)
    if choices.activation == "softmax":
        node = helper.make_node("Softmax", [before], [name], axis=1)
    else:
        node = helper.make_node("Sigmoid", [before], [name])
    model.graph.node.append(node)
    scores.name = name
    yield f"a {choices.activation} is appended to output '{before}', as '{name}'"


def _rename(model: Any, scores: Any, names: tuple[str, str]) -> Iterator[str]:
    """Give the input and the scores other names, with a copy of the tensor; used names stay as they are."""
    from onnx import helper

    image, wanted = _inputs(model)[:1], names[0]
    if image and image[0].name != wanted and _free_name(model, wanted) == wanted:
        yield f"input '{image[0].name}' is named '{wanted}'"
        model.graph.node.insert(0, helper.make_node("Identity", [wanted], [image[0].name]))
        image[0].name = wanted
    wanted = names[1]
    if scores.name != wanted and _free_name(model, wanted) == wanted:
        yield f"output '{scores.name}' is named '{wanted}'"
        model.graph.node.append(helper.make_node("Identity", [scores.name], [wanted]))
        scores.name = wanted


def _take_name(model: Any, output: Any, suffix: str) -> str:
    """Rename the inner tensor of an output, so that another node can return the output."""
    inner = _free_name(model, f"{output.name}_{suffix}")
    for node in _graph_nodes(model):
        for names in (node.input, node.output):
            for position, name in enumerate(names):
                if name == output.name:
                    names[position] = inner
    return inner


def _graph_nodes(model: Any) -> Iterator[Any]:
    """Yield the operators of the graph and of its subgraphs; functions have names of their own."""
    for graph in onnx_graph.graphs(model.graph):
        yield from graph.node


def _free_name(model: Any, wanted: str) -> str:
    used = {each for node in _graph_nodes(model) for each in (*node.input, *node.output)}
    used |= {each.name for each in (*model.graph.initializer, *model.graph.input)}
    number, name = 1, wanted
    while name in used:
        number += 1
        name = f"{wanted}_{number}"
    return name
