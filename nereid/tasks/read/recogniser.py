"""Changes to a recogniser's ONNX file, so that it returns only the two best characters of each step.

PaddleOCR's recognisers return a probability for each of thousands of characters, [N, T, characters].
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nereid.base.errors import WrongUsage
from nereid.models.publish.importing.adaptation import Adapted, NetworkChoices, change_file, rename_file
from nereid.models.publish.importing.graph_edits import (
    Activation,
    add_constant,
    dims,
    fit_runtimes,
    free_batch,
    free_name,
    inputs,
    make_node,
    take_name,
    to_fp32,
    top_k,
)
from nereid.tasks.read import dictionary
from nereid.tasks.read.characters import KEY
from nereid.tasks.read.dictionary import Classes, characters_of
from nereid.tasks.read.reading_settings import TENSORS

# Names of the outputs for the best and the next class, and their datatypes: onnx.TensorProto.INT64 and FLOAT.
OUTPUTS, KINDS = (("index", "probability"), ("next_index", "next_probability")), (7, 1)
CHANNELS, HEIGHT_PX, _ = TENSORS["network"][0].dims
DEFAULTS = NetworkChoices()


def adapt_file(
    path: Path,
    choices: NetworkChoices = DEFAULTS,
    activation: Activation = "none",
    names: Sequence[str] | None = None,
) -> Adapted:
    """Change an ONNX file like `adapt`, so that both this machine's and the container's runtime can open it.

    `names` are the names of the input, index and probability; None keeps the file's.
    """

    def change(model: Any) -> tuple[tuple[str, Adapted], list[str]]:
        changes = fit_runtimes(model)
        result = adapt(model, choices, activation)
        return (inputs(model)[0].name, result), [*changes, *result.changes]

    (image, (outputs, _, notes)), changes = change_file(path, change)
    if names:
        if len(outputs) + 1 < len(names):
            raise WrongUsage(
                f"expected the outputs {', '.join(names[1:])} of the current version, got only the best "
                "class of each step; fix: export the network with all characters, [N,steps,characters]"
            )
        changes += rename_file(path, [image, *outputs][: len(names)], names)
        outputs = tuple(names[1:])
    return Adapted(outputs, changes, notes)


def adapt(model: Any, choices: NetworkChoices = DEFAULTS, activation: Activation = "none") -> Adapted:
    """Change a ModelProto in place so that it outputs the two best classes of each step.

    Args:
        model: takes lines float32[N, 3, 48, W] and returns [N, T, classes] or [T, N, classes], or already the
            best classes.
        choices: the output with the classes, and the characters for a file without its own. The blank is the
            first class; a space may be the last.
        activation: function that turns class values into probabilities.

    Raises:
        WrongUsage: the network is not a recogniser, or the numbers of characters and classes differ.
    """
    changes = [*_declare_input(model)]
    if best := _best_classes(model):
        if activation != "none":
            raise WrongUsage(
                f"cannot append a {activation}: the network returns only the best character of each step; "
                f"fix: --activation none if '{best[1].name}' has probabilities, or else export the network "
                "with all characters, [N,steps,characters]"
            )
        changes += free_batch(model)
        characters = _write_characters(model, choices, Classes(), changes)
        return Adapted(
            tuple(output.name for output in best), changes, dictionary.notes(characters, Classes())
        )
    scores = _classes(model, choices.output)
    changes += _put_lines_first(model, scores)
    classes = Classes(scores.name, max(0, dims(scores)[2]))
    characters = _write_characters(model, choices, classes, changes)
    changes += [*free_batch(model), *to_fp32(model, scores)]
    changes += _reduce(model, scores, activation)
    outputs = tuple(output.name for output in model.graph.output)
    return Adapted(outputs, changes, dictionary.notes(characters, classes))


def _declare_input(model: Any) -> Iterator[str]:
    """Declare [N, 3, 48, W]; a network that accepts other heights is still run with 48 pixels."""
    from onnx import TensorProto

    image, *others = inputs(model) or [None]
    shape = dims(image) if image is not None else []
    fits = len(shape) == 4 and shape[1] in (-1, CHANNELS) and shape[2] in (-1, HEIGHT_PX) and shape[3] == -1
    if image is None or others or not fits or image.type.tensor_type.elem_type != TensorProto.FLOAT:
        got = ", ".join(f"'{tensor.name}' {_describe(tensor)}" for tensor in inputs(model)) or "none"
        raise WrongUsage(
            f"expected one input for lines of text, FP32 [N,{CHANNELS},{HEIGHT_PX},width] with any width, "
            f"got {got}; fix: export the network with "
            + ("one FP32 input" if fits else f"a height of {HEIGHT_PX} and a variable width")
        )
    for axis, size in ((1, CHANNELS), (2, HEIGHT_PX)):
        if shape[axis] != size:
            image.type.tensor_type.shape.dim[axis].dim_value = size
            yield f"dim {axis} of input '{image.name}' is declared as {size}"


def _best_classes(model: Any) -> list[Any]:
    """Return index and probability [N, T] of the best and perhaps the next class; [] if outputs differ."""
    indices, probabilities = (
        [output for output in model.graph.output if output.type.tensor_type.elem_type == kind]
        for kind in KINDS
    )
    tensors = [tensor for pair in zip(indices, probabilities, strict=False) for tensor in pair]
    fits = len(tensors) == len(model.graph.output) <= 2 * len(OUTPUTS) and all(
        len(dims(tensor)) == 2 for tensor in tensors
    )
    return tensors if fits else []


def _classes(model: Any, output: str) -> Any:
    from onnx import TensorProto

    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
    matches = [tensor for tensor in model.graph.output if output in ("", tensor.name)]
    if len(matches) == 1 and len(dims(matches[0])) == 3 and matches[0].type.tensor_type.elem_type in floats:
        return matches[0]
    got = ", ".join(f"'{output.name}' {_describe(output)}" for output in model.graph.output)
    raise WrongUsage(
        f"expected one output with the probabilities of characters, FP32 [N,steps,characters], or INT64 and "
        f"FP32 [N,steps] of the best ones, got {got}; fix: name one with --output"
    )


def _put_lines_first(model: Any, scores: Any) -> Iterator[str]:
    """Transpose an output [T, N, classes], which recognisers outside Paddle return, if its shape shows it.

    An output whose shape does not show it fails in the examination.
    """
    batch, sizes = inputs(model)[0].type.tensor_type.shape.dim[0], scores.type.tensor_type.shape.dim
    steps, lines, _ = sizes
    if not batch.WhichOneof("value") or lines != batch or steps == batch:
        return
    before = take_name(model, scores.name, "steps_first")
    model.graph.node.append(make_node("Transpose", [before], [scores.name], perm=[1, 0, 2]))
    lines.CopyFrom(steps)
    steps.CopyFrom(batch)
    yield f"output '{scores.name}' [steps,N,characters] is transposed to [N,steps,characters]"


def _describe(tensor: Any) -> str:
    from onnx import TensorProto

    kind = TensorProto.DataType.Name(tensor.type.tensor_type.elem_type)
    return f"{kind} [{','.join(map(str, dims(tensor)))}]"


def _write_characters(
    model: Any, choices: NetworkChoices, classes: Classes, changes: list[str]
) -> tuple[str, ...]:
    """Write the characters to the metadata unless they are already there, and return them."""
    existing = characters_of(model)
    characters = dictionary.choose(existing, choices.labels, choices.labels_from, classes)
    if characters != existing:
        others = [entry for entry in model.metadata_props if entry.key != KEY]
        del model.metadata_props[:]
        model.metadata_props.extend(others)
        model.metadata_props.add(key=KEY, value="\n".join(characters))
        changes.append(f"{len(characters):,} characters are written to the metadata '{KEY}'")
    return characters


def _reduce(model: Any, scores: Any, activation: Activation) -> Iterator[str]:
    """Replace the output [N, T, classes] with the two best classes of each step and their probabilities."""
    from onnx import helper

    values, nodes = scores.name, []
    if activation != "none":
        name = free_name(model, f"{values}_{activation}")
        options: dict[str, Any] = {"axis": 2} if activation == "softmax" else {}
        nodes.append(helper.make_node(activation.capitalize(), [values], [name], **options))
        yield f"a {activation} is appended to output '{values}'"
        values = name
    top, top_index = (free_name(model, f"{values}_{name}") for name in ("top", "top_index"))
    nodes.append(top_k(model, values, [top, top_index], len(OUTPUTS)))
    batch, steps = (scores.type.tensor_type.shape.dim[axis].dim_param or None for axis in (0, 1))
    del model.graph.output[:]
    for rank, pair in enumerate(OUTPUTS):
        at = add_constant(model, f"rank_{rank}", rank)
        for preferred, source, kind in zip(pair, (top_index, top), KINDS, strict=True):
            name = free_name(model, preferred)
            nodes.append(helper.make_node("Gather", [source, at], [name], axis=2))
            model.graph.output.append(helper.make_tensor_value_info(name, kind, [batch, steps]))
    model.graph.node.extend(nodes)
    names = ", ".join(f"'{output.name}'" for output in model.graph.output)
    yield f"output '{scores.name}' is reduced to the two best classes of each step, {names}"
