"""Reading ONNX files without running them, and their inputs and outputs compared with a config."""

import contextlib
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InvalidConfig
from nereid.repository import onnx_file, onnx_graph
from nereid.vision.inference.signature import NetworkTensor, Signature, complete, validate
from tests import networks
from tests.networks import DATATYPES, OPSET, identity, store, written
from tests.tables import cases, rows

WEIGHTS = np.arange(12, dtype=np.float32)
RUNTIMES = (onnx_file.Runtime("here", 26, 13), onnx_file.Runtime("there", 21, 10))


def weighted(**external: str | int) -> onnx.ModelProto:
    """Build `y = x + w`; `external` is the place of the 48 bytes of `w`."""
    model = written("(float[N,12] x) => (float[N,12] y) { y = Add(x, w) }", w=WEIGHTS)
    if external:
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, text in external.items():
            tensor.external_data.add(key=key, value=str(text))
    return model


def test_signature_is_the_one_that_onnx_runtime_sees(tmp_path):
    inputs = "float16[N,3,?] x, string[2] word, int64 one, float16[1] factor"
    nodes = "y = Mul(x, factor) said = Identity(word) same = Identity(one)"
    outputs = "float16[N,3,?] y, string[2] said, int64 same"
    model = written(f"({inputs}) => ({outputs}) {{ {nodes} }}", factor=np.ones(1, np.float16))
    path = store(tmp_path, "m", model, None)

    file = onnx_file.read(path)

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
    return written("(float[1] x) => (seq(float[]) y) { y = SequenceConstruct(x) }").SerializeToString()


NO_PLACE = "external tensor 'w' has no location of its values"


@cases(
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
    no_location=(weighted(length=48).SerializeToString(), NO_PLACE),
    offset_negative=(weighted(location="w", offset=-4).SerializeToString(), NO_PLACE),
)
def test_file_that_is_not_a_network_is_rejected(content, reason, tmp_path):
    if content is not None:
        (tmp_path / "model.onnx").write_bytes(content)

    with pytest.raises(onnx_file.InvalidOnnx, match=reason):
        onnx_file.read(tmp_path / "model.onnx")


def lead_out(folder: Path) -> None:
    (folder.parent / "elsewhere.bin").write_bytes(bytes(48))
    (folder / "w.bin").symlink_to(folder.parent / "elsewhere.bin")


def link_folder_out(folder: Path) -> None:
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "w.bin").write_bytes(bytes(48))
    (folder / "sub").symlink_to(folder.parent / "other")


def write(size: int):
    return lambda folder: (folder / "w.bin").write_bytes(bytes(size))


@cases(
    parent_folder=({"location": "../w.bin"}, write(48), "outside the network's folder; fix: "),
    absolute=({"location": "/etc/passwd"}, write(48), "outside the network's folder; fix: "),
    link_out=({"location": "w.bin"}, lead_out, "a link to '.*' outside the folder"),
    linked_folder=({"location": "sub/w.bin"}, link_folder_out, "a link to '.*' outside the folder"),
    long=({"location": "w" * 300}, write(48), "which cannot be read: File name too long"),
    nul=({"location": "w\0"}, write(48), r"'w': expected a file name for its values, got 'w\\x00'"),
    missing=({"location": "w.bin"}, lambda folder: None, "which is missing"),
    a_folder=({"location": "w.bin"}, lambda folder: (folder / "w.bin").mkdir(), "which is missing"),
    short=({"location": "w.bin", "length": 48}, write(47), "expected 48 bytes for tensor 'w', got 47"),
    short_of_offset=({"location": "w.bin", "offset": 16, "length": 48}, write(48), "expected 64 bytes"),
)
def test_external_data_is_next_to_the_network_and_complete(external, prepare, reason, tmp_path):
    path = store(tmp_path, "m", weighted(**external), None)
    prepare(path.parent)

    with pytest.raises(onnx_file.InvalidOnnx, match=reason):
        onnx_file.check_external_data(onnx_file.read(path))


