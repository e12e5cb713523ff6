"""Loading ONNX models into the real server: refusals in NVIDIA's words, and configs that are completed.

Each part that can refuse or complete a config has one case; tests/unit/test_onnx_file.py and
tests/unit/test_session_options.py have all.
"""

import re

import onnx
import pytest
from onnx import helper
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from tests.networks import ONE_INSTANCE, connect, identity, network, serve, store, tensor, value
from tests.routes import wait_until
from tests.tables import cases


def with_bias() -> onnx.ModelProto:
    return network(
        [helper.make_node("Sum", ["x", "bias"], ["y"])],
        [value("x", "FP32", ["batch", 4]), value("bias", "FP32", [4])],
        [value("y", "FP32", ["batch", 4])],
    )


ROWS = identity("FP32", ["batch", 4])


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
    # NVIDIA's backend prints the datatype of the wire behind TYPE_.
    datatype=(
        identity("STRING", ["batch", 4]),
        "max_batch_size: 4\n" + tensor("input", "x", "FP32", [4]) + tensor("output", "y", "FP32", [4]),
        "unable to load model 'datatype', configuration expects datatype TYPE_FP32 for input 'x', model "
        "provides TYPE_BYTES",
    ),
    unbatched=(
        with_bias(),
        "max_batch_size: 4\n" + tensor("output", "y", "FP32", [4]),
        "autofill failed for model 'unbatched': model does not support batching while non-zero "
        "max_batch_size is specified",
    ),
)
def test_bad_config_is_refused_in_the_words_of_nvidia(server, log, request, model, config, message):
    name = request.node.callspec.id
    store(server.options.repository, name, model, config and ONE_INSTANCE + config)

    check_refused(server, log, name, message)


def test_network_that_cannot_be_read_is_named_by_its_path(server, log):
    """`model.onnx` is a folder without the file, or damaged, which ONNX Runtime says in its own words."""
    config = ONE_INSTANCE + 'backend: "onnxruntime"\n'
    missing, broken = (store(server.options.repository, name, ROWS, config) for name in ("missing", "broken"))
    broken.write_bytes(b"no protobuf")
    missing.unlink()
    missing.mkdir()

    check_refused(server, log, "broken", f"onnx runtime error 7: Load model from {broken} failed")
    check_refused(
        server, log, "missing", f"unable to find '{missing / 'model.onnx'}' for model instance 'missing'"
    )


def describe(config: model_config_pb2.ModelConfig) -> list[tuple[str, str, list[int]]]:
    name = model_config_pb2.DataType.Name
    return [(each.name, name(each.data_type), list(each.dims)) for each in (*config.input, *config.output)]


def batching(config: model_config_pb2.ModelConfig) -> tuple[int, list[int] | None]:
    """Return a config's batch size and those that its dynamic batcher prefers; None without a batcher."""
    batcher = config.dynamic_batching if config.HasField("dynamic_batching") else None
    return config.max_batch_size, batcher and list(batcher.preferred_batch_size)


@cases(
    ("model", "config", "batches", "tensors"),
    no_config=(ROWS, None, (4, [4]), [("x", "TYPE_FP32", [4]), ("y", "TYPE_FP32", [4])]),
    no_batches=(
        with_bias(),
        "",
        (0, None),
        [("bias", "TYPE_FP32", [4]), ("x", "TYPE_FP32", [-1, 4]), ("y", "TYPE_FP32", [-1, 4])],
    ),
    only_batches=(
        identity("STRING", ["batch"]),
        "",
        (4, [4]),
        [("x", "TYPE_STRING", [1]), ("y", "TYPE_STRING", [1])],
    ),
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
