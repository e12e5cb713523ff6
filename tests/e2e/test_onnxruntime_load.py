"""Loading ONNX models into the real server: refusals in NVIDIA's words, and configs that are completed.

Each part that can refuse or complete a config has one case; tests/unit/test_signature.py and
tests/unit/test_session_options.py have all.
"""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from tests.networks import (
    DATATYPES,
    ONE_INSTANCE,
    Dims,
    assert_same,
    connect,
    identity,
    infer,
    network,
    serve,
    store,
    tensor,
    value,
)
from tests.routes import wait_until
from tests.tables import cases

HAS_GPU = Path("/proc/driver/nvidia/version").exists()


def pair(datatype: str, dims: Dims) -> str:
    return tensor("input", "x", datatype, dims) + tensor("output", "y", datatype, dims)


def listing() -> onnx.ModelProto:
    return network(
        [helper.make_node("SequenceConstruct", ["x"], ["y"])],
        [value("x", "FP32", [2])],
        [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, [2])],
    )


def with_bias() -> onnx.ModelProto:
    """Build y = x + bias, where only `x` has a batch dimension."""
    return network(
        [helper.make_node("Sum", ["x", "bias"], ["y"])],
        [value("x", "FP32", ["batch", 4]), value("bias", "FP32", [4])],
        [value("y", "FP32", ["batch", 4])],
    )


def parameters(**given: str) -> str:
    rows = (f'{{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in given.items())
    return "".join(f"parameters {row}\n" for row in rows)


ROWS = identity("FP32", ["batch", 4])
BATCHED = "max_batch_size: 4\n" + pair("FP32", [4])
EVERY = network(
    [helper.make_node("Identity", [word], [f"of_{word}"]) for word in DATATYPES],
    [value(word, word, ["batch", 2]) for word in DATATYPES],
    [value(f"of_{word}", word, ["batch", 2]) for word in DATATYPES],
)
GPU_ONLY = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }\n'
LENIENT = parameters(
    intra_op_thread_count="1abc",
    execution_mode="1",
    enable_mem_arena="ON",
    cudnn_conv_algo_search="9",
    no="x",
)


@pytest.fixture(scope="module")
def log() -> list[str]:
    return []


@pytest.fixture(scope="module")
def server(tmp_path_factory, log):
    with serve(tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("run"), log=log.append) as running:
        yield running


def load(server, name: str, model: onnx.ModelProto, config: str | None) -> model_config_pb2.ModelConfig:
    store(server.options.repository, name, model, config and ONE_INSTANCE + config)
    with connect(server) as client:
        client.load_model(name)
        return client.get_model_config(name).config


def check_refused(server, log: list[str], name: str, message: str) -> None:
    """Load a stored model; client and log must have the reason, in the log as its first line."""
    with connect(server) as client, pytest.raises(InferenceServerException) as refused:
        client.load_model(name)

    pattern = rf"failed to load '{name}' version 1: (.*?)(\\n|\"?$)"
    assert message in refused.value.message()
    found = wait_until(lambda: [each[1] for line in [*log] if (each := re.search(pattern, line))], "the log")
    assert message in found[0].replace('\\"', '"')


@cases(
    ("model", "config", "message"),
    {
        # NVIDIA's backend prints the datatype of the wire behind TYPE_.
        "datatype": (
            identity("STRING", ["batch", 4]),
            BATCHED,
            "unable to load model 'datatype', configuration expects datatype TYPE_FP32 for input 'x', model "
            "provides TYPE_BYTES",
        ),
        "listing": (
            listing(),
            None,
            "Unsupported ONNX Type 'ONNX_TYPE_SEQUENCE' for I/O 'y', expected 'ONNX_TYPE_TENSOR'.",
        ),
        "unbatched": (
            with_bias(),
            "max_batch_size: 4\n" + tensor("output", "y", "FP32", [4]),
            "autofill failed for model 'unbatched': model does not support batching while non-zero "
            "max_batch_size is specified",
        ),
        "mode": (
            ROWS,
            BATCHED + parameters(execution_mode="2"),
            "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got 2",
        ),
    },
)
def test_bad_config_is_refused_in_the_words_of_nvidia(server, log, request, model, config, message):
    name = request.node.callspec.id
    store(server.options.repository, name, model, config and ONE_INSTANCE + config)

    check_refused(server, log, name, message)


