"""Reading ONNX files without running them, and the messages for invalid ones."""

import contextlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from nereid.repository import onnx_graph
from nereid.repository.onnx_file import InvalidOnnx, check_external_data, read
from nereid.repository.onnx_runtimes import CAPABILITIES, Runtime, check_runtimes, supported_runtimes
from nereid.vision.inference.signature import NetworkTensor, Signature
from tests.networks import OPSET, constant, identity, network, value
from tests.tables import cases

WEIGHTS = np.arange(12, dtype=np.float32)
RUNTIMES = (Runtime("here", 26, 13), Runtime("there", 21, 10))


def save(folder: Path, model: onnx.ModelProto) -> Path:
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def weighted(**external: str | int) -> onnx.ModelProto:
    """Build `y = x + w`; `external` is the place of the 48 bytes of `w`."""
    model = network(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [value("x", "FP32", ["N", 12])],
        [value("y", "FP32", ["N", 12])],
        [constant("w", WEIGHTS)],
    )
    if external:
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, text in external.items():
            tensor.external_data.add(key=key, value=str(text))
    return model


def test_signature_is_the_one_that_onnx_runtime_sees(tmp_path):
    model = network(
        [
            helper.make_node("Mul", ["x", "factor"], ["y"]),
            helper.make_node("Identity", ["word"], ["said"]),
            helper.make_node("Identity", ["one"], ["same"]),
        ],
        [
            value("x", "FP16", ["N", 3, None]),
            value("word", "STRING", [2]),
            value("one", "INT64", []),
            value("factor", "FP16", [1]),
        ],
        [value("y", "FP16", ["N", 3, None]), value("said", "STRING", [2]), value("same", "INT64", [])],
        [constant("factor", np.ones(1, np.float16))],
    )
    path = save(tmp_path, model)

    file = read(path)

    assert file.signature == Signature.of(onnxruntime.InferenceSession(path))
    assert file.signature.initializers == {"factor": NetworkTensor("float16", (1,))}
    assert (file.opset, file.ir_version, file.custom_domains, file.external) == (OPSET, 8, (), ())


def garbled(model: onnx.ModelProto, name: str) -> bytes:
    """Write a network in which all names of one letter like this one are a byte that is not UTF-8."""
    content = model.SerializeToString()
    assert b"\x01" + name.encode() in content
    return content.replace(b"\x01" + name.encode(), b"\x01\xff")


def typed(input_element: int = 1, weight_element: int = 1, name: str = "x") -> bytes:
    model = weighted()
    model.graph.input[0].name = name
    model.graph.input[0].type.tensor_type.elem_type = input_element
    model.graph.initializer[0].data_type = weight_element
    return model.SerializeToString()


def weights(**fields) -> bytes:
    model = weighted()
    model.graph.initializer[0].MergeFrom(onnx.TensorProto(**fields))
    return model.SerializeToString()


def sequence() -> bytes:
    output = helper.make_tensor_sequence_value_info("y", onnx.TensorProto.FLOAT, None)
    node = helper.make_node("SequenceConstruct", ["x"], ["y"])
    return network([node], [value("x", "FP32", [1])], [output]).SerializeToString()


def external(**entries: str | int) -> bytes:
    return weighted(**entries).SerializeToString()


NO_PLACE = "external tensor 'w' has no location of its values"


@cases(
    ("content", "reason"),
    missing=(None, "No such file"),
    text=(b"oops\n", "expected an ONNX network, got a text file"),
    pointer=(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "LFS .* git lfs pull"),
    page=(b"\n<!DOCTYPE html>\n<html>", "got an HTML page .*; fix: download the file itself"),
    # Its end is read, too, but not all of it.
    torch=(b"PK\3\4" + bytes(2**18) + b"net/data.pkl" + bytes(9), "PyTorch .* with torch.onnx.export"),
    old_torch=(b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "PyTorch .* with torch.onnx.export"),
    saved_model=(b"\x08\1\x12\x99\x0fserving_default\0", "TensorFlow SavedModel .* with tf2onnx"),
    archive=(b"PK\3\4" + bytes(30) + b"net.onnx" + bytes(9), "an archive .*; fix: unpack it"),
    picture=(b"\x89PNG\r\n\x1a\n" + bytes(64), "expected an ONNX network, got an image"),
    truncated=(weighted().SerializeToString()[:-20], "a truncated or incomplete network"),
    cut_at_a_field=(b"\x08\x08\x12\x01p", "got a truncated or incomplete network"),
    element_type_of_weights=(typed(weight_element=126), "'w' .* unknown element type, 126"),
    element_type=(typed(99), "'x' of the network has an unknown element type, 99"),
    input_name=(garbled(weighted(), "x"), r"is damaged: expected a name in UTF-8, got b'\\xff'"),
    name_of_external=(garbled(weighted(location="w.bin"), "w"), "is damaged: expected a name"),
    no_name=(typed(name=""), "an input or output of the network: expected a name, got none"),
    few_values=(weights(raw_data=bytes(44)), r"is damaged: expected values for shape \[12\] of tensor 'w'"),
    huge_shape=(weights(dims=[2**40, 2**40]), "is damaged: expected values for shape"),
    sequence=(sequence(), "'y' of the network: expected a tensor, got sequence"),
    no_location=(external(length=48), NO_PLACE),
    offset_negative=(external(location="w", offset=-4), NO_PLACE),
)
def test_file_that_is_not_a_network_is_rejected(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "model.onnx").write_bytes(content)

    with pytest.raises(InvalidOnnx, match=reason):
        read(tmp_path / "model.onnx")


