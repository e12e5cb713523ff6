"""Inputs and outputs of a network compared with its config: NVIDIA's rules and messages."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper

from nereid.base.config.model_config import ModelConfig
from nereid.base.serving_errors import InvalidConfig
from nereid.vision.inference.signature import NetworkTensor, Signature, complete, validate
from tests.networks import DATATYPES, OPSET, identity, value
from tests.tables import cases

FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, ["N", 3])


def tensor(name: str, datatype: str = "FP32", dims=(16,), **more) -> dict:
    return {"name": name, "data_type": f"TYPE_{datatype}", "dims": [str(dim) for dim in dims], **more}


def config(inputs=None, outputs=None, max_batch_size: int = 8, **document) -> ModelConfig:
    """Build the config of a model `m`; by default one of floats from `x` to `y`, in batches."""
    inputs = [tensor("x")] if inputs is None else inputs
    outputs = [tensor("y")] if outputs is None else outputs
    return ModelConfig.from_document(
        {"name": "m", "max_batch_size": max_batch_size, "input": inputs, "output": outputs, **document},
        Path("/r/m"),
        1,
    )


def signature(inputs=None, outputs=None, initializers=None) -> Signature:
    """Build a network's signature from (element, shape) by name; by default that of `config()`."""
    return Signature(
        *(
            {name: NetworkTensor(*each) for name, each in tensors.items()}
            for tensors in (
                {"x": ("float", (-1, 16))} if inputs is None else inputs,
                {"y": ("float", (-1, 16))} if outputs is None else outputs,
                initializers or {},
            )
        )
    )


def start_control(key: str) -> dict:
    """Write the batching by sequences with a control whose values are those of `key`."""
    given = {"kind": "CONTROL_SEQUENCE_START", key: ["0", "1"]}
    return {"sequence_batching": {"control_input": [{"name": "START", "control": [given]}]}}