def test_external_data_is_counted_once(tmp_path):
    path = store(tmp_path, "real", weighted(location="w.bin", offset=16, length=48), None)
    (path.parent / "values").write_bytes(bytes(64))
    (path.parent / "w.bin").symlink_to("values")
    (tmp_path / "m").symlink_to("real")

    assert onnx_file.check_external_data(onnx_file.read(tmp_path / "m" / "1" / "model.onnx")) == 64


@cases(
    opset_for_one=(22, 8, "opset at most 21 for there, got 22; fix: export it with opset 21$"),
    opset_for_both=(27, 8, "expected opset at most 26 for here, at most 21 for there, got 27"),
    both_too_new=(22, 11, "expected opset .*, got 22; .*; expected IR version .*, got 11; "),
    too_old=(6, 8, "expected opset 7 or later, got opset 6"),
    limits=(21, 10, ""),
)
def test_server_that_cannot_open_it_is_named(opset, ir_version, reason, tmp_path):
    model = weighted()
    model.opset_import[0].version, model.ir_version = opset, ir_version
    file = onnx_file.read(store(tmp_path, "m", model, None))

    with pytest.raises(onnx_file.InvalidOnnx, match=reason) if reason else contextlib.nullcontext():
        onnx_file.check_runtimes(file, RUNTIMES)


def opens(opset: int, ir_version: int) -> bool:
    model = written("(float[1] x) => (float[1] y) { y = Identity(x) }", opset, ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options)
    except Exception:
        return False
    return True


def test_table_is_right_for_the_installed_runtime():
    embedded, container = onnx_file.supported_runtimes()

    assert onnxruntime.__version__.split(".")[1] in embedded.name
    assert [opens(embedded.opset, 8), opens(embedded.opset + 1, 8)] == [True, False]
    assert [opens(OPSET, embedded.ir_version), opens(OPSET, embedded.ir_version + 1)] == [True, False]
    assert (container.opset, container.ir_version) == onnx_file.CAPABILITIES[28]


def test_domains_that_onnx_runtime_lacks_are_named(tmp_path):
    """Subgraphs belong to the network; the domains of ONNX Runtime and of the file's functions are known."""
    hidden = f"Constant <value = float[12] hidden {{ {', '.join(map(str, WEIGHTS))} }}> ()"
    branch = f"b () => (float[12] out) {{ inner = {hidden} out = com.example.Special (inner) }}"
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": {OPSET}, "com.example": 1, "com.microsoft": 1, "local": 1]>
        g (bool is_first) => (float[12] y) {{
            a = If (is_first) <then_branch = {branch}, else_branch = {branch}>
            b = com.microsoft.Gelu (a)
            y = local.Own (b)
        }}
        <domain: "local", opset_import: ["": {OPSET}]>
        Own (i) => (o) {{ o = Identity (i) }}""")

    assert onnx_file.read(store(tmp_path, "m", model, None)).custom_domains == ("com.example",)
    assert [tensor.name for tensor in onnx_graph.tensors(model)] == ["hidden", "hidden"]


BRANCH = "b () => (float[12] out) { inner = Add(w, x) out = Add(inner, before) }"


def backwards() -> onnx.ModelProto:
    model = weighted()
    del model.graph.node[:]
    nodes = onnx.parser.parse_graph(f"""g (float[12] x) => (float[12] y) {{
        before = Neg(x) is_first = Constant <value = bool {{1}}> ()
        y = If (is_first) <then_branch = {BRANCH}, else_branch = {BRANCH}> }}""").node
    for attribute in nodes[-1].attribute:
        attribute.g.node.reverse()
    model.graph.node.extend(reversed(nodes))
    return model


def test_operators_in_any_order_are_sorted(tmp_path):
    """ONNX Runtime does so too; the branches of an If also read tensors from outside."""
    model = backwards()
    onnx_file.check_with_onnx(store(tmp_path, "m", model, None))

    assert [onnx_graph.sort(model), onnx_graph.sort(model)] == [True, False]
    onnx.checker.check_model(model)
    x = np.float32([WEIGHTS])
    np.testing.assert_array_equal(networks.run(model.SerializeToString(), {"x": x})["y"], [WEIGHTS])


def tensor(name: str, datatype: str = "FP32", dims=(16,), **more) -> dict:
    return {"name": name, "data_type": f"TYPE_{datatype}", "dims": [*dims], **more}


def config(inputs=None, outputs=None, max_batch_size: int = 8, **document) -> ModelConfig:
    """Build the config of a model `m`; by default one of floats from `x` to `y`, in batches."""
    inputs = [tensor("x")] if inputs is None else inputs
    outputs = [tensor("y")] if outputs is None else outputs
    defaults = {"name": "m", "max_batch_size": max_batch_size, "input": inputs, "output": outputs}
    return ModelConfig.from_document(defaults | document, Path("/r/m"), 1)


def signature(inputs=None, outputs=None, initializers=None) -> Signature:
    """Build a network's signature from (element, shape) by name; by default that of `config()`."""
    inputs = {"x": ("float", (-1, 16))} if inputs is None else inputs
    outputs = {"y": ("float", (-1, 16))} if outputs is None else outputs
    tables = (inputs, outputs, initializers or {})
    return Signature(*({name: NetworkTensor(*pair) for name, pair in table.items()} for table in tables))