def lead_out(folder: Path) -> None:
    (folder.parent / "elsewhere.bin").write_bytes(bytes(48))
    (folder / "w.bin").symlink_to(folder.parent / "elsewhere.bin")


def link_folder_out(folder: Path) -> None:
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "w.bin").write_bytes(bytes(48))
    (folder / "sub").symlink_to(folder.parent / "other")


def write(size: int):
    return lambda folder: (folder / "w.bin").write_bytes(bytes(size))


MISPLACED = {
    "parent-folder": ({"location": "../w.bin"}, write(48), "outside the network's folder; fix: "),
    "absolute": ({"location": "/etc/passwd"}, write(48), "outside the network's folder; fix: "),
    "link-out": ({"location": "w.bin"}, lead_out, "a link to '.*' outside the folder"),
    "linked-folder": ({"location": "sub/w.bin"}, link_folder_out, "a link to '.*' outside the folder"),
    "long": ({"location": "w" * 300}, write(48), "which cannot be read: File name too long"),
    "nul": ({"location": "w\0"}, write(48), r"'w': expected a file name for its values, got 'w\\x00'"),
    "missing": ({"location": "w.bin"}, lambda folder: None, "which is missing"),
    "a-folder": ({"location": "w.bin"}, lambda folder: (folder / "w.bin").mkdir(), "which is missing"),
    "short": ({"location": "w.bin", "length": 48}, write(47), "expected 48 bytes for tensor 'w', got 47"),
    "short-of-offset": ({"location": "w.bin", "offset": 16, "length": 48}, write(48), "expected 64 bytes"),
}


@cases(("external", "prepare", "reason"), MISPLACED)
def test_external_data_is_next_to_the_network_and_complete(tmp_path, external, prepare, reason):
    path = save(tmp_path / "1", weighted(**external))
    prepare(path.parent)

    with pytest.raises(InvalidOnnx, match=reason):
        check_external_data(read(path))


def test_external_data_is_counted_once(tmp_path):
    path = save(tmp_path / "real", weighted(location="w.bin", offset=16, length=48))
    (path.parent / "values").write_bytes(bytes(64))
    (path.parent / "w.bin").symlink_to("values")
    (tmp_path / "1").symlink_to("real")

    assert check_external_data(read(tmp_path / "1" / "model.onnx")) == 64


@cases(
    ("opset", "ir_version", "reason"),
    opset_for_one=(22, 8, "opset at most 21 for there, got 22; fix: export it with opset 21$"),
    opset_for_both=(27, 8, "expected opset at most 26 for here, at most 21 for there, got 27"),
    both_too_new=(22, 11, "expected opset .*, got 22; .*; expected IR version .*, got 11; "),
    too_old=(6, 8, "expected opset 7 or later, got opset 6"),
    limits=(21, 10, ""),
)
def test_server_that_cannot_open_it_is_named(tmp_path, opset, ir_version, reason):
    model = weighted()
    model.opset_import[0].version, model.ir_version = opset, ir_version
    file = read(save(tmp_path, model))

    with pytest.raises(InvalidOnnx, match=reason) if reason else contextlib.nullcontext():
        check_runtimes(file, RUNTIMES)


def opens(opset: int, ir_version: int) -> bool:
    model = helper.make_model(
        identity("FP32", [1]).graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options)
    except Exception:
        return False
    return True


def test_table_is_right_for_the_installed_runtime():
    embedded, container = supported_runtimes()

    assert onnxruntime.__version__.split(".")[1] in embedded.name
    assert [opens(embedded.opset, 8), opens(embedded.opset + 1, 8)] == [True, False]
    assert [opens(OPSET, embedded.ir_version), opens(OPSET, embedded.ir_version + 1)] == [True, False]
    assert (container.opset, container.ir_version) == CAPABILITIES[28]


def test_domains_that_onnx_runtime_lacks_are_named(tmp_path):
    """Subgraphs belong to the network; the domains of ONNX Runtime and of the file's functions are known."""
    branch = helper.make_graph(
        [
            helper.make_node("Constant", [], ["inner"], value=constant("hidden", WEIGHTS)),
            helper.make_node("Special", ["inner"], ["out"], domain="com.example"),
        ],
        "branch",
        [],
        [value("out", "FP32", [12])],
    )
    nodes = [
        helper.make_node("If", ["is_first"], ["a"], then_branch=branch, else_branch=branch),
        helper.make_node("Gelu", ["a"], ["b"], domain="com.microsoft"),
        helper.make_node("Own", ["b"], ["y"], domain="local"),
    ]
    body = [helper.make_node("Identity", ["i"], ["o"])]
    opsets = [helper.make_opsetid(domain, 1) for domain in ("com.example", "com.microsoft", "local")]
    own = helper.make_function("local", "Own", ["i"], ["o"], body, [helper.make_opsetid("", OPSET)])
    graph = helper.make_graph(nodes, "g", [value("is_first", "BOOL", [])], [value("y", "FP32", [12])])
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET), *opsets], functions=[own], ir_version=8
    )

    assert read(save(tmp_path, model)).custom_domains == ("com.example",)
    assert [tensor.name for tensor in onnx_graph.tensors(model)] == ["hidden", "hidden"]
