"""Real and small networks, and random changes of their structure: a seed and a number give a case again."""

import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper

from nereid.assets import TEXT_REPOSITORY
from nereid.repository import onnx_graph
from tests.detectors import CLASSES, HEADS, SIDE, TestDetector
from tests.recognisers import TestRecogniser
from tests.user_networks import UserNetwork

MAX_CHANGES = 4
# In the package `onnx`; the slow ones cost a second per run.
KINDS = ("light/*.onnx", "simple/*/model.onnx", "pytorch-operator/*/model.onnx")
SLOW = frozenset({"light_vgg19", "light_densenet121", "light_inception_v1", "light_inception_v2"})
ULTRALYTICS = {"task": "detect", "imgsz": f"[{SIDE}, {SIDE}]", "names": str(dict(enumerate(CLASSES)))}
NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 1000, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
NAMES = ("", "image", "x", "output", "a b", "a/b:0", "../x", "\0", "ä\n", "n" * 5000, "{}", "'", '"\\')
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.example", "ai.onnx.training")
OPERATORS = (
    "Identity",
    "Relu",
    "If",
    "Loop",
    "NonZero",
    "Softmax",
    "Nonsense",
    "Reshape",
    "Cast",
    "TreeEnsemble",
)
# Metadata of exporters, right and wrong.
KEYS = (
    "names",
    "task",
    "imgsz",
    "args",
    "end2end",
    "description",
    "character",
    "classes",
    "id2label",
    "mine",
)
TEXTS = (
    *("", "5", "[]", "{}", "None", "{0: 'a', 2: 'b'}", "['a', 1]", "[0, 0]", "[64, 64]", "[-1]", "[1e999]"),
    *(
        "{'nms': True}",
        "[[[",
        "[" * 20_000,
        "{0: '\\ud800', 1: 'b'}",
        "\\ud800",
        "detect",
        "classify",
        "pose",
    ),
    *(
        str(dict.fromkeys(range(5), "a")),
        "a\nb\nc",
        "\n\n",
        "9" * 5000,
        "{" + "'a':" * 200,
        "True",
        "\0",
        "1/0",
    ),
)
Change = Callable[[onnx.ModelProto, random.Random], None]


@cache
def bases(more: Path | None = None) -> Mapping[str, bytes]:
    """Return the networks to change by name: ours, those of the package `onnx`, and small ones of all tasks.

    Args:
        more: a folder with further ONNX files.
    """
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    paths = [TEXT_REPOSITORY / "text_direction" / "1" / "model.onnx"]
    paths += [path for kind in KINDS for path in sorted(data.glob(kind)) if path.stem not in SLOW]
    paths += sorted(more.glob("**/*.onnx")) if more else []
    found = {str(Path(*each.parts[-3:])): each.read_bytes() for each in paths}
    own = {}
    for head in HEADS:
        own[f"{head} detector"] = TestDetector(head).build()
        own[f"{head} detector with notes"] = noted = TestDetector(head, batch=1).build()
        helper.set_model_props(noted, ULTRALYTICS)
    for layout in ("NCHW", "NHWC"):
        for datatype in ("FP32", "FP16", "UINT8"):
            form = UserNetwork(layout=layout, datatype=datatype, batch=1, tail=layout == "NCHW")
            own[f"{layout} {datatype} classifier"] = form.build()
    own |= {"grey classifier": UserNetwork(channels=1).build(), "recogniser": TestRecogniser().build()}
    return found | {name: model.SerializeToString() for name, model in own.items()}