def session(model: ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_is_read(datatype):
    found = Signature.of(session(identity(datatype, ["N", 3, None])))

    x, y = found.inputs["x"], found.outputs["y"]
    assert x == y
    assert (x.datatype, x.shape, x.can_batch) == (f"TYPE_{datatype}", (-1, 3, -1), True)


@pytest.mark.parametrize(("kind", "name"), [("SEQUENCE", "y"), ("MAP", "m")])
def test_other_than_a_tensor_is_refused(kind, name):
    if kind == "SEQUENCE":
        node, x = helper.make_node("SequenceConstruct", ["x"], ["y"]), value("x", "FP32", ["N", 3])
        y = helper.make_value_info("y", helper.make_sequence_type_proto(FLOATS))
    else:
        node = helper.make_node("CastMap", ["m"], ["y"], domain="ai.onnx.ml", cast_to="TO_FLOAT")
        x = helper.make_value_info("m", helper.make_map_type_proto(TensorProto.INT64, FLOATS))
        y = value("y", "FP32", [1, "N"])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(helper.make_graph([node], "raw", [x], [y]), opset_imports=opsets, ir_version=8)

    with pytest.raises(InvalidConfig) as raised:
        Signature.of(session(model))

    assert str(raised.value) == (
        f"Unsupported ONNX Type 'ONNX_TYPE_{kind}' for I/O '{name}', expected 'ONNX_TYPE_TENSOR'."
    )


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


def entry(name: str, datatype: str, dims: list[int], **more) -> dict:
    return {"name": name, "data_type": f"TYPE_{datatype}", "dims": dims, **more}


def both(datatype: str, dims: list[int], **more) -> dict:
    """Write the input `x` and the output `y` of the same form."""
    return {"input": [entry("x", datatype, dims, **more)], "output": [entry("y", datatype, dims, **more)]}


X, Y = {"input": [entry("x", "FP32", [16])]}, {"output": [entry("y", "FP32", [16])]}
DYNAMIC = {"max_batch_size": 2, "dynamic_batching": {"preferred_batch_size": [2]}}
SEQUENCES = {"sequence_batching": {"direct": {}}}


@cases(
    ("given", "network_signature", "default", "added", "warnings"),
    nothing_given=({}, BATCHED, 4, {"max_batch_size": 4, "dynamic_batching": {}, **X, **Y}, [WARNING]),
    default_of_0=({}, BATCHED, 0, both("FP32", [-1, 16]), [WARNING.replace("to 4", "to 0")]),
    batch_size_given=({"max_batch_size": 2}, BATCHED, 4, {"dynamic_batching": {}, **X, **Y}, []),
    batch_size_of_1_given=({"max_batch_size": 1}, BATCHED, 4, X | Y, []),
    sequence_batching_given=({"max_batch_size": 2} | SEQUENCES, BATCHED, 4, X | Y, []),
    inputs_given=(DYNAMIC | {"input": [tensor("mine", dims=(1,))]}, BATCHED, 4, Y, []),
    outputs_given=(DYNAMIC | {"output": [tensor("mine", dims=(1,))]}, BATCHED, 4, X, []),
    no_batches=(
        {},
        FIXED,
        4,
        {"input": [entry("x", "FP32", [2, 16])], "output": [entry("y", "INT64", [2, -1])]},
        [],
    ),
    scalars=({}, SCALAR, 4, both("FP32", [1]), []),
    rows_of_scalars=(DYNAMIC, ROWS, 4, both("FP32", [1], reshape={"shape": []}), []),
    many_sorted=(
        DYNAMIC,
        MANY,
        4,
        {
            "input": [entry("a", "FP16", [-1, 4]), entry("z", "BOOL", [1])],
            "output": [entry("y", "STRING", [2])],
        },
        [],
    ),
)
def test_missing_fields_are_filled_in(given, network_signature, default, added, warnings):
    document = {"name": "m", "max_batch_size": 0, **deepcopy(given)}
    heard: list[str] = []

    complete(document, network_signature, default, heard.append)

    assert document == {"name": "m", "max_batch_size": 0, **given, **added}
    assert heard == warnings


@cases(
    "network_signature",
    scalars=SCALAR,
    input_fixed=signature(inputs={"x": ("float", (2, 16))}),
    output_fixed=signature(outputs={"y": ("float", (16,))}),
)
def test_batches_without_a_batch_dimension_are_refused(network_signature):
    document = {"name": "m", "max_batch_size": 2}

    with pytest.raises(InvalidConfig) as raised:
        complete(document, network_signature, 4, pytest.fail)

    assert str(raised.value) == (
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is "
        "specified"
    )


RAGGED = tensor("x", dims=(-1,), allow_ragged_batch=True)
COUNT = {"kind": "BATCH_ELEMENT_COUNT", "target_name": ["n"], "source_input": ["x"]}
NO_BATCHES = signature({"x": ("float", (16,))}, {"y": ("float", (16,))})


def with_start(element: str, *shape: int) -> Signature:
    return signature({"x": ("float", (-1, 16)), "START": (element, shape)})


ROWS_OF_ONE = {"x": ("float", (-1,))}, {"y": ("float", (-1,))}
SCATTER = {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["y"], "source_input": ["x"]}
RESHAPED = [tensor("x", dims=(1,), reshape={})], [tensor("y", dims=(1,), reshape={})]


@cases(
    ("model", "network_signature"),
    the_same=(config(), signature()),
    without_batches=(config(max_batch_size=0), NO_BATCHES),
    fixed_in_the_config_only=(config([tensor("x", dims=(5,))]), signature({"x": ("float", (-1, -1))})),
    output_not_in_the_config=(config(outputs=[]), signature()),
    reshape=(config([tensor("x", dims=(4, 4), reshape={"shape": ["16"]})]), signature()),
    reshape_to_rows_of_scalars=(config(*RESHAPED), signature(*ROWS_OF_ONE)),
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
BF16 = signature({"x": ("bfloat16", (-1, 16))})
STATE = {"state": [{"input_name": "x", "output_name": "y"}]}


# The decisive words of each check; tests/e2e/test_onnxruntime_load.py has whole messages of NVIDIA's backend.
@cases(
    ("model", "network_signature", "message"),
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
        BF16,
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
    with pytest.raises(InvalidConfig) as raised:
        validate(model, network_signature)

    assert message in str(raised.value)