def test_lenience_is_that_of_nvidia(server):
    """A value that NVIDIA's backend reads leniently, or ignores on a CPU, does not fail a load."""
    assert load(server, "lenient", ROWS, BATCHED + LENIENT + GPU_ONLY).name == "lenient"


def test_network_that_cannot_be_read_is_named_by_its_path(server, log):
    """`model.onnx` is a folder without the file, or damaged, which ONNX Runtime says in its own words."""
    config = ONE_INSTANCE + 'backend: "onnxruntime"\n' + BATCHED
    missing, broken = (store(server.options.repository, name, ROWS, config) for name in ("missing", "broken"))
    broken.write_bytes(b"no protobuf")
    missing.unlink()
    missing.mkdir()

    check_refused(server, log, "broken", f"onnx runtime error 7: Load model from {broken} failed")
    check_refused(
        server, log, "missing", f"unable to find '{missing / 'model.onnx'}' for model instance 'missing'"
    )


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_gpu_instance_without_a_gpu_is_refused(server):
    """The core refuses the config before any backend sees it."""
    store(server.options.repository, "on_gpu", ROWS, "instance_group { kind: KIND_GPU count: 1 }\n" + BATCHED)

    with connect(server) as client, pytest.raises(InferenceServerException, match="no GPUs are available"):
        client.load_model("on_gpu")


def describe(config: model_config_pb2.ModelConfig) -> list[tuple[str, str, list[int], list[int] | None]]:
    return [
        (
            each.name,
            model_config_pb2.DataType.Name(each.data_type),
            list(each.dims),
            list(each.reshape.shape) if each.HasField("reshape") else None,
        )
        for each in (*config.input, *config.output)
    ]


def batching(config: model_config_pb2.ModelConfig) -> tuple[int, list[int] | None]:
    """Return a config's batch size and those that its dynamic batcher prefers; None without a batcher."""
    batcher = config.dynamic_batching if config.HasField("dynamic_batching") else None
    return config.max_batch_size, batcher and list(batcher.preferred_batch_size)


COMPLETE = [(name, "TYPE_FP32", [4], None) for name in "xy"]


@cases(
    ("model", "config", "batches", "tensors"),
    {
        "no_config": (ROWS, None, (4, [4]), COMPLETE),
        "no_batches": (
            with_bias(),
            "",
            (0, None),
            [
                ("bias", "TYPE_FP32", [4], None),
                ("x", "TYPE_FP32", [-1, 4], None),
                ("y", "TYPE_FP32", [-1, 4], None),
            ],
        ),
        "only_batches": (
            identity("STRING", ["batch"]),
            "",
            (4, [4]),
            [(name, "TYPE_STRING", [1], []) for name in "xy"],
        ),
        "every_datatype": (
            EVERY,
            "",
            (4, [4]),
            [(f"{of}{word}", f"TYPE_{word}", [2], None) for of in ("", "of_") for word in sorted(DATATYPES)],
        ),
    },
)
def test_config_is_completed_from_the_network(server, log, request, model, config, batches, tensors):
    name = request.node.callspec.id
    found = load(server, name, model, config)

    assert (batching(found), describe(found)) == (batches, tensors)
    if batches[0]:
        message = f"autofilled max_batch_size to 4 for model '{name}' since batching is supporrted but no "
        message += "max_batch_size is specified in model configuration. Must specify max_batch_size to "
        message += "utilize autofill with a larger max batch size"
        warnings = wait_until(lambda: [line for line in [*log] if message in line], "the warning")
        assert warnings[0].startswith("W")


@pytest.mark.slow
def test_flags_of_the_server_are_obeyed(tmp_path):
    for folder in ("models", "run"):
        (tmp_path / folder).mkdir()
    store(tmp_path / "models", "rows", ROWS, ONE_INSTANCE)
    store(tmp_path / "models", "sized", ROWS, ONE_INSTANCE + "max_batch_size: 2\n")
    flags = "--backend-config=onnxruntime,default-max-batch-size=16", "--allow-metrics=false"
    inputs = {"x": np.ones((16, 4), np.float32)}

    with serve(tmp_path / "models", tmp_path / "run", *flags) as server, connect(server) as client:
        rows, sized = (client.get_model_config(name).config for name in ("rows", "sized"))
        assert_same(infer(server, "rows", inputs), {"y": inputs["x"]})

    assert (batching(rows), batching(sized)) == ((16, [16]), (2, [2]))
    assert describe(rows) == COMPLETE