def mutated(draw: random.Random, known: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Return a name and the bytes of one of the known networks with some changes of its structure."""
    # Networks of single operators are refused for their inputs.
    weights = [1 if name.startswith(("simple", "pytorch")) else 16 for name in known]
    ((name, content),) = draw.choices(list(known.items()), weights)
    model, names = onnx.ModelProto.FromString(content), []
    for _ in range(min(draw.randint(1, MAX_CHANGES), draw.randint(1, MAX_CHANGES))):
        change = draw.choice(CHANGES)
        try:
            change(model, draw)
            names.append(change.__name__.strip("_"))
        except (
            IndexError,
            ValueError,
            TypeError,
        ):  # there is nothing of the kind to change, or no such value
            continue
    return f"{name}: {', '.join(names)}", model.SerializeToString()


def _value(model: onnx.ModelProto, draw: random.Random) -> Any:
    return draw.choice([*model.graph.input, *model.graph.output, *model.graph.value_info])


def _node(model: onnx.ModelProto, draw: random.Random) -> Any:
    return draw.choice([*onnx_graph.nodes(model)])


def _tensor(model: onnx.ModelProto, draw: random.Random) -> Any:
    return draw.choice([*onnx_graph.tensors(model)])


def _name(model: onnx.ModelProto, draw: random.Random) -> str:
    own: list[str] = [name for node in model.graph.node for name in (*node.input, *node.output)]
    return draw.choice([*NAMES, *own, *own])


def _import_opset(model: onnx.ModelProto, draw: random.Random) -> None:
    model.opset_import.add(domain=draw.choice(DOMAINS), version=draw.choice((*range(1, 30), *NUMBERS)))


def _drop_opset(model: onnx.ModelProto, draw: random.Random) -> None:
    del model.opset_import[draw.randrange(len(model.opset_import))]


def _set_version(model: onnx.ModelProto, draw: random.Random) -> None:
    model.ir_version = draw.choice((*range(1, 20), *NUMBERS))


def _drop_node(model: onnx.ModelProto, draw: random.Random) -> None:
    del model.graph.node[draw.randrange(len(model.graph.node))]


def _repeat_node(model: onnx.ModelProto, draw: random.Random) -> None:
    model.graph.node.append(draw.choice(model.graph.node))


def _shuffle_nodes(model: onnx.ModelProto, draw: random.Random) -> None:
    nodes = [*model.graph.node]
    draw.shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _replace_operator(model: onnx.ModelProto, draw: random.Random) -> None:
    node = _node(model, draw)
    node.op_type, node.domain = draw.choice((*OPERATORS, node.op_type)), draw.choice((*DOMAINS, "", ""))


def _rewire(model: onnx.ModelProto, draw: random.Random) -> None:
    """Rename an input or output of an operator, which may close a circle."""
    node = _node(model, draw)
    names = draw.choice((node.input, node.output))
    names[draw.randrange(len(names))] = _name(model, draw)


def _drop_edge(model: onnx.ModelProto, draw: random.Random) -> None:
    names = draw.choice((_node(model, draw).input, _node(model, draw).output))
    del names[draw.randrange(len(names))]


def _change_attribute(model: onnx.ModelProto, draw: random.Random) -> None:
    attributes = [each for node in onnx_graph.nodes(model) for each in node.attribute]
    attribute = draw.choice(attributes)
    if draw.random() < 0.2:
        attribute.type = draw.choice(range(15))
    elif attribute.ints and draw.random() < 0.8:
        attribute.ints[draw.randrange(len(attribute.ints))] = draw.choice(NUMBERS)
    elif attribute.ints:
        attribute.ints.append(draw.choice(NUMBERS))
    else:
        attribute.i, attribute.f = draw.choice(NUMBERS), draw.choice((0.0, -1.0, float("nan"), float("inf")))


def _change_numbers(model: onnx.ModelProto, draw: random.Random) -> None:
    """Write another number into a vector such as a shape, an axis or the bounds of a slice."""
    found = [*onnx_graph.tensors(model)]
    known = [
        each for each in found if each.data_type == TensorProto.INT64 and not onnx_graph.is_external(each)
    ]
    tensor = draw.choice(known)
    numbers = numpy_helper.to_array(tensor).copy()
    numbers.flat[draw.randrange(numbers.size)] = draw.choice(NUMBERS)
    tensor.raw_data = numbers.tobytes()


def _drop_attribute(model: onnx.ModelProto, draw: random.Random) -> None:
    attributes = _node(model, draw).attribute
    del attributes[draw.randrange(len(attributes))]


def _rename_value(model: onnx.ModelProto, draw: random.Random) -> None:
    _value(model, draw).name = _name(model, draw)


def _repeat_value(model: onnx.ModelProto, draw: random.Random) -> None:
    draw.choice((model.graph.input, model.graph.output)).append(_value(model, draw))


def _drop_value(model: onnx.ModelProto, draw: random.Random) -> None:
    values = draw.choice((model.graph.input, model.graph.output))
    del values[draw.randrange(len(values))]


def _change_element(model: onnx.ModelProto, draw: random.Random) -> None:
    """Declare BF16, FP8, strings or a type that does not exist."""
    _value(model, draw).type.tensor_type.elem_type = draw.choice((*range(30), -1, 99))


def _change_dims(model: onnx.ModelProto, draw: random.Random) -> None:
    dims = _value(model, draw).type.tensor_type.shape.dim
    if draw.random() < 0.3:
        dims.add().dim_value = draw.choice(NUMBERS)
    elif draw.random() < 0.3:
        del dims[draw.randrange(len(dims))]
    elif draw.random() < 0.5:
        dims[draw.randrange(len(dims))].dim_param = draw.choice(NAMES)
    else:
        dims[draw.randrange(len(dims))].dim_value = draw.choice(NUMBERS)


def _change_kind(model: onnx.ModelProto, draw: random.Random) -> None:
    """Declare a sequence, an optional, a map, a sparse tensor, or nothing."""
    kind = _value(model, draw).type
    tensor = copied(kind)
    getattr(kind, draw.choice(("sequence_type", "optional_type"))).elem_type.CopyFrom(tensor)
    if draw.random() < 0.3:
        kind.Clear()
    elif draw.random() < 0.3:
        kind.sparse_tensor_type.elem_type = TensorProto.FLOAT
    elif draw.random() < 0.3:
        kind.map_type.key_type = TensorProto.INT64


def copied(message: Any) -> Any:
    """Return a copy of a protobuf message."""
    made = type(message)()
    made.CopyFrom(message)
    return made


def _empty_tensor(model: onnx.ModelProto, draw: random.Random) -> None:
    tensor = _tensor(model, draw)
    for field in ("raw_data", "float_data", "int64_data"):
        tensor.ClearField(field)
    if draw.random() < 0.5:
        tensor.dims[draw.randrange(len(tensor.dims))] = 0


def _change_tensor(model: onnx.ModelProto, draw: random.Random) -> None:
    tensor = _tensor(model, draw)
    tensor.data_type = draw.choice((tensor.data_type, *range(28)))
    if tensor.dims and draw.random() < 0.7:
        tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice(NUMBERS)
    if tensor.raw_data and draw.random() < 0.3:
        tensor.raw_data = tensor.raw_data[: draw.randrange(len(tensor.raw_data))]


def _move_tensor(model: onnx.ModelProto, draw: random.Random) -> None:
    """Declare values in another file, which is missing, or is the network itself."""
    tensor = _tensor(model, draw)
    tensor.data_location = TensorProto.EXTERNAL
    place = draw.choice((*NAMES, "net.onnx", "weights.bin", "model.onnx", "..", "/etc/passwd"))
    tensor.external_data.add(key="location", value=place)
    for key in ("offset", "length"):
        if draw.random() < 0.6:
            tensor.external_data.add(key=key, value=str(draw.choice((*NUMBERS, "x", "", "1e3", "9" * 5000))))


def _drop_tensor(model: onnx.ModelProto, draw: random.Random) -> None:
    del model.graph.initializer[draw.randrange(len(model.graph.initializer))]


def _repeat_tensor(model: onnx.ModelProto, draw: random.Random) -> None:
    made = model.graph.initializer.add()
    made.CopyFrom(_tensor(model, draw))
    if draw.random() < 0.5:
        made.name = _name(model, draw)


def _list_tensor(model: onnx.ModelProto, draw: random.Random) -> None:
    """List an initializer as an input, as old files do, or make a sparse one."""
    tensor = _tensor(model, draw)
    if draw.random() < 0.2:
        model.graph.sparse_initializer.add().values.CopyFrom(tensor)
    model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type or 1, tensor.dims))


def _nest_graph(model: onnx.ModelProto, draw: random.Random) -> None:
    """Put the graph into a branch of an operator."""
    node = model.graph.node.add(op_type=draw.choice(("If", "Loop", "Scan")))
    node.input.append(_name(model, draw))
    node.output.append(_name(model, draw))
    name = draw.choice(("then_branch", "else_branch", "body"))
    node.attribute.append(helper.make_attribute(name, copied(model.graph)))


def _call_function(model: onnx.ModelProto, draw: random.Random) -> None:
    """Replace an operator by a function, which may call itself."""
    node = _node(model, draw)
    inner = node.op_type if draw.random() < 0.7 else "Mine"
    body = [helper.make_node(inner, [*node.input], [*node.output])]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    made = helper.make_function("mine", "Mine", [*node.input], [*node.output], body, opsets)
    model.functions.append(made)
    node.op_type, node.domain = "Mine", "mine"


def _note(model: onnx.ModelProto, draw: random.Random) -> None:
    model.metadata_props.add(key=draw.choice(KEYS), value=draw.choice(TEXTS))


CHANGES: tuple[Change, ...] = (
    *(_import_opset, _drop_opset, _set_version, _drop_node, _repeat_node, _shuffle_nodes, _replace_operator),
    *(
        _rewire,
        _drop_edge,
        _change_attribute,
        _change_attribute,
        _change_numbers,
        _change_numbers,
        _drop_attribute,
        _rename_value,
        _repeat_value,
        _drop_value,
    ),
    *(_change_element, _change_dims, _change_dims, _change_kind, _empty_tensor, _change_tensor, _move_tensor),
    *(_drop_tensor, _repeat_tensor, _list_tensor, _nest_graph, _call_function, _note, _note, _note, _note),
)