def start_control(key: str) -> dict:
    """Write the batching by sequences with a control whose values are those of `key`."""
    control = {"kind": "CONTROL_SEQUENCE_START", key: ["0", "1"]}
    return {"sequence_batching": {"control_input": [{"name": "START", "control": [control]}]}}


def session(model: ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_is_read(datatype):
    interface = Signature.of(session(identity(datatype, ["N", 3, None])))

    x, y = interface.inputs["x"], interface.outputs["y"]
    assert x == y
    assert (x.datatype, x.shape, x.can_batch) == (f"TYPE_{datatype}", (-1, 3, -1), True)


@rows(
    ("SEQUENCE", "y", "(float[N,3] x) => (seq(float[N,3]) y) { y = SequenceConstruct(x) }"),
    ("MAP", "m", "(map(int64, float[N,3]) m) => (float[1,N] y) { y = ai.onnx.ml.CastMap(m) }"),
)
def test_other_than_a_tensor_is_refused(kind, name, graph):
    opsets = f'opset_import: ["": {OPSET}, "ai.onnx.ml": 3]'
    message = f"^Unsupported ONNX Type 'ONNX_TYPE_{kind}' for I/O '{name}', expected 'ONNX_TYPE_TENSOR'\\.$"
    with pytest.raises(InvalidConfig, match=message):
        Signature.of(session(onnx.parser.parse_model(f"<ir_version: 8, {opsets}> raw {graph}")))


BATCHED = signature()
FIXED = signature({"x": ("float", (2, 16))}, {"y": ("int64", (2, -1))})
SCALAR = signature({"x": ("float", ())}, {"y": ("float", ())})
ROWS = signature({"x": ("float", (-1,))}, {"y": ("float", (-1,))})
MANY = signature({"z": ("bool", (-1, 1)), "a": ("float16", (-1, -1, 4))}, {"y": ("string", (-1, 2))})
WARNING = (
    "autofilled max_batch_size to 4 for model 'm' since batching is supporrted but no max_batch_size is "
    "specified in model configuration. Must specify max_batch_size to utilize autofill with a larger max "
    "batch size"
)


def both(datatype: str, dims: list[int], **more) -> dict:
    """Write the input `x` and the output `y` of the same form."""
    return {"input": [tensor("x", datatype, dims, **more)], "output": [tensor("y", datatype, dims, **more)]}


X, Y = {"input": [tensor("x", "FP32", [16])]}, {"output": [tensor("y", "FP32", [16])]}
SEQUENCES = {"sequence_batching": {"direct": {}}}
DYNAMIC = {"max_batch_size": 2, "dynamic_batching": {"preferred_batch_size": [2]}}


@cases(
    nothing_given=({}, BATCHED, 4, {"max_batch_size": 4, "dynamic_batching": {}, **X, **Y}, [WARNING]),
    default_of_0=({}, BATCHED, 0, both("FP32", [-1, 16]), [WARNING.replace("to 4", "to 0")]),
    batch_size_given=({"max_batch_size": 2}, BATCHED, 4, {"dynamic_batching": {}, **X, **Y}, []),
    batch_size_of_1_given=({"max_batch_size": 1}, BATCHED, 4, X | Y, []),
    sequence_batching_given=({"max_batch_size": 2} | SEQUENCES, BATCHED, 4, X | Y, []),
    inputs_given=(DYNAMIC | {"input": [tensor("mine", dims=(1,))]}, BATCHED, 4, Y, []),
    outputs_given=(DYNAMIC | {"output": [tensor("mine", dims=(1,))]}, BATCHED, 4, X, []),
    no_batches=({}, FIXED, 4, both("FP32", [2, 16]) | {"output": [tensor("y", "INT64", [2, -1])]}, []),
    scalars=({}, SCALAR, 4, both("FP32", [1]), []),
    rows_of_scalars=(DYNAMIC, ROWS, 4, both("FP32", [1], reshape={"shape": []}), []),
    many_sorted=(
        DYNAMIC,
        MANY,
        4,
        {
            "input": [tensor("a", "FP16", [-1, 4]), tensor("z", "BOOL", [1])],
            "output": [tensor("y", "STRING", [2])],
        },
        [],
    ),
)
def test_missing_fields_are_filled_in(fields, network_signature, default, added, warnings):
    document = {"name": "m", "max_batch_size": 0, **deepcopy(fields)}
    heard: list[str] = []

    complete(document, network_signature, default, heard.append)

    assert document == {"name": "m", "max_batch_size": 0, **fields, **added}
    assert heard == warnings


@cases(
    "network_signature",
    scalars=SCALAR,
    input_fixed=signature(inputs={"x": ("float", (2, 16))}),
    output_fixed=signature(outputs={"y": ("float", (16,))}),
)
def test_batches_without_a_batch_dimension_are_refused(network_signature):
    reason = "model does not support batching while non-zero max_batch_size is specified"

    with pytest.raises(InvalidConfig, match=f"^autofill failed for model 'm': {reason}$"):
        complete({"name": "m", "max_batch_size": 2}, network_signature, 4, pytest.fail)


RAGGED = tensor("x", dims=(-1,), allow_ragged_batch=True)
COUNT = {"kind": "BATCH_ELEMENT_COUNT", "target_name": ["n"], "source_input": ["x"]}
NO_BATCHES = signature({"x": ("float", (16,))}, {"y": ("float", (16,))})


def with_start(element: str, *shape: int) -> Signature:
    return signature({"x": ("float", (-1, 16)), "START": (element, shape)})


SCATTER = {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["y"], "source_input": ["x"]}
RESHAPED = [tensor("x", dims=(1,), reshape={})], [tensor("y", dims=(1,), reshape={})]


@cases(
    the_same=(config(), signature()),
    without_batches=(config(max_batch_size=0), NO_BATCHES),
    fixed_in_the_config_only=(config([tensor("x", dims=(5,))]), signature({"x": ("float", (-1, -1))})),
    output_not_in_the_config=(config(outputs=[]), signature()),
    reshape=(config([tensor("x", dims=(4, 4), reshape={"shape": ["16"]})]), signature()),
    reshape_to_rows_of_scalars=(config(*RESHAPED), ROWS),
    scalars_as_ones=(config([tensor("x", dims=(1,))], [tensor("y", dims=(1, 1))], 0), SCALAR),
    optional_weight=(
        config([tensor("x"), tensor("scale", dims=(1,), optional=True)], max_batch_size=0),
        replace(NO_BATCHES, initializers={"scale": NetworkTensor("float", (1,))}),
    ),
    ragged_and_batch_input=(
        config([RAGGED], batch_input=[COUNT]),
        signature({"x": ("float", (-1,)), "n": ("int32", (-1,))}),
    ),
    scattered_output=(
        config(outputs=[tensor("y", dims=(3, 3))], batch_output=[SCATTER]),
        signature(outputs={"y": ("float", (-1,))}),
    ),
    sequence_control=(config(**start_control("int32_false_true")), with_start("int32", -1, 1)),
)
def test_fitting_config_passes(model, network_signature):
    validate(model, network_signature)


NOT_ROWS = "for the model to support batching"
OPTIONAL = {name: tensor(name, optional=True) for name in "xw"}
STATE = {"state": [{"input_name": "x", "output_name": "y"}]}


# The decisive words of each check; tests/e2e/test_model_control.py has whole messages of NVIDIA's backend.
@cases(
    inputs=(config([tensor("x"), tensor("z")]), signature(), "expects 2 inputs, model provides 1"),
    no_initializer=(config([OPTIONAL["x"]], max_batch_size=0), NO_BATCHES, "expects 0 inputs, model"),
    unknown_input=(
        config([tensor("q")]),
        signature(initializers={"w": ("float", (1,))}),
        "input 'q', allowed inputs are: w, x",
    ),
    unknown_output=(config(outputs=[tensor("q")]), signature(), "output 'q', allowed outputs are: y"),
    outputs_type=(
        config(outputs=[tensor("y", "FP64")]),
        signature(outputs={"y": ("string", (-1, 16))}),
        "unable to load model 'm', configuration expects datatype TYPE_FP64 for output 'y', "
        "model provides TYPE_BYTES",
    ),
    Triton_lacks_it_in_the_file=(
        config([tensor("x", "BF16")]),
        signature({"x": ("bfloat16", (-1, 16))}),
        "input 'x': expected a datatype of Triton's ONNX Runtime backend, got TYPE_BFLOAT16 from the "
        "network; fix: convert it to FP32 in the network",
    ),
    Triton_lacks_it_in_the_config=(config([tensor("x", "BF16")]), signature(), "unsupported data"),
    optional_input_and_batches=(
        config([tensor("x"), OPTIONAL["w"]]),
        signature(initializers={"w": ("float", (16,))}),
        "optional input 'w' is not supported for models that support batching",
    ),
    input_without_batches=(config(), signature({"x": ("float", (1, 16))}), f"'x': {NOT_ROWS}"),
    output_without_batches=(config(), signature(outputs={"y": ("float", (16,))}), f"'y': {NOT_ROWS}"),
    rank_beyond_equal_dims=(config(), signature({"x": ("float", (-1, 16, 4))}), "shape [-1,16,4] of"),
    dim=(config([tensor("x", dims=(15,))]), signature(), "got [-1,15] from the config"),
    reshape=(
        config([tensor("x", dims=(16,), reshape={"shape": ["2", "8"]})]),
        signature(),
        "model 'm', tensor 'x': expected shape [-1,16] of the network, got [-1,2,8] from the config, the "
        "batch of max_batch_size included; fix: dims: [16]",
    ),
    varies_in_the_file_only=(config(), signature(outputs={"y": ("float", (-1, -1))}), "shape [-1,-1] "),
    varies_in_the_config_only=(config([tensor("x", dims=(-1,))]), signature(), "got [-1,-1] from the"),
    scalar=(
        config(outputs=[tensor("y", dims=(-1,))], max_batch_size=0),
        signature({"x": ("float", (16,))}, {"y": ("float", ())}),
        "scalar tensor 'y', should only provide 1 in the model configuration ",
    ),
    ragged_input=(config([RAGGED]), signature(), "ragged input 'x', model provides [-1,16]"),
    control_without_an_input=(
        config(**start_control("int32_false_true")),
        signature(),
        "configuration specified sequence control 'START', but model does not provide that input",
    ),
    dims_of_a_control=(
        config(**start_control("fp32_false_true")),
        with_start("float", -1, 2),
        "sequence control 'START' in model has dims [2] but dims [1] is expected",
    ),
    datatype_of_a_control=(
        config(**start_control("bool_false_true")),
        with_start("int64", -1, 1),
        "the model expects data-type INT64 but the model configuration specifies data-type TYPE_BOOL",
    ),
    implicit_state=(config(sequence_batching=STATE), signature(), "(sequence_batching.state) is not"),
)
def test_unfitting_config_is_refused(model, network_signature, message):
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        validate(model, network_signature)
