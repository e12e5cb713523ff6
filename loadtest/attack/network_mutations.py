"""Real and small networks, and random changes of their structure: a seed and a number give a case again.

A change takes any message of a network and any of its fields: it drops, repeats or moves what is there, or
writes a value from another network or one at an edge. It knows protobuf, and nothing about ONNX.
"""

import random
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from onnx import TensorProto, helper

from nereid.base.assets import TEXT_REPOSITORY
from tests.detectors import CLASSES, HEADS, SIDE, TestDetector
from tests.embedders import UNIT, convolutional
from tests.recognisers import TestRecogniser
from tests.user_networks import UserNetwork

MAX_CHANGES, RARE = 4, "rare classifier"
# In the package `onnx`; the slow ones cost a second per run.
KINDS = ("light/*.onnx", "simple/*/model.onnx", "pytorch-operator/*/model.onnx")
SLOW = frozenset({"light_vgg19", "light_densenet121", "light_inception_v1", "light_inception_v2"})
ULTRALYTICS = {"task": "detect", "imgsz": f"[{SIDE}, {SIDE}]", "names": str(dict(enumerate(CLASSES)))}
SMALL, LARGE = range(30), (-(2**63), -(2**31), -1, 0, 1, 1000, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
FLOATS = (0.0, -1.0, float("nan"), float("inf"))
NAMES = ("", "image", "x", "output", "a b", "a/b:0", "../x", "\0", "ä\n", "n" * 5000, "{}", "'", '"\\')
# Metadata of exporters, right and wrong.
KEYS = ("names", "task", "imgsz", "args", "end2end", "description", "character", "classes", "id2label")
TEXTS = (
    *("", "5", "[]", "{}", "None", "{0: 'a', 2: 'b'}", "['a', 1]", "[0, 0]", "[64, 64]", "[-1]", "[1e999]"),
    *("{'nms': True}", "[[[", "[" * 20_000, "{0: '\\ud800', 1: 'b'}", "\\ud800", "detect", "classify"),
    *("pose", str(dict.fromkeys(range(5), "a")), "a\nb\nc", "\n\n", "9" * 5000, "{" + "'a':" * 200, "True"),
    *("\0", "1/0", "-1", "4096", "weights.bin", "model.onnx", "../x", "/etc/passwd"),
)
STRINGS = {"key": (*KEYS, "location", "offset", "length"), "value": TEXTS}


@cache
def bases() -> Mapping[str, bytes]:
    """Return the networks to change by name: ours, those of the package `onnx`, and small ones."""
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    paths = [TEXT_REPOSITORY / "text_direction" / "1" / "model.onnx"]
    paths += [path for kind in KINDS for path in sorted(data.glob(kind)) if path.stem not in SLOW]
    files = {str(Path(*path.parts[-3:])): path.read_bytes() for path in paths}
    models = {RARE: _rare()}
    for head in HEADS:
        models[f"{head} detector"] = TestDetector(head).build()
        models[f"{head} detector with notes"] = noted = TestDetector(head, batch=1).build()
        helper.set_model_props(noted, ULTRALYTICS)
    for layout in ("NCHW", "NHWC"):
        for datatype in ("FP32", "FP16", "UINT8"):
            form = UserNetwork(layout=layout, datatype=datatype, batch=1, tail=layout == "NCHW")
            models[f"{layout} {datatype} classifier"] = form.build()
    models |= {"grey classifier": UserNetwork(channels=1).build(), "recogniser": TestRecogniser().build()}
    models |= {f"{name} embedder": convolutional(tail) for name, tail in UNIT.items()}
    return files | {name: model.SerializeToString() for name, model in models.items()}


def _rare() -> onnx.ModelProto:
    """Build a classifier that also has what few files have, for itself and others to take."""
    model = UserNetwork().build()
    tensor = model.graph.initializer.add(name="external", data_type=TensorProto.FLOAT, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "net.onnx", "offset": "0", "length": "8"}.items():
        tensor.external_data.add(key=key, value=value)
    model.graph.sparse_initializer.add().values.CopyFrom(model.graph.initializer[0])
    kind = model.graph.value_info.add(name="sequence").type
    kind.sequence_type.elem_type.CopyFrom(model.graph.input[0].type)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    body = [helper.make_node("Identity", ["a"], ["b"])]
    model.functions.append(helper.make_function("mine", "Mine", ["a"], ["b"], body, opsets))
    return model


def mutated(draw: random.Random, known: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Return a name and the bytes of one of the known networks with some changes of its structure."""
    # Networks of single operators are refused for their inputs.
    weights = [1 if name.startswith(("simple", "pytorch")) else 64 if name == RARE else 16 for name in known]
    ((name, content),) = draw.choices(list(known.items()), weights)
    model, other, names = onnx.ModelProto(), onnx.ModelProto(), []
    model.ParseFromString(content)
    # Mostly its own parts: those of another network seldom fit.
    others = content, bases()[RARE], draw.choice([*bases().values()])
    other.ParseFromString(*draw.choices(others, (6, 2, 2)))
    for _ in range(min(draw.randint(1, MAX_CHANGES), draw.randint(1, MAX_CHANGES))):
        try:
            names.append(_change(_drawn(model, draw), other, draw))
        except (IndexError, ValueError, TypeError):  # there is none of the kind, or it has no such value
            continue
    return f"{name}: {', '.join(names)}", model.SerializeToString()


def _messages(message: Any) -> Iterator[Any]:
    """Yield a message and all below it."""
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in value if field.is_repeated else [value]:
                yield from _messages(part)


def _drawn(model: Any, draw: random.Random) -> Any:
    """Draw a message: each type is as likely as any other, because most messages are operators or sizes."""
    by_type: dict[str, list[Any]] = {}
    for part in _messages(model):
        by_type.setdefault(part.DESCRIPTOR.full_name, []).append(part)
    return draw.choice(draw.choice([*by_type.values()]))


def _change(message: Any, other: Any, draw: random.Random) -> str:
    """Change a field of a message, and return the name of the change."""
    present = [field for field, _ in message.ListFields()]
    field = draw.choice(present if present and draw.random() < 0.8 else message.DESCRIPTOR.fields)
    field_name, value = f"{message.DESCRIPTOR.name}.{field.name}", getattr(message, field.name)
    if not field.is_repeated:
        if field in present and draw.random() < 0.1:
            message.ClearField(field.name)
            return f"drop {field_name}"
        drawn = _value(field, value, other, draw)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            value.CopyFrom(drawn)
        else:
            setattr(message, field.name, drawn)
        return f"set {field_name}"
    elements, index = [*value], draw.randrange(len(value) + 1)
    how = draw.choice(("drop", "repeat", "shuffle", "set", "set") if elements else ("set",))
    if how == "drop":
        del elements[index % len(elements)]
    elif how == "repeat":
        elements.insert(index, draw.choice(elements))
    elif how == "shuffle":
        draw.shuffle(elements)
    else:
        before = elements[index] if index < len(elements) else None
        elements[index : index + 1] = [_value(field, before, other, draw)]
    # Messages are copied, because a cleared field owns none.
    copies = [_copied(element) for element in elements]
    message.ClearField(field.name)
    getattr(message, field.name).extend(copies)
    return f"{how} {field_name}"


def _value(field: FieldDescriptor, before: Any, other: Any, draw: random.Random) -> Any:
    """Draw a value of a field: one of another network, or one at an edge."""
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        kind = field.message_type.full_name
        return _copied(draw.choice([part for part in _messages(other) if part.DESCRIPTOR.full_name == kind]))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes(bytes(before or b""), draw)
    if field.type == FieldDescriptor.TYPE_STRING:
        # Names are in fields of several kinds, and refer to each other.
        same = [text for message in _messages(other) for text in _strings(message, field)]
        return draw.choice(same if same and draw.random() < 0.6 else STRINGS.get(field.name, NAMES))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return draw.choice(FLOATS)
    return draw.choice((*SMALL, *LARGE))


def _strings(message: Any, target: FieldDescriptor) -> Iterator[str]:
    """Yield the strings of a message that may be in a field: of this name, or names of values."""
    edges = ("input", "output", "name")
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING and (
            field.name == target.name or (field.name in edges and target.name in edges)
        ):
            yield from value if field.is_repeated else [value]


def _bytes(before: bytes, draw: random.Random) -> bytes:
    """Cut bytes off, or write a number over eight of them: shapes and axes are vectors of INT64."""
    if len(before) < 8 or draw.random() < 0.2:
        return before[: draw.randrange(len(before) + 1)]
    start = 8 * draw.randrange(len(before) // 8)
    return before[:start] + struct.pack("<q", draw.choice(LARGE)) + before[start + 8 :]


def _copied(value: Any) -> Any:
    """Return a copy of a message; other values have none."""
    if not hasattr(value, "CopyFrom"):
        return value
    made = type(value)()
    made.CopyFrom(value)
    return made
